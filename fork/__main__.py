# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m fork``."""

import argparse
import sys
from pathlib import Path

from fork import ROOT, ForkError, compose

UPSTREAM = """the DeepSpeed to patch: a version pinned in requirements/upstream.txt (default: the first), a source
distribution (.tar.gz), an unpacked one, or a git checkout, whose HEAD is taken"""


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

    options = parser.parse_args(arguments)
    try:
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
