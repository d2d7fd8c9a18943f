# SPDX-License-Identifier: Apache-2.0
"""Run the unit tests against the release without the patch set: each has to fail, or it tests nothing of ours."""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", type=Path, required=True, help="a folder that the stock release is installed in")
    parser.add_argument("tests", nargs="*", default=["tests/unit"], help="which tests (default: tests/unit)")
    options = parser.parse_args()
    environment = {
        **os.environ,
        "PYTHONPATH": str(options.stock.resolve()),
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "ops" / "stock"),
    }
    print(f"Running {' '.join(options.tests)} on the stock release takes some minutes.", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--tb=no", f"--junit-xml={report.name}"]
        result = subprocess.run(command + options.tests, cwd=ROOT, env=environment, capture_output=True, text=True)
        if result.returncode not in (0, 1):
            sys.exit(f"pytest did not run the tests:\n{result.stdout}{result.stderr}")
        cases = xml.etree.ElementTree.parse(report.name).getroot().iter("testcase")
        outcomes = {f"{case.get('classname')}::{case.get('name')}": {part.tag for part in case} for case in cases}
    failed = [name for name, parts in outcomes.items() if parts & {"failure", "error"}]
    skipped = [name for name, parts in outcomes.items() if "skipped" in parts]
    others = sorted(set(outcomes) - set(failed) - set(skipped))
    print(f"On the stock release {len(failed)} tests fail as they have to; {len(skipped)} cannot run here.")
    for name in others:
        print(f"does not fail on the stock release: {name}")
    return 0 if failed and not others else 1


if __name__ == "__main__":
    sys.exit(main())
