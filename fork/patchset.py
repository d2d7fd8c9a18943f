# SPDX-License-Identifier: Apache-2.0
"""The patch set: what ``patches/series`` and the files it lists say.

A patch file is a stream of YAML documents. The first is the commit: ``subject``, ``message``, ``files``, the whole
files of this repository that belong to it, ``needs``, the earlier patches without which its rules do not match or its
tests do not pass, ``since``, the first release that has what it mends, and ``before``, the first that has it mended. A
file that the tests of several patches import is listed by each: the first of them to be committed adds it. Every other
document is an ast-grep rule, with two keys of ours in its ``metadata``: ``matches``, how often the rule has to match
(1 if it is left out), and ``applied``, a rule that matches the code once the change is in.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.version import InvalidVersion, Version

from fork import ROOT, ForkError


@dataclass(frozen=True)
class Rule:
    """One place in one upstream file, and what stands there after the patch."""
    id: str
    file: str
    rule: dict
    fix: str
    applied: dict
    matches: int = 1


@dataclass(frozen=True)
class Patch:
    """One upstream commit."""
    name: str
    subject: str
    message: str
    files: tuple
    needs: tuple
    since: Version
    before: Version
    rules: tuple

    @property
    def tests(self):
        """The test files among its files."""
        return tuple(file for file in self.files if Path(file).name.startswith("test_"))

    def applies_to(self, version: str) -> bool:
        """Whether the release of this version has what it mends."""
        return self.since <= Version(version) < self.before


def load(root: Path = ROOT) -> list:
    """The patches of ``root/patches``, in the order of ``root/patches/series``.

    Raises:
        ForkError: a patch file is missing, is not listed, or lacks a key.
    """
    folder = root / "patches"
    lines = (line.strip() for line in (folder / "series").read_text().splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    for path in sorted(folder.glob("*.yaml")):
        if path.stem not in names:
            raise ForkError(f"patches/{path.name} is not in patches/series: list it there or remove it.")
    patches = [_read(folder / f"{name}.yaml", root) for name in names]
    for index, patch in enumerate(patches):
        for name in patch.needs:
            if name not in names[:index]:
                raise ForkError(f"patches/{patch.name}.yaml needs {name}, which patches/series does not list before "
                                f"{patch.name}.")
    return patches


def for_source(patches: list, folder: Path) -> list:
    """Those of ``patches`` that apply to the release whose source ``folder`` holds."""
    version = (folder / "version.txt").read_text().strip()
    try:
        return [patch for patch in patches if patch.applies_to(version)]
    except InvalidVersion as error:
        raise ForkError(
            f"version.txt says {version!r}, which is not a version: take DeepSpeed's source as it is, or name "
            "patches with --only.") from error


def select(patches: list, names) -> list:
    """Those of ``patches`` that ``names`` names, with all that they need, in the order of the series.

    Raises:
        ForkError: there is no patch of a name.
    """
    known = {patch.name: patch for patch in patches}
    wanted, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in known:
            raise ForkError(f"{name} is not a patch; these are: {', '.join(known)}.")
        wanted.add(name)
        waiting += known[name].needs
    return [patch for patch in patches if patch.name in wanted]


def _read(path: Path, root: Path) -> Patch:
    if not path.is_file():
        raise ForkError(f"patches/series lists {path.stem}, but there is no patches/{path.name}.")
    try:
        commit, *rules = yaml.safe_load_all(path.read_text())
        patch = Patch(path.stem, commit["subject"], commit["message"].strip(), tuple(commit.get("files", ())),
                      tuple(commit.get("needs", ())), Version(commit.get("since", "0")),
                      Version(commit.get("before", "9999")), tuple(_rule(document) for document in rules))
    except KeyError as error:
        raise ForkError(f"patches/{path.name} lacks the key {error}.") from error
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ForkError(f"patches/{path.name} cannot be read: {' '.join(str(error).split())}.") from error
    for file in patch.files:
        if not (root / file).is_file():
            raise ForkError(f"patches/{path.name} names {file}, which is not in this repository.")
    return patch


def _rule(document: dict) -> Rule:
    file, = document["files"]
    metadata = document["metadata"]
    return Rule(document["id"], file, document["rule"], document["fix"], metadata["applied"],
                metadata.get("matches", 1))
