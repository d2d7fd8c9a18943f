# SPDX-License-Identifier: Apache-2.0
"""Compose the fork, then hand over to the composed tree's own setup.py."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from fork import LOCAL_VERSION, ForkError, compose  # noqa: E402

TREE = ROOT / "build" / "tree"

try:
    compose.tree(TREE, os.environ.get("DS_UPSTREAM_VERSION"))
except ForkError as error:
    sys.exit(f"error: {error}")

if not os.environ.get("DS_BUILD_STRING"):
    os.environ["DS_BUILD_STRING"] = LOCAL_VERSION
if "editable_wheel" in sys.argv:
    # By a path entry, not by an import hook: Python would ask the hook only after it had taken this checkout's own
    # deepspeed folder, which is no package, for one.
    sys.argv.append("--mode=compat")
os.chdir(TREE)
sys.path[0] = str(TREE)
runpy.run_path("setup.py", run_name="__main__")
