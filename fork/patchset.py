# SPDX-License-Identifier: Apache-2.0
"""The patch set: what ``patches/series`` and the files it lists say.

A patch file is a stream of YAML documents. The first is the commit: ``subject``, ``message`` and ``files``, the
whole files of this repository that belong to it. Every other document is an ast-grep rule, with two keys of ours in
its ``metadata``: ``matches``, how often the rule has to match (1 if it is left out), and ``applied``, a rule that
matches the code once the change is in.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

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
    rules: tuple


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
    return [_read(folder / f"{name}.yaml", root) for name in names]


def _read(path: Path, root: Path) -> Patch:
    if not path.is_file():
        raise ForkError(f"patches/series lists {path.stem}, but there is no patches/{path.name}.")
    try:
        commit, *rules = yaml.safe_load_all(path.read_text())
        patch = Patch(path.stem, commit["subject"], commit["message"].strip(), tuple(commit.get("files", ())),
                      tuple(_rule(document) for document in rules))
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
