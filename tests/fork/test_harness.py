# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Tests of tests/unit/common.py: pytest runs on test files written here, and what they report and leave behind."""

import glob
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest

from unit import common

TESTS_DIR = Path(__file__).resolve().parents[1]

# What the test files start with. Each rank leaves an empty file that names its test, rank, size, process and port.
COMMON = '''
import glob, os, signal, subprocess, sys, time
from pathlib import Path
import pytest, torch
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from unit.common import DistributedTest

NOTES = Path(os.environ["HARNESS_NOTES"])

def note():
    test = sys._getframe(1).f_code.co_name
    env = os.environ
    NOTES.joinpath(f"{test} {env['RANK']} {env['WORLD_SIZE']} {os.getpid()} {env['MASTER_PORT']}").touch()

def gone(pid, port):
    stat = Path(f"/proc/{pid}/stat")
    try:
        ended = stat.read_text().rsplit(")")[1].split()[0] == "Z"  # only its exit code is left
    except OSError:
        ended = True
    return ended and not glob.glob(f"/dev/shm/*_127.0.0.1_{port}_*")

class Base(DistributedTest):
    world_size = 2
    backend = "gloo"
'''

MAIN = COMMON + '''
@pytest.fixture(autouse=True)
def clean(request):
    """After every test: its ranks have gone with their shared memory, and this process is as it was."""
    environ = dict(os.environ)
    yield
    environ["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    assert environ == dict(os.environ)
    assert "RANK" not in environ and not dist.is_initialized()
    for name in os.listdir(NOTES):
        test, rank, size, pid, port = name.split()
        if test == request.node.originalname and not getattr(request.cls, "reuse_dist_env", False):
            assert gone(pid, port)

@pytest.fixture
def doubled(number):
    return {"doubled": 2 * number}

@pytest.fixture
def skips():
    pytest.skip("skipped by a fixture")

class TestOutcomes(Base):
    @pytest.fixture(autouse=True)
    def sets_attribute(self):
        self.attribute = "set by an autouse fixture"

    @pytest.mark.parametrize("number", [4])
    def test_arguments(self, tmp_path, number, doubled, default=7):
        assert tmp_path.is_dir() and number == 4 and doubled == {"doubled": 8} and default == 7
        assert self.attribute == "set by an autouse fixture"

    def test_environment(self):
        note()
        rank, env = dist.get_rank(), os.environ
        assert dist.get_world_size() == 2 and env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_SIZE"] == "2" and env["MASTER_ADDR"] == "127.0.0.1"
        assert get_accelerator().device_name() == "cpu" and env["DS_ACCELERATOR"] == "cpu"
        assert torch.get_num_threads() == 1 and env["OMP_NUM_THREADS"] == "1"
        tensor = torch.full((300, 300), rank + 1.) @ torch.ones(300, 300)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [900.]

    def test_environment_of_fixtures(self, monkeypatched):
        assert os.environ["OF_A_FIXTURE"] == "passed on"

    @pytest.fixture
    def monkeypatched(self, monkeypatch):
        monkeypatch.setenv("OF_A_FIXTURE", "passed on")

    def test_fail(self):
        note()
        rank = dist.get_rank()
        for line in range(30):
            print(f"line {line} of rank {rank}")
        os.system("echo from a child process >&2")
        assert rank == 0

    def test_all_fail(self):
        if dist.get_rank() == 0:
            time.sleep(0.5)
        raise ValueError(f"raised in rank {dist.get_rank()}")

    def test_fail_called(self):
        pytest.fail("the reason to fail")

    def test_exit(self):
        sys.exit(3)

    def test_skip(self):
        pytest.skip("the reason to skip")

    def test_skip_by_fixture(self, skips):
        note()

    def test_xfail(self):
        pytest.xfail("the reason to xfail")

    @pytest.mark.xfail(strict=True)
    def test_xfail_marked(self):
        assert dist.get_rank() == 0

    def test_killed(self):
        note()
        if dist.get_rank() == 1:
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_segfault(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_dead_with_child(self):
        note()
        if dist.get_rank() == 1:
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(5)

    def test_left_alone(self):
        note()
        if dist.get_rank() == 0:
            raise ValueError("raised in rank 0")
        subprocess.run(["sleep", "1000"])

    @pytest.mark.parametrize("number", [lambda: 1], ids=["function"])
    def test_unpicklable(self, number):
        note()

class TestHang(Base):
    exec_timeout = 2

    @pytest.fixture
    def extensions(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        yield tmp_path
        assert os.listdir(tmp_path) == ["other"]

    def test_hang(self, extensions):
        note()
        extensions.joinpath("other").touch()
        if dist.get_rank() == 1:
            lock = open(extensions / "lock", "x")
            self.stand_here()

    def stand_here(self):
        time.sleep(1000)

class TestHangByDefault(Base):
    def test_hang_by_default(self):
        note()
        time.sleep(1000)

    @pytest.fixture(autouse=True)
    def limit(self, monkeypatch):
        monkeypatch.setenv("DS_UNITTEST_TIMEOUT", "1.5")

class TestSizes(Base):
    world_size = [1, 3]

    def test_sizes(self):
        note()
        assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])

    @pytest.mark.world_size(1)
    def test_marker(self):
        note()

    @pytest.mark.parametrize("world_size", [1, 2])
    @pytest.mark.world_size(3)
    def test_argument(self, world_size):
        note()
        assert dist.get_world_size() == world_size

    def test_left_out(self):
        if dist.get_world_size() == 1:
            pytest.skip("no use alone")
        note()

    def test_all_left_out(self):
        pytest.skip(f"no use at {dist.get_world_size()}")

    def test_one_fails(self):
        assert dist.get_world_size() == 1

class TestNccl(DistributedTest):
    backend = "nccl"
    world_size = 99

    def test_nccl(self):
        note()

class TestBackendFixture(DistributedTest):
    world_size = 1

    @pytest.fixture(name="backend", autouse=True, params=["gloo", "nccl"])
    def _backend(self, request):
        return request.param

    def test_backend_fixture(self, backend):
        assert get_accelerator().device_name() == {"gloo": "cpu", "nccl": "cuda"}[backend]
        dist.barrier()

class TestWithoutBackend(DistributedTest):
    world_size = 1

    def test_default_backend(self):
        dist.barrier()

class TestOtherBackend(Base):
    backend = "cpu:gloo"  # of its launcher the harness knows no more than of one for NCCL
    world_size = 1

    def test_other_backend(self):
        assert "libtorch" not in Path(f"/proc/{os.getppid()}/maps").read_text()
        dist.barrier()

class TestNotInitialised(Base):
    init_distributed = False

    def test_not_initialised(self):
        note()
        assert not dist.is_initialized() and os.environ["WORLD_SIZE"] == "2"
        import deepspeed
        deepspeed.init_distributed("gloo")
        dist.barrier()

@pytest.fixture
def unavailable(monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_available", lambda: False)

class TestRequiresAccelerator(Base):
    def test_requires_accelerator(self, unavailable):
        note()

class TestRequiresNone(Base):
    requires_cuda_env = False

    def test_requires_none(self, unavailable):
        note()

class Mixin:
    def test_from_mixin(self):
        note()

class TestMixin(Mixin, Base):
    pass

class TestReuse(Base):
    reuse_dist_env = True
    world_size = [1, 2]

    def test_reuse_1(self):
        note()
        print("printed by the first test")

    def test_reuse_2(self):
        note()
        dist.barrier()
        assert dist.get_world_size() == 1, "for the sake of a failure"

    def test_reuse_3(self):
        note()
        dist.barrier()

class TestAfterReuse:
    def test_ended(self):
        assert dist.is_initialized() is False
        names = [name.split() for name in os.listdir(NOTES) if name.startswith("test_reuse")]
        assert len(names) == 9
        for test, rank, size, pid, port in names:
            assert gone(pid, port)

class TestLauncherDies(Base):
    init_distributed = False

    @pytest.fixture(autouse=True)
    def wait_for_ranks(self):
        yield
        time.sleep(1)  # nobody waits for their death

    def test_launcher_dies(self):
        note()
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

class TestLauncherAgain(Base):
    def test_launcher_again(self):
        note()
'''

HANG = COMMON + '''
class TestHang(Base):
    def test_hang(self):
        note()
        if dist.get_rank() == 0:
            subprocess.run(["sleep", "1000"])
        dist.barrier()
'''


def start_pytest(directory, source, **env):
    """Start pytest on a test file with the given source and the harness's hooks."""
    directory.joinpath("notes").mkdir()
    directory.joinpath("test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(directory), "--junitxml=report.xml", "-o", "junit_logging=all", "test_inner.py"]
    paths = [str(TESTS_DIR)] + [path for path in sys.path if path]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), HARNESS_NOTES=str(directory / "notes"), **env)
    for name in "DS_ACCELERATOR", "DS_UNITTEST_TIMEOUT", "PYTEST_ADDOPTS":
        env.pop(name, None)
    output = open(directory / "output.txt", "w")
    return subprocess.Popen(command,
                            cwd=directory,
                            env=env,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            preexec_fn=heed_ctrl_c)


def heed_ctrl_c():
    """Undo that a shell has its background jobs ignore Ctrl-C, and all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def notes(directory):
    """What the ranks noted, sorted: tuples of test, rank, size, pid and port."""
    return sorted(tuple(name.split()) for name in os.listdir(directory / "notes"))


def segments(directory):
    """The shared memory of DeepSpeed's op for the ports the ranks noted."""
    ports = {note[-1] for note in notes(directory)}
    return [path for port in ports for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*")]


def processes(directory):
    """The processes that descend from a run of pytest, which their environment tells."""
    mark = f"HARNESS_NOTES={directory / 'notes'}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            pass  # it has ended
    return found


def wait_until(condition, limit):
    """Wait until the condition holds, and say whether it does."""
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def main_run(tmp_path_factory):
    """The directory of a finished run of MAIN, during which others' shared memory was there."""
    directory = tmp_path_factory.mktemp("main")
    others = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_1_0")
    others.touch()
    try:
        run = start_pytest(directory, MAIN)
        try:
            run.wait(300)
        finally:
            run.kill()
        left = (processes(directory), segments(directory), others.exists())
    finally:
        others.unlink()
    return directory, left


@pytest.fixture
def outcome(main_run):
    """A function from the name of a test in MAIN to its outcome and everything reported of it."""
    report = xml.etree.ElementTree.parse(main_run[0] / "report.xml")

    def of(test):
        cases = [case for case in report.iter("testcase") if case.get("name") == test]
        assert cases, f"{test} did not run"
        elements = [element for case in cases for element in case]
        assert not [element.text for case in cases for element in case.iter("error")]
        kinds = [element.get("type") or element.tag for element in elements if not element.tag.startswith("system-")]
        text = "".join(f"{element.get('message')}\n{element.text}\n" for element in elements)
        return (kinds[0] if kinds else "passed"), text

    return of


PASSING = """
test_arguments[4] test_environment test_environment_of_fixtures test_sizes test_marker test_argument[1]
test_argument[2] test_left_out test_other_backend test_not_initialised test_requires_none test_from_mixin
test_reuse_1 test_reuse_3 test_ended test_launcher_again test_backend_fixture[gloo]
""".split()


@pytest.mark.parametrize("test", PASSING)
def test_passes(outcome, test):
    assert outcome(test)[0] == "passed", outcome(test)[1]


@pytest.mark.parametrize("test, kind, reason", [
    ("test_skip", "pytest.skip", "the reason to skip"),
    ("test_skip_by_fixture", "pytest.skip", "skipped by a fixture"),
    ("test_xfail", "pytest.xfail", "the reason to xfail"),
    ("test_xfail_marked", "pytest.xfail", ""),
    ("test_all_left_out", "pytest.skip", "no use at 1; no use at 3"),
    ("test_requires_accelerator", "pytest.skip", "accelerator is not available"),
])
def test_skips_and_xfails(outcome, test, kind, reason):
    assert outcome(test)[0] == kind
    assert reason in outcome(test)[1]


def test_default_backend(outcome):
    kind, text = outcome("test_default_backend")
    assert kind == "passed" or "need 1 CUDA devices, there are 0" in text


def test_backend_fixture_without_device(outcome):
    kind, text = outcome("test_backend_fixture[nccl]")
    assert kind == "passed" or "need 1 CUDA devices, there are 0" in text


def test_too_few_devices(outcome):
    kind, text = outcome("test_nccl")
    assert kind == "pytest.skip"
    assert re.search(r"99 ranks with NCCL need 99 CUDA devices, there are \d+\n", text)


def test_failure_is_shown(outcome):
    kind, text = outcome("test_fail")
    assert kind == "failure"
    assert "1 of 2 ranks failed" in text and "rank 1 of 2 failed" in text and "rank 0 of 2 failed" not in text
    assert "in test_fail\n    assert rank == 0\nAssertionError: assert 1 == 0\n" in text
    assert "line 0 of rank 1" in text and "from a child process" in text
    assert "line 29 of rank 0" in text and "line 0 of rank 0" not in text


@pytest.mark.parametrize("test, expected", [
    ("test_fail_called", "Failed: the reason to fail"),
    ("test_exit", "SystemExit: 3"),
    ("test_one_fails", "3 of 3 ranks failed"),
    ("test_reuse_2", "for the sake of a failure"),
])
def test_failures(outcome, test, expected):
    kind, text = outcome(test)
    assert kind == "failure"
    assert expected in text


def test_first_failure_comes_first(outcome):
    text = outcome("test_all_fail")[1]
    assert "2 of 2 ranks failed" in text
    assert 0 < text.index("ValueError: raised in rank 1") < text.index("ValueError: raised in rank 0")


@pytest.mark.parametrize("test, how", [
    ("test_killed", "was killed by SIGKILL"),
    ("test_segfault", "was killed by SIGSEGV"),
    ("test_dead_with_child", "exited with code 5"),
])
def test_dead_rank(outcome, test, how):
    kind, text = outcome(test)
    assert kind == "failure"
    assert f"rank 1 of 2 died ----\nIt {how}" in text
    if test == "test_killed":
        assert "about to die" in text
        assert text.index("rank 1 of 2 died") < text.index("rank 0 of 2 failed")


def test_rank_left_alone_is_killed(outcome):
    kind, text = outcome("test_left_alone")
    assert kind == "failure"
    assert "ValueError: raised in rank 0" in text
    assert "rank 1 of 2 had not finished 5 s after the first failure" in text and "in test_left_alone" in text


def test_hang_is_ended(outcome):
    kind, text = outcome("test_hang")
    assert kind == "failure"
    assert "1 of 2 ranks failed" in text and "rank 1 of 2 had not finished within the limit of 2 s" in text
    assert "in stand_here" in text
    kind, text = outcome("test_hang_by_default")
    assert kind == "failure"
    assert "2 of 2 ranks failed" in text and "rank 0 of 2 had not finished within the limit of 1.5 s" in text


def test_unpicklable_is_named(outcome, main_run):
    kind, text = outcome("test_unpicklable[function]")
    assert kind == "failure"
    assert "The fixture or parameter 'number' cannot be passed to the ranks, as it cannot be pickled" in text
    assert "Traceback" not in text


def test_sizes(main_run):
    """Every rank of every size ran, and no other."""
    ranks = {}
    for test, rank, size, *_ in notes(main_run[0]):
        ranks.setdefault(test, []).append((int(rank), int(size)))
    assert ranks["test_sizes"] == [(0, 1), (0, 3), (1, 3), (2, 3)]
    assert ranks["test_marker"] == [(0, 1)]
    assert ranks["test_argument"] == [(0, 1), (0, 2), (1, 2)]
    assert ranks["test_left_out"] == [(0, 3), (1, 3), (2, 3)]
    assert ranks["test_from_mixin"] == ranks["test_requires_none"] == [(0, 2), (1, 2)]
    assert not {"test_unpicklable", "test_skip_by_fixture", "test_nccl", "test_requires_accelerator"} & set(ranks)


def test_left_out_size_is_named(main_run):
    output = main_run[0].joinpath("output.txt").read_text()
    assert "::test_left_out did not run at world size 1: no use alone" in output


def test_reuse(main_run, outcome):
    """Ranks are kept from one test to the next, but those that failed are replaced."""
    pids = {}
    for test, rank, size, pid, port in notes(main_run[0]):
        if test.startswith("test_reuse"):
            pids.setdefault(test, {})[(rank, size)] = pid
    first, second, third = (pids[f"test_reuse_{number}"] for number in (1, 2, 3))
    assert len(first) == 3 and len(set(first.values())) == 3
    assert first == second
    assert third[("0", "1")] == first[("0", "1")]
    assert not {third[("0", "2")], third[("1", "2")]} & set(first.values())
    assert "printed by the first test" in outcome("test_reuse_1")[1]
    assert "printed by the first test" not in outcome("test_reuse_2")[1]


def test_dead_launcher_is_replaced(outcome):
    kind, text = outcome("test_launcher_dies")
    assert kind == "failure"
    assert "The process that starts the ranks died" in text


def test_nothing_is_left(main_run):
    left_processes, left_segments, others_there = main_run[1]
    assert left_processes == []
    assert left_segments == []
    assert others_there


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_nothing(tmp_path, number):
    run = start_pytest(tmp_path, HANG)
    try:
        assert wait_until(lambda: len(notes(tmp_path)) == 2, 120)
        assert len(segments(tmp_path)) == 2
        assert len(processes(tmp_path)) >= 4
        run.send_signal(number)
        assert run.wait(20) == (2 if number == signal.SIGINT else -number)
        if number == signal.SIGKILL:
            assert wait_until(lambda: not processes(tmp_path), 10)
        assert processes(tmp_path) == []
        assert segments(tmp_path) == []
    finally:
        run.kill()


def test_interrupted_compilation_leaves_no_lock(tmp_path):
    locks = tmp_path / "extensions"
    run = start_pytest(tmp_path, HANG, TORCH_EXTENSIONS_DIR=str(locks))
    try:
        assert wait_until(lambda: list(locks.glob("**/lock")), 60)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 2
        assert not list(locks.glob("**/lock"))
        assert processes(tmp_path) == []
    finally:
        run.kill()


def test_stale_lock_is_named(tmp_path, monkeypatch):
    """A launcher that waits for a lock nobody will remove is ended, and the lock is left to whom it belongs."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(common, "START_LIMIT", 0.1)
    with pytest.raises(pytest.fail.Exception, match="was not ready within 0.1 s; a 'lock' file below"):
        common._Launcher("gloo")
    assert common._launchers == {}
    assert lock.exists()
