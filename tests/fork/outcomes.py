# SPDX-License-Identifier: Apache-2.0
"""Run unit tests on a DeepSpeed in a folder, and say how each ended."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def _ended_by_sigterm():
    """Let SIGTERM end this process as an exit, which ends the tests as well."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_ended_by_sigterm()
def outcomes(folder, ops, tests, *options, environment=None, cwd=ROOT, limit=None):
    """``{test: "passed", "failed" or "skipped"}`` of a run of pytest on the ``deepspeed`` in ``folder``.

    Args:
        ops: the folder for the C++ ops that DeepSpeed compiles.
        tests: what to give to pytest, with ``options``, in the folder ``cwd``.
        limit: how many seconds the run may take; if it takes longer, the result is None.
    """
    variables = {
        **os.environ, "PYTHONPATH": str(Path(folder).resolve()),
        "TORCH_EXTENSIONS_DIR": str(ops),
        **(environment or {})
    }
    with tempfile.NamedTemporaryFile(suffix=".xml") as report, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "--tb=no", f"--junit-xml={report.name}", *options, *tests]
        process = subprocess.Popen(command,
                                   cwd=cwd,
                                   env=variables,
                                   stdin=subprocess.DEVNULL,
                                   stdout=output,
                                   stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # after the limit, Ctrl-C or SIGTERM
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # 2 stands for modules that could not be imported, which the report names; 5 for no test at all.
        if code not in (0, 1, 2, 5) or not Path(report.name).stat().st_size:
            output.seek(0)
            sys.exit(f"pytest did not run the tests:\n{output.read()}")
        cases = xml.etree.ElementTree.parse(report.name).getroot().iter("testcase")
        parts = {f"{case.get('classname')}::{case.get('name')}": {part.tag for part in case} for case in cases}
    return {test: _outcome(tags) for test, tags in parts.items()}


def _outcome(tags):
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def ended(found, outcome):
    """The tests that ended so."""
    return [test for test, how in found.items() if how == outcome]
