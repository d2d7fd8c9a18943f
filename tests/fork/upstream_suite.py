# SPDX-License-Identifier: Apache-2.0
"""Run DeepSpeed's own tests on a checkout of it as it is, and with the patch set, and print where they differ.

The tests run on CPU over gloo, one file at a time: first all on the checkout's HEAD, then all on the tree composed of
it. Upstream's suite takes hours; --select gives pytest's -k, and the paths name files or folders below tests/unit.
"""

import argparse
import glob
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from outcomes import ROOT, ended, outcomes

sys.path.insert(0, str(ROOT))

from fork import ForkError, compose, upstream  # noqa: E402

PATHS = ["runtime/zero", "runtime/comm", "checkpoint", "v1/zero"]
SEGMENTS = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*"


def files_of(trees, paths):
    """The test files that both trees have, relative to tests/."""
    stock, forked = ({
        str(file.relative_to(tree / "tests"))
        for path in paths
        for file in ([tree / "tests" / "unit" / path] if path.endswith(".py") else (tree / "tests" / "unit" /
                                                                                    path).rglob("test_*.py"))
        if file.is_file()
    } for tree in trees)
    return sorted(stock & forked)


def remove_segments(before):
    """Remove the shared memory that ended ranks left, 69 MB each; what a process has mapped stays."""
    segments = set(glob.glob(SEGMENTS)) - before  # listed first: those that appear meanwhile are in use
    mapped = set()
    for maps in glob.glob("/proc/[0-9]*/maps"):
        try:
            mapped.update(re.findall(r"/dev/shm/deepspeed_\S+", Path(maps).read_text()))
        except OSError:  # it has ended, or is another user's
            continue
    for segment in segments - mapped:
        Path(segment).unlink(missing_ok=True)


def run(tree, ops, files, options):
    found = {}
    before = set(glob.glob(SEGMENTS))
    for file in files:
        environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1"}
        select = ["-k", options.select] if options.select else []
        result = outcomes(tree,
                          ops, [file],
                          "-p",
                          "no:cacheprovider",
                          *select,
                          environment=environment,
                          cwd=tree / "tests",
                          limit=options.timeout)
        remove_segments(before)
        counts = f"took longer than {options.timeout} s" if result is None else dict(Counter(result.values()))
        print(f"    {file}: {counts}", flush=True)
        found.update({file: "not finished"} if result is None else result)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a git checkout of DeepSpeed, whose HEAD is taken")
    parser.add_argument("paths", nargs="*", default=PATHS, help=f"what to run (default: {' '.join(PATHS)})")
    parser.add_argument("--select", metavar="EXPRESSION", help="run only the tests that pytest's -k selects")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="for each file (default: 600)")
    parser.add_argument("--ranks", type=int, default=2, help="run tests of up to so many ranks (default: 2)")
    options = parser.parse_args()
    work = ROOT / "build" / "upstream-suite"
    try:
        # The trees stand where they always do, as the compiled ops depend on their paths.
        shutil.rmtree(work / "stock", ignore_errors=True)
        shutil.rmtree(work / "fork", ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        upstream.place(work / "stock", str(options.checkout))
        compose.tree(work / "fork", str(options.checkout))
        upstream.as_installed(work / "stock")
        upstream.as_installed(work / "fork")
    except ForkError as error:
        sys.exit(f"error: {error}")
    files = files_of((work / "stock", work / "fork"), options.paths)
    if not files:
        sys.exit(f"error: {options.checkout} has no test files in {', '.join(options.paths)} below tests/unit.")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = scratch
        for name in ("stock", "fork"):
            print(f"{name}:", flush=True)
            found[name] = run(work / name, work / f"ops-{name}", files, options)
    for name in found:
        print(f"{name}: " + ", ".join(f"{number} {how}"
                                      for how, number in sorted(Counter(found[name].values()).items())))
    tests = sorted(set(found["stock"]) | set(found["fork"]))
    differing = [test for test in tests if found["stock"].get(test) != found["fork"].get(test)]
    for test in differing:
        print(
            f"{found['stock'].get(test, 'absent')} on stock, {found['fork'].get(test, 'absent')} on the fork: {test}")
    worse = [test for test in ended(found["stock"], "passed") if found["fork"].get(test) != "passed"]
    print(f"{len(differing)} tests differ; {len(worse)} that pass on stock do not pass on the fork.")
    return 1 if worse or "passed" not in found["stock"].values() else 0


if __name__ == "__main__":
    sys.exit(main())
