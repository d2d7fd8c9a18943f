# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m fork``."""

import argparse
import sys
from pathlib import Path

from fork import ROOT, ForkError, compat, compose, export, patchset

UPSTREAM = """the DeepSpeed to patch: a version pinned in requirements/releases.txt (default: the one in
requirements/upstream.txt), a source distribution (.tar.gz), an unpacked one, or a git checkout, whose HEAD is taken"""


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fork",
                                     description="Compose DeepSpeed with zero-sized parameters from an upstream "
                                     "release and the patch set in patches/.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    tree = commands.add_parser("tree",
                               help="compose a tree",
                               description="Compose a git repository: upstream's source as the first commit, then one "
                               "signed-off commit for each patch. Read it with 'git log -p'.")
    tree.add_argument("dir", nargs="?", type=Path, metavar="DIR", help="where to (default: build/tree)")
    tree.add_argument("--upstream", metavar="VERSION_OR_PATH", help=UPSTREAM)

    check = commands.add_parser("check",
                                help="say how often each rule matches",
                                description="Say, rule by rule, how often each matches upstream's source. Exits with "
                                "1 if one does not match as often as its patch says.")
    check.add_argument("--upstream", metavar="VERSION_OR_PATH", help=UPSTREAM)

    out = commands.add_parser("export",
                              help="make a branch of a DeepSpeed checkout",
                              description="Make a branch of a clean git checkout of DeepSpeed, with one commit for "
                              "each patch, signed off by the user of that checkout, and switch to it.")
    out.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a git checkout of DeepSpeed")
    out.add_argument("--base", default="HEAD", metavar="REV", help="the commit to start from (default: HEAD)")
    out.add_argument("--branch", metavar="NAME", help=f"the name of the branch (default: {export.BRANCH})")
    out.add_argument("--only",
                     nargs="+",
                     metavar="NAME",
                     help="take these patches and what they need, whatever the release")
    out.add_argument("--patches",
                     type=Path,
                     metavar="DIR",
                     help="write the commits as files for git am into an empty folder; there is then no branch")

    releases = commands.add_parser("compat",
                                   help="test every pinned release",
                                   description="Compose each release that requirements/ pins, run the stage 3 tests "
                                   "of the patches that apply to it, and print a table. It takes minutes for each.")
    releases.add_argument("versions", nargs="*", metavar="VERSION", help="only these releases")
    releases.add_argument("--tests", default="tests/unit/runtime/zero", metavar="PATH", help="a folder or a test file")
    releases.add_argument("--keyword", metavar="EXPRESSION", help="only the tests that pytest -k takes")

    options = parser.parse_args(arguments)
    if options.command == "export" and options.patches and options.branch is not None:
        parser.error("--patches makes no branch: leave out --branch.")
    try:
        if options.command == "export":
            if options.patches:
                made = export.files(options.checkout, options.patches, options.base, options.only)
                print(f"{len(made)} files for git am in {options.patches}:")
            else:
                name = export.BRANCH if options.branch is None else options.branch
                made = export.branch(options.checkout, options.base, options.only, name)
                print(f"{options.checkout} is on the new branch {name}, with {len(made)} commits:")
            for patch in made:
                needed = options.only and patch.name not in options.only
                print(f"  {patch.subject}{' (needed by the others)' if needed else ''}")
            others = [patch for patch in patchset.load() if patch not in made]
            if others and not options.only:
                print("Left out, as they are not for the release in version.txt; --only takes them all the same:")
                print(*(f"  {patch.name}" for patch in others), sep="\n")
            return 0
        if options.command == "compat":
            failed = 0
            print("| release | patches that apply | tests |\n| --- | --- | --- |", flush=True)
            for version, applied, count, line, well in compat.rows(options.versions, options.tests,
                                                                   ["-k", options.keyword] if options.keyword else []):
                failed += not well
                print(f"| {version} | {applied} of {count} | {line} |", flush=True)
            return 1 if failed else 0
        if options.command == "tree":
            target = options.dir or ROOT / "build" / "tree"
            print(f"{target} composed." if compose.tree(target, options.upstream) else f"{target} is up to date.")
            return 0
        matches = compose.check(options.upstream)
        for match in matches:
            print(f"{'ok  ' if match.ok else 'FAIL'}  {match}")
        return 0 if all(match.ok for match in matches) else 1
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
