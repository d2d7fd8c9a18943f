# SPDX-License-Identifier: Apache-2.0
"""Run unit tests on a DeepSpeed in a folder, and say how each ended."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def outcomes(folder, ops, tests, *options, environment=None):
    """``{test: "passed", "failed" or "skipped"}`` of a run of pytest on the ``deepspeed`` in ``folder``.

    Args:
        ops: the folder for the C++ ops that DeepSpeed compiles.
        tests: what to give to pytest, with ``options``.
    """
    variables = {
        **os.environ, "PYTHONPATH": str(Path(folder).resolve()),
        "TORCH_EXTENSIONS_DIR": str(ops),
        **(environment or {})
    }
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--tb=no", f"--junit-xml={report.name}", *options, *tests]
        result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        # 2 stands for modules that could not be imported, which the report names.
        if result.returncode not in (0, 1, 2) or not Path(report.name).stat().st_size:
            sys.exit(f"pytest did not run the tests:\n{result.stdout}{result.stderr}")
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
