# SPDX-License-Identifier: Apache-2.0
"""Leave out one rule of a patch at a time, or one patch, and see which tests fail: every rule has to be missed.

For each patch its own tests run, up to the first failure: with the patch set (all have to pass), with the patch and
no more than it needs (likewise), without each patch that it needs (its rules do not match, or one has to fail), on the
release (all have to fail), and without each of its rules (one has to fail; a comment that a rule corrects is not
tested).
With --whole all tests run, without the patch: tests of its own have to fail, and no others. Left out with a rule or a
patch is what builds on it: the rules that do not match without it, and the patches that need it. The release is the
pinned one, or else the newest one that the patch applies to.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
import time
from pathlib import Path

from outcomes import ROOT, ended, outcomes

sys.path.insert(0, str(ROOT))

from fork import ForkError, compose, patchset, upstream  # noqa: E402

FOLDER = ROOT / "build" / "load-bearing"
LIMIT = {"DS_UNITTEST_TIMEOUT": "120"}  # a rank can wait for ever for what was left out


class Variant:
    """A release with some of the rules, always in the same folder, so that the C++ ops are compiled once."""

    def __init__(self, release):
        self.release = release
        self.stock, self.tree, self.site = (FOLDER / name for name in ("stock", "tree", "site"))
        pin, stamp = upstream.pins()[release], FOLDER / "pin"
        if not stamp.is_file() or stamp.read_text() != pin:
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir(parents=True)
            upstream.place(self.stock, release)
            shutil.copytree(self.stock, self.tree, symlinks=True)
            # As installed: without op_builder and accelerator beside deepspeed.
            self.site.mkdir()
            (self.site / "deepspeed").symlink_to("../tree/deepspeed")
            stamp.write_text(pin)
        upstream.as_installed(self.stock)
        self.patches = patchset.for_source(patchset.load(), self.stock)

    def compose(self, selected, without=frozenset()):
        """Put a variant into the folder, and return the (patch, rule) pairs that were left out with ``without``."""
        dropped = []
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for file in {rule.file for patch in selected for rule in patch.rules}:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.stock / file, folder / file)
            for patch in selected:
                for rule in patch.rules:
                    if (patch.name, rule.id) not in without and not self._apply(folder, patch, rule, bool(without)):
                        dropped.append((patch.name, rule.id))
                compose.add_files(folder, patch)
            self._take_over(folder)
        return dropped

    @staticmethod
    def _apply(folder, patch, rule, may_fail):
        try:
            compose.apply_rule(folder, patch, rule)
        except ForkError:
            if not may_fail:
                raise
            return False
        return True

    def _take_over(self, changed):
        """Give the tree's files the contents they have in ``changed`` or else in the release; touch no others."""
        for path in [path for path in self.tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]:
            name = path.relative_to(self.tree)
            if not (changed / name).exists() and not (self.stock / name).exists():
                path.unlink()
        for source in (self.stock, changed):
            for path in [path for path in source.rglob("*") if path.is_file()]:
                name = path.relative_to(source)
                if source == self.stock and (changed / name).exists():
                    continue
                target = self.tree / name
                if not target.exists() or not filecmp.cmp(path, target, shallow=False):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target)

    def run(self, tests, *options, limit=LIMIT):
        return outcomes(self.site, FOLDER / "ops", tests, "-p", "no:cacheprovider", *options, environment=limit)


class Report:
    """Prints one line for each thing that was tried."""

    def __init__(self):
        self.faults = 0

    def say(self, good, text, tests=()):
        self.faults += not good
        print(f"  {'ok  ' if good else 'FAIL'}  {text}", flush=True)
        for test in tests:
            print(f"          {test}", flush=True)


def shown(tests, number=3):
    return tests[:number] + [f"and {len(tests) - number} more"] * (len(tests) > number)


def dependants(patches, name):
    """The names of the patches that need the one of this name, itself included."""
    return {patch.name for patch in patches if name in {p.name for p in patchset.select(patches, [patch.name])}}


def check_rules(variant, patch, report):
    patches = variant.patches
    if not patch.tests:
        return report.say(False, "has no tests among its files")
    variant.compose(patches)
    found = variant.run(patch.tests, limit=None)  # which also compiles the C++ ops
    good = "passed" in found.values() and "failed" not in found.values()
    report.say(
        good, f"with the patch set {len(ended(found, 'passed'))} of its tests pass, "
        f"{len(ended(found, 'skipped'))} cannot run here", shown(ended(found, "failed")))
    if not good:
        return None

    selected = patchset.select(patches, [patch.name])
    variant.compose(selected)
    failed = ended(variant.run(patch.tests, "-x"), "failed")
    report.say(
        not failed, f"{'fail' if failed else 'pass'} with no more than it needs "
        f"({', '.join(patch.needs) or 'nothing'})", failed)

    for need in patch.needs:
        without = dependants(patches, need) - {patch.name}
        rest = [each for each in patches if each.name not in without]
        unmatched = variant.compose(rest, {(need, None)})
        failed = [] if unmatched else ended(variant.run(patch.tests, "-x"), "failed")
        outcome = "a rule does not match" if unmatched else "one fails" if failed else "none fails"
        report.say(bool(unmatched or failed), f"without {need}, which it needs, {outcome}", failed)

    variant.compose([])
    passed = ended(variant.run(patch.tests), "passed")
    report.say(not passed, f"on the release {'not ' if passed else ''}all fail", shown(passed))

    for rule in patch.rules:
        if rule.rule.get("kind") == "comment":
            report.say(True, f"{rule.id} changes a comment only")
            continue
        names = [each for _, each in variant.compose(selected, {(patch.name, rule.id)})]
        with_it = f", with {', '.join(names)}, which {'builds' if len(names) == 1 else 'build'} on it" * bool(names)
        failed = ended(variant.run(patch.tests, "-x"), "failed")
        report.say(bool(failed), f"without {rule.id}{with_it} {'one fails' if failed else 'none fails'}", failed)
    return None


def check_whole(variant, patch, report, everything):
    patches = variant.patches
    if not patch.rules:
        return report.say(True, "only adds tests")
    without = dependants(patches, patch.name)
    remaining = [each for each in patches if each.name not in without]
    try:
        dropped = variant.compose(remaining, {(patch.name, None)})
        failed = [test for test in ended(variant.run(everything), "failed")]
    finally:
        variant.compose(patches)
    for name in sorted({name for name, _ in dropped}):
        report.say(False, f"patches/{name}.yaml does not match without it, and does not say that it needs it")
    own, of_dependants = ([test for test in failed if belongs(test, files)]
                          for files in (patch.tests, [t for p in patches if p.name in without for t in p.tests]))
    others = [test for test in failed if test not in of_dependants]
    left = sorted(without - {patch.name})
    with_it = f", with {', '.join(left)}, which {'needs' if len(left) == 1 else 'need'} it," * bool(left)
    report.say(bool(own), f"without the patch{with_it} {len(own)} of its tests fail", shown(own))
    report.say(not others, f"and {len(others)} of patches that do not need it", others)
    return None


def belongs(test, files):
    return test.split("::")[0].startswith(tuple(file.removesuffix(".py").replace("/", ".") for file in files))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="leave out whole patches, and run all tests")
    parser.add_argument("patches", nargs="*", help="which patches (default: all)")
    options = parser.parse_args()
    try:
        patches, variant, report = patchset.load(), None, Report()
        known = patchset.select(patches, options.patches or [patch.name for patch in patches])
        for patch in known:
            if options.patches and patch.name not in options.patches:
                continue
            start = time.monotonic()
            release = next(version for version in upstream.pins() if patch.applies_to(version))
            if variant is None or variant.release != release:
                variant = Variant(release)
            print(f"{patch.name} (DeepSpeed {release})", flush=True)
            if options.whole:
                check_whole(variant, patch, report, [file for each in variant.patches for file in each.tests])
            else:
                check_rules(variant, patch, report)
            print(f"        ({time.monotonic() - start:.0f} s)", flush=True)
    except ForkError as error:
        sys.exit(f"error: {error}")
    print(f"{report.faults} faults." if report.faults else "Every part is needed.")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
