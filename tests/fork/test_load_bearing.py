# SPDX-License-Identifier: Apache-2.0
"""``make load-bearing`` on two patches made up for it, one of which builds on the other."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import edit, run

FIRST = """subject: Divide by one at least
message: For a test.
files: [tests/unit/test_first.py]
---
id: divisor
language: Python
files: [deepspeed/runtime/sparse_tensor.py]
rule: {pattern: dense_size / sparse_size}
fix: dense_size / max(sparse_size, 1)
metadata: {applied: {pattern: "max(sparse_size, $LEAST)"}}
---
id: idle
language: Python
files: [deepspeed/runtime/sparse_tensor.py]
rule: {pattern: "dense_size / max(sparse_size, 1)"}
fix: (dense_size / max(sparse_size, 1))
metadata: {applied: {pattern: "(dense_size / max(sparse_size, $LEAST))"}}
"""
SECOND = """subject: Divide by two at least
message: For a test.
needs: [first]
files: [tests/unit/test_second.py]
---
id: larger-divisor
language: Python
files: [deepspeed/runtime/sparse_tensor.py]
rule: {pattern: "max(sparse_size, 1)"}
fix: max(sparse_size, 2)
metadata: {applied: {pattern: "max(sparse_size, 2)"}}
"""
TEST = """import importlib.util
import runpy
from pathlib import Path


def test_{name}():
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    assert "max(sparse_size, {part}" in (folder / "runtime" / "sparse_tensor.py").read_text()
    assert runpy.run_path(folder / "git_version_info_installed.py")["version"] > "0.17"
"""


@pytest.fixture(name="made_up")
def _made_up(repository):
    shutil.rmtree(repository / "patches")
    (repository / "patches").mkdir()
    (repository / "patches" / "series").write_text("first\nsecond\n")
    for name, patch, part in (("first", FIRST, ""), ("second", SECOND, "2")):
        (repository / "patches" / f"{name}.yaml").write_text(patch)
        (repository / "tests" / "unit" / f"test_{name}.py").write_text(TEST.format(name=name, part=part))
    return repository


def load_bearing(repository, *arguments):
    result = run(sys.executable, "tests/fork/load_bearing.py", *arguments, cwd=repository, env={"PYTHONPATH": ""})
    assert result.stderr == ""
    return result.returncode, result.stdout


def test_each_rule(made_up):
    code, output = load_bearing(made_up)
    assert code == 1
    assert "ok    without divisor, with idle, which builds on it one fails" in output
    assert "ok    without larger-divisor one fails" in output
    assert output.count("ok    with the patch set 1 of its tests pass") == 2
    assert output.count("ok    on the release all fail") == 2
    assert "ok    pass with no more than it needs (first)" in output
    assert "ok    without first, which it needs, a rule does not match" in output
    failed = [line for line in output.splitlines() if line.startswith("  FAIL")]
    assert failed == ["  FAIL  without idle none fails"]

    edit(made_up / "patches" / "first.yaml", FIRST[FIRST.index("---\nid: idle"):], "")
    code, output = load_bearing(made_up, "first")
    assert (code, "FAIL" in output) == (0, False)
    assert "ok    without divisor one fails" in output


def test_needs(made_up):
    """A patch names another that it does not build on, and then one that its test depends on."""
    second = made_up / "patches" / "second.yaml"
    edit(second, '{pattern: "max(sparse_size, 1)"}', "{pattern: b.values}")
    code, output = load_bearing(made_up, "second")
    assert code == 1
    assert [line for line in output.splitlines()
            if line.startswith("  FAIL")] == ["  FAIL  without first, which it needs, none fails"]

    test = made_up / "tests" / "unit" / "test_second.py"
    test.write_text(test.read_text() + TEST.format(name="both", part="1"))
    code, output = load_bearing(made_up, "second")
    assert (code, "FAIL" in output) == (0, False)
    assert "ok    without first, which it needs, one fails" in output


def test_whole_patches(made_up):
    code, output = load_bearing(made_up, "--whole")
    assert code == 0
    assert "ok    without the patch, with second, which needs it, 1 of its tests fail" in output
    assert "ok    without the patch 1 of its tests fail" in output
    assert output.count("ok    and 0 of patches that do not need it") == 2

    edit(made_up / "patches" / "second.yaml", "needs: [first]\n", "")
    code, output = load_bearing(made_up, "--whole", "first")
    assert code == 1
    assert "FAIL  patches/second.yaml does not match without it, and does not say that it needs it" in output


def test_tests_of_other_patches(made_up):
    """A test that fails without a patch that it does not belong to, and that its own patch does not need."""
    test = made_up / "tests" / "unit" / "test_first.py"
    test.write_text(test.read_text().replace("sparse_size, ", "sparse_size, 2"))
    code, output = load_bearing(made_up, "--whole", "second")
    assert code == 1
    assert "FAIL  and 1 of patches that do not need it" in output and "test_first" in output


def test_name_of_no_patch(made_up):
    result = run(sys.executable, "tests/fork/load_bearing.py", "absent", cwd=made_up)
    assert result.returncode == 1
    assert result.stderr == "error: absent is not a patch; these are: first, second.\n"


def test_ended_early(made_up):
    """Whoever ends the command ends the tests with it."""
    written = made_up / "pid"
    (made_up / "tests" / "unit" / "test_first.py"
     ).write_text(f"import os, time\nopen({str(written)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    command = [sys.executable, "tests/fork/load_bearing.py", "first"]
    with subprocess.Popen(command, cwd=made_up, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 120
        while not written.exists() or not written.read_text():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 1
        assert process.stderr.read() == b"terminated\n"
    assert not Path(f"/proc/{written.read_text()}").exists()
