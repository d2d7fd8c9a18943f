# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""A harness that runs the body of a pytest test in several rank processes.

The hooks in conftest.py call `run_distributed` for each test of a `DistributedTest` class. It has a launcher process,
one for each backend, run the test. The launcher imports DeepSpeed once, forks the ranks, watches them, and cleans up
after them, also when pytest is interrupted or killed: it then finds its connection to pytest closed.
"""

import contextlib
import ctypes
import faulthandler
import gc
import glob
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait

import pytest

# torch and DeepSpeed are imported in functions only, so that ranks that use CUDA are forked from a launcher that has
# not even imported torch.

GRACE = 5  # seconds for ranks to finish after another's failure, or to exit after the test
START_LIMIT = 600  # seconds for a launcher to start, which may compile an op
ACCELERATORS = {"gloo": "cpu", "nccl": "cuda"}  # DS_ACCELERATOR in the ranks, by backend
TAIL = 20  # lines shown of what a rank that did not fail has printed


class DistributedTest:
    """Base class of tests whose methods run in `world_size` processes.

    Fixtures and parameters are set up in the pytest process and passed to the ranks pickled, as is the test's
    instance with its attributes. A fixture or parameter `world_size` goes before the marker of that name, and the
    marker before the attribute. A fixture `backend`, which gives one of `backends`, goes before that attribute.
    """

    backends = ("gloo", "nccl")

    world_size = 2  # or a list: the test runs once at each size
    backend = None  # "gloo" (on CPU), "nccl" (rank i on CUDA device i); default: that of DeepSpeed's accelerator
    init_distributed = True  # whether to call deepspeed.init_distributed in the ranks
    reuse_dist_env = False  # whether the tests of the class share ranks
    requires_cuda_env = True  # whether to skip where DeepSpeed's accelerator is not available
    exec_timeout = None  # seconds a test may take; default: DS_UNITTEST_TIMEOUT, or 600


# In the pytest process

_launchers = {}


def run_distributed(item):
    """Run the test of a pytest item in ranks, at each of its world sizes, and let the item end as they did."""
    from deepspeed.accelerator import get_accelerator
    cls = item.cls
    if cls.requires_cuda_env and not get_accelerator().is_available():
        pytest.skip("DeepSpeed's accelerator is not available")
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    marker = item.get_closest_marker("world_size")
    sizes = arguments.get("world_size", marker.args[0] if marker else cls.world_size)
    sizes = [sizes] if isinstance(sizes, int) else sizes
    job = {
        "backend": item.funcargs.get("backend", cls.backend) or get_accelerator().communication_backend_name(),
        "init_distributed": cls.init_distributed,
        "limit": float(cls.exec_timeout or os.environ.get("DS_UNITTEST_TIMEOUT", 600)),
        "sys_path": sys.path,
        "cwd": os.getcwd(),
        "method": item.originalname,
        "instance": _pickled("test's instance", item.instance),
        "arguments": [(name, _pickled(f"fixture or parameter '{name}'", arguments[name])) for name in arguments],
    }
    job["environ"] = _environ(job["backend"])
    left_out = {}
    for size in sizes:
        try:
            _run_at_size(item, dict(job, world_size=size))
        except pytest.skip.Exception as skipped:
            left_out[size] = skipped.msg
    if len(left_out) == len(sizes):
        pytest.skip("; ".join(dict.fromkeys(left_out.values())))
    for size, reason in left_out.items():
        warnings.warn(f"{item.nodeid} did not run at world size {size}: {reason}")


def shut_down():
    """End the launchers and with them all ranks."""
    for launcher in list(_launchers.values()):
        launcher.close()


def _pickled(what, value):
    try:
        return pickle.dumps(value)
    except Exception as error:
        pytest.fail(f"The {what} cannot be passed to the ranks, as it cannot be pickled: {error}", pytrace=False)


def _environ(backend):
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    if backend in ACCELERATORS:
        environ["DS_ACCELERATOR"] = ACCELERATORS[backend]
    return environ


def _run_at_size(item, job):
    from deepspeed.accelerator import get_accelerator
    backend, size = job["backend"], job["world_size"]
    if backend == "nccl":
        accelerator = get_accelerator()
        devices = accelerator.device_count() if accelerator.device_name() == "cuda" else 0
        if devices < size:
            pytest.skip(f"{size} ranks with NCCL need {size} CUDA devices, there are {devices}")
    key = None
    if item.cls.reuse_dist_env:
        test_class = item.getparent(pytest.Class)
        key = (test_class.nodeid, size)
        test_class.addfinalizer(lambda: backend in _launchers and _launchers[backend].ask("end", key, None))
    launcher = _launchers.get(backend) or _Launcher(backend)
    results = launcher.ask("run", key, job)

    failed = [result for result in results if result["outcome"] not in ("passed", "skipped", "xfailed")]
    for result in results:
        lines = result["output"].splitlines(keepends=True)
        if result not in failed and len(lines) > TAIL:
            lines = [f"[the last {TAIL} of {len(lines)} lines]\n"] + lines[-TAIL:]
        item.add_report_section("call", f"stdout and stderr of rank {result['rank']} of {size}", "".join(lines))
    if failed:
        # A rank that died is what made others fail, even if that was noticed later.
        failed.sort(key=lambda result: (result["outcome"] != "died", result["time"]))
        parts = [f"---- rank {r['rank']} of {size} {r['outcome']} ----\n{r['text']}" for r in failed]
        pytest.fail("\n".join([f"{len(failed)} of {size} ranks failed"] + parts), pytrace=False)
    for outcome, end_as in ("xfailed", pytest.xfail), ("skipped", pytest.skip):
        reasons = dict.fromkeys(result["text"] for result in results if result["outcome"] == outcome)
        if reasons:
            end_as("; ".join(reasons))


class _Launcher:
    """The pytest process's side of a launcher process."""

    def __init__(self, backend):
        self.backend = backend
        self.connection, theirs = multiprocessing.Pipe()
        self.output = tempfile.TemporaryFile()
        start = "import sys; sys.path[:] = sys.argv[3:]; from unit.common import serve; serve(*sys.argv[1:3])"
        command = [sys.executable, "-c", start, str(theirs.fileno()), backend] + sys.path
        self.process = subprocess.Popen(command,
                                        env=_environ(backend),
                                        pass_fds=[theirs.fileno()],
                                        stdin=subprocess.DEVNULL,
                                        stdout=self.output,
                                        stderr=subprocess.STDOUT,
                                        start_new_session=True)
        theirs.close()
        _launchers[backend] = self
        self.limit = START_LIMIT
        self.ask("start", None, None)
        self.limit = None

    def ask(self, *request):
        """Send a request and return its answer; a launcher that does not answer is ended."""
        why = "died"
        try:
            self.connection.send(request)
            if self.connection.poll(self.limit):
                return self.connection.recv()
            why = f"was not ready within {self.limit} s; a 'lock' file below TORCH_EXTENSIONS_DIR can be the cause"
            self.close()
        except (EOFError, ConnectionError):
            self.close()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        self.output.seek(0)
        pytest.fail(f"The process that starts the ranks {why}\n{self.output.read().decode(errors='replace')}", False)

    def close(self):
        """End the launcher, which ends its ranks first."""
        _launchers.pop(self.backend, None)
        self.connection.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # it compiles an op
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()


# In a launcher process


def serve(fd, backend):
    """Answer the requests of the pytest process at the other end of `fd` until that end is closed."""
    parent = Connection(int(fd))
    sys.stdout.reconfigure(line_buffering=True)
    _install_assertion_rewriting()
    if backend == "gloo":
        _preload()
        gc.freeze()  # DeepSpeed collects garbage dozens of times for each engine, and need not look at the modules
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that nothing stops the clean-up
    kept = {}
    try:
        while True:
            request, key, job = parent.recv()
            answer = None
            if request == "run":
                ranks = kept.pop(key, None) or _Ranks(job, parent)
                with contextlib.ExitStack() as stack:
                    stack.callback(ranks.kill)
                    answer = ranks.run(job)
                    if all(result["outcome"] in ("passed", "skipped") for result in answer):
                        if key is None:
                            ranks.end()
                        else:
                            kept[key] = ranks
                            stack.pop_all()
            elif request == "end" and key in kept:
                kept[key].end()
                kept.pop(key).kill()
            parent.send(answer)
    except (EOFError, ConnectionError):
        pass  # pytest has gone
    finally:
        for ranks in kept.values():
            ranks.kill()


def _install_assertion_rewriting():
    """Have the asserts of test modules show their values; it takes a configuration of pytest."""
    from _pytest.config import _prepareconfig
    os.environ.update(PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # the ranks get the environment anew
    _prepareconfig(["-s", "-c", os.devnull, "--rootdir", os.curdir])


def _preload():
    """Import what every rank needs, and load the op that deepspeed.init_distributed uses, compiling it if needed."""
    signal.signal(signal.SIGTERM, _stop_compiling)
    with contextlib.suppress(ImportError):  # the first releases have no Muon
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401: every engine does, and it takes seconds
    from deepspeed.comm.torch import build_shm_op
    build_shm_op()


def _stop_compiling(*_):
    time.sleep(1)  # ninja has got the signal as well, and ends its compilers
    sys.exit(1)  # an exception, on which torch removes its lock file


class _Ranks:
    """The processes of one process group."""

    def __init__(self, job, parent):
        self.parent = parent
        self.environ = job["environ"]
        self.port_holder = self._reserve_port()
        self.ranks = range(job["world_size"])
        self.processes, self.connections, self.outputs = [], [], []
        for rank in self.ranks:
            ours, theirs = multiprocessing.Pipe()
            output = tempfile.TemporaryFile()
            arguments = (rank, self._port(), job, theirs, output, parent)
            process = multiprocessing.get_context("fork").Process(target=_rank_main, args=arguments)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
            self.outputs.append(output)

    def _reserve_port(self):
        """Bind a free port without listening: nobody is given it by chance, yet rank 0 can listen on it."""
        while True:
            self.port_holder = socket.socket()
            self.port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port_holder.bind(("127.0.0.1", 0))
            if not glob.glob(self._segment("*")):
                return self.port_holder

    def _port(self):
        return self.port_holder.getsockname()[1]

    def _segment(self, rank):
        """Where DeepSpeed's op for CPU collectives keeps the shared memory of a rank, which it never removes."""
        return f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{self._port()}_{rank}"

    def run(self, job):
        """Run a test in all ranks and return one result for each, in their order."""
        starts = [self._output_size(rank) for rank in self.ranks]
        for connection in self.connections:
            with contextlib.suppress(ConnectionError):  # a rank that has died is found below
                connection.send(job)
        results = {}
        why = f"had not finished within the limit of {job['limit']:g} s"
        deadline = time.monotonic() + job["limit"]
        while len(results) < len(self.ranks) and time.monotonic() < deadline:
            unfinished = [rank for rank in self.ranks if rank not in results]
            ends = [self.connections[rank] for rank in unfinished]
            ends += [self.processes[rank].sentinel for rank in unfinished]
            # A child process of a rank can keep both ends open after the rank's death, so look again after a while.
            if self.parent in wait([self.parent] + ends, timeout=min(0.2, max(0, deadline - time.monotonic()))):
                raise EOFError  # pytest sends nothing while it waits for the results
            for rank in unfinished:
                result = self._result(rank)
                if result:
                    results[rank] = result
                    if result["outcome"] in ("failed", "died") and time.monotonic() + GRACE < deadline:
                        deadline = time.monotonic() + GRACE
                        why = f"had not finished {GRACE} s after the first failure"
        outputs = [self._output(rank, starts[rank]) for rank in self.ranks]
        for rank, stack in self._stacks([rank for rank in self.ranks if rank not in results]).items():
            text = f"It was killed. Where it stood:\n{stack}"
            results[rank] = {"outcome": why, "text": text, "time": time.monotonic()}
        return [dict(results[rank], rank=rank, output=outputs[rank]) for rank in self.ranks]

    def _result(self, rank):
        code = self.processes[rank].exitcode
        try:
            if self.connections[rank].poll():
                return self.connections[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return {"outcome": "died", "text": f"It {how} before the test had ended.\n", "time": time.monotonic()}

    def _output_size(self, rank):
        return os.fstat(self.outputs[rank].fileno()).st_size

    def _output(self, rank, start):
        return os.pread(self.outputs[rank].fileno(), self._output_size(rank) - start, start).decode(errors="replace")

    def _stacks(self, ranks):
        """Have ranks write the stacks of their threads to their output (see _rank_main) and return them."""
        starts = [self._output_size(rank) for rank in ranks]
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        return {rank: self._output(rank, start) for rank, start in zip(ranks, starts)}

    def end(self):
        """Let ranks that wait for a test exit."""
        for connection in self.connections:
            with contextlib.suppress(ConnectionError):
                connection.send(None)
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))

    def kill(self):
        """Kill what is left of the ranks and their child processes, and remove what they leave behind."""
        leftovers = [lock for process in self.processes for lock in self._locks_held_by(process.pid)]
        leftovers += [self._segment(rank) for rank in self.ranks]
        for process in self.processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        for path in leftovers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for closable in [self.port_holder] + self.connections + self.outputs:
            closable.close()

    def _locks_held_by(self, pid):
        """The lock files of torch's compilation of ops that a process has open: left behind they stop later runs."""
        root = self.environ.get("TORCH_EXTENSIONS_DIR")
        root = os.path.realpath(root) if root else "/torch_extensions/"
        for link in glob.glob(f"/proc/{pid}/fd/*"):
            with contextlib.suppress(OSError):
                path = os.readlink(link)
                if root in path and os.path.basename(path) == "lock":
                    yield path


# In a rank


def _rank_main(rank, port, job, connection, output, parent):
    """Run the tests that come over the connection until None comes."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the launcher
    if multiprocessing.parent_process().pid != os.getppid():
        os._exit(1)
    parent.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    size = str(job["world_size"])
    os.environ.clear()
    os.environ.update(job["environ"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path[:] = job["sys_path"]
    os.chdir(job["cwd"])
    for job in iter(connection.recv, None):
        outcome, text = _attempt(job, rank)
        connection.send({"outcome": outcome, "text": text, "time": time.monotonic()})
    import deepspeed.comm as dist
    if dist.is_initialized():
        dist.destroy_process_group()


def _attempt(job, rank):
    try:
        if job["init_distributed"]:
            import deepspeed
            if not deepspeed.comm.is_initialized():
                deepspeed.accelerator.get_accelerator().set_device(rank)
                deepspeed.init_distributed(dist_backend=job["backend"])
        instance = pickle.loads(job["instance"])
        arguments = {name: pickle.loads(value) for name, value in job["arguments"]}
        getattr(instance, job["method"])(**arguments)
        return "passed", ""
    except pytest.skip.Exception as skipped:
        return "skipped", skipped.msg
    except pytest.xfail.Exception as xfailed:
        return "xfailed", xfailed.msg
    except BaseException:
        return "failed", traceback.format_exc()
