# SPDX-License-Identifier: Apache-2.0
"""Compose every pinned release and run the tests of the patches that apply to it."""

import os
import subprocess
import sys
from pathlib import Path

from fork import ROOT, ForkError, compose, patchset, upstream

FOLDER = ROOT / "build" / "compat"


def rows(versions=None, tests: str = "tests/unit/runtime/zero", options=()):
    """Yield ``(version, patches that apply, patches, closing line of pytest, whether all is well)`` for each release.

    Args:
        versions: which releases; None takes all that ``requirements/`` pins.
        tests: the folder or the test file to run, of the tests that belong to the patches that apply.
        options: passed on to pytest.

    Raises:
        ForkError: no test is left to run; or any error of :func:`fork.compose.tree`.
    """
    patches = patchset.load()
    for version in versions or upstream.pins():
        # One folder for all, since the ops that DeepSpeed compiles are known by the path of their source.
        tree = FOLDER / "tree"
        compose.tree(tree, version)
        upstream.as_installed(tree)
        applied = patchset.for_source(patches, tree)
        files = [file for patch in applied for file in patch.tests if file.startswith(tests)]
        if not files:
            raise ForkError(
                f"None of the patches that apply to {version} has a test in {tests}: name another path with "
                "--tests.")
        environment = dict(os.environ, PYTHONPATH=str(tree), TORCH_EXTENSIONS_DIR=str(FOLDER / "ops"))
        command = [sys.executable, "-m", "pytest", "--quiet", "--tb=no", *options, *files]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = (result.stdout + result.stderr).strip().splitlines() or [f"pytest exited with {result.returncode}"]
        Path(FOLDER / f"{version}.log").write_text(result.stdout + result.stderr)
        yield version, len(applied), len(patches), lines[-1], result.returncode == 0
