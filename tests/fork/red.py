# SPDX-License-Identifier: Apache-2.0
"""Run the unit tests against the release without the patch set: each has to fail, or it tests nothing of ours."""

import argparse
import sys
from pathlib import Path

from outcomes import ROOT, ended, outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", type=Path, required=True, help="a folder that the stock release is installed in")
    parser.add_argument("tests", nargs="*", default=["tests/unit"], help="which tests (default: tests/unit)")
    options = parser.parse_args()
    print(f"Running {' '.join(options.tests)} on the stock release takes some minutes.", flush=True)
    found = outcomes(options.stock, ROOT / "build" / "ops" / "stock", options.tests)
    failed, others = ended(found, "failed"), sorted(ended(found, "passed"))
    skipped = len(found) - len(failed) - len(others)
    print(f"On the stock release {len(failed)} tests fail as they have to; {skipped} cannot run here.")
    for name in others:
        print(f"does not fail on the stock release: {name}")
    return 0 if failed and not others else 1


if __name__ == "__main__":
    sys.exit(main())
