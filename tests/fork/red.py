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
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--quiet", "--tb=no", "--no-summary", f"--junit-xml={report.name}"]
        subprocess.run(command + options.tests, cwd=ROOT, env=environment)
        cases = xml.etree.ElementTree.parse(report.name).getroot().iter("testcase")
        outcomes = {f"{case.get('classname')}::{case.get('name')}": {part.tag for part in case} for case in cases}
    failed = [name for name, parts in outcomes.items() if "failure" in parts]
    skipped = [name for name, parts in outcomes.items() if "skipped" in parts]
    others = sorted(set(outcomes) - set(failed) - set(skipped))
    print(f"On the stock release {len(failed)} tests fail as they have to; {len(skipped)} cannot run here.")
    for name in others:
        print(f"does not fail on the stock release: {name}")
    return 0 if failed and not others else 1


if __name__ == "__main__":
    sys.exit(main())
