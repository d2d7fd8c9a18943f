# SPDX-License-Identifier: Apache-2.0
"""Compose a tree: a git repository of upstream's pristine source and one commit for each patch."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fork import ROOT, ForkError, patchset, upstream
from fork.repository import git


@dataclass(frozen=True)
class Match:
    """How often a rule matched, before its patch was applied."""
    patch: str
    rule: patchset.Rule
    found: int
    already_applied: bool

    def __str__(self):
        place = f"{self.patch}: rule {self.rule.id} in {self.rule.file}"
        if self.already_applied:
            return f"{place} has nothing to do, upstream already has the change"
        return f"{place} matches {self.found} times, expected {self.rule.matches}"

    @property
    def ok(self):
        return self.found == self.rule.matches and not self.already_applied


def tree(target: Path, source: str = None, root: Path = ROOT) -> bool:
    """Compose into ``target``, unless it holds exactly that already.

    Args:
        source: see :func:`fork.upstream.place`.

    Returns:
        Whether anything had to be composed.

    Raises:
        ForkError: ``target`` is not a tree composed by this function, or was changed since; or any error of
            :func:`fork.upstream.place` and :func:`check`. ``target`` is then as it was.
    """
    target = Path(os.path.abspath(target))
    key = _key(source, root)
    if target.exists():
        composed_from = _composed_from(target)
        if composed_from == key and (source is None or source in upstream.pins(root)):
            return False
        if git(target, "status", "--porcelain") or git(target, "rev-parse", "HEAD") != _config(target, "fork.head"):
            raise ForkError(f"{target} holds changes of yours: keep them elsewhere and remove it, or name another "
                            "folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a composition that was interrupted
    try:
        _compose(partial, source, root)
        git(partial, "config", "fork.key", key)
        git(partial, "config", "fork.head", git(partial, "rev-parse", "HEAD"))
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def check(source: str = None, root: Path = ROOT) -> list:
    """A :class:`Match` for every rule, each taken where its patch applies."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tree"
        upstream.place(folder, source, root)
        matches = []
        for patch in patchset.for_source(patchset.load(root), folder):
            for rule in patch.rules:
                matches.append(_match(folder, patch, rule))
                if matches[-1].ok:
                    _rewrite(folder, rule)
        return matches


def _compose(folder: Path, source: str, root: Path) -> None:
    patches = patchset.load(root)
    upstream.place(folder, source, root)
    git(folder, "init", "--quiet", "--initial-branch=main", "--object-format=sha1")
    exclude = folder / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"/{name}\n" for name in upstream.BUILD_OUTPUTS) + "__pycache__/\n")
    version = (folder / "version.txt").read_text().strip()
    commit(folder, f"DeepSpeed {version}", "Upstream's source as released, without what a build writes into it.")
    for patch in patchset.for_source(patches, folder):
        apply(folder, patch, root)
        commit(folder, patch.subject, patch.message)


def commit(folder: Path, subject: str, body: str, **who) -> None:
    """Commit all that is in ``folder`` but for the outputs of a build; ``who`` are arguments of :func:`git`."""
    git(folder, "add", "--all", "--force", "--", ".", *(f":(exclude){name}" for name in upstream.BUILD_OUTPUTS))
    git(folder, "commit", "--quiet", "--signoff", "--message", subject, "--message", body, **who)


def apply(folder: Path, patch: patchset.Patch, root: Path = ROOT) -> None:
    """Change the source in ``folder`` as a patch says, and add the patch's files.

    Raises:
        ForkError: a rule does not match as often as it says, or the source has another file of the same name.
    """
    for rule in patch.rules:
        apply_rule(folder, patch, rule)
    add_files(folder, patch, root)


def apply_rule(folder: Path, patch: patchset.Patch, rule: patchset.Rule) -> None:
    """Change the source in ``folder`` as one rule of a patch says."""
    match = _match(folder, patch, rule)
    if not match.ok:
        raise ForkError(f"{match}.")
    _rewrite(folder, rule)


def add_files(folder: Path, patch: patchset.Patch, root: Path = ROOT) -> None:
    """Copy the files that belong to a patch into ``folder``."""
    for file in patch.files:
        target = folder / file
        if target.exists() and target.read_bytes() != (root / file).read_bytes():
            raise ForkError(f"{patch.name} adds {file}, but upstream has a file of that name with other contents: "
                            "rename ours, or take what upstream has.")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target)  # with its time, by which a compiled op is known to be up to date


def _match(folder: Path, patch: patchset.Patch, rule: patchset.Rule) -> Match:
    found = _scan(folder, rule, rule.rule)
    return Match(patch.name, rule, found, _scan(folder, rule, rule.applied) > 0)


def _rewrite(folder: Path, rule: patchset.Rule) -> None:
    _ast_grep(folder, rule, {"rule": rule.rule, "fix": rule.fix}, "--update-all")
    path = folder / rule.file  # ast-grep indents the blank lines of a fix too
    path.write_text(re.sub("^[ \t]+$", "", path.read_text(), flags=re.MULTILINE))
    if _scan(folder, rule, rule.applied) != rule.matches:
        raise ForkError(
            f"Rule {rule.id} was applied to {rule.file}, but its 'applied' rule does not match the result.")


def _scan(folder: Path, rule: patchset.Rule, pattern: dict) -> int:
    return len(_ast_grep(folder, rule, {"rule": pattern}, "--json=stream").splitlines())


def _ast_grep(folder: Path, rule: patchset.Rule, body: dict, *options: str) -> str:
    if not (folder / rule.file).is_file():
        return ""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which("ast-grep", path=path)
    if program is None:
        raise ForkError("ast-grep is not installed: pip install ast-grep-cli.")
    inline = json.dumps({"id": rule.id, "language": "Python", **body})
    result = subprocess.run([program, "scan", "--inline-rules", inline, *options, rule.file],
                            cwd=folder,
                            capture_output=True,
                            text=True)
    if result.returncode:
        raise ForkError(f"ast-grep does not take rule {rule.id}: {' '.join(result.stderr.split())}.")
    return result.stdout


def _config(folder: Path, name: str) -> str:
    return git(folder, "config", "--local", name)


def _composed_from(target: Path) -> str:
    with contextlib.suppress(ForkError, NotADirectoryError):
        return _config(target, "fork.key")
    raise ForkError(f"{target} exists and is not a composed tree: remove it or name another folder.")


def _key(source: str, root: Path) -> str:
    """Identifies everything a tree is composed from, but for the contents of a path given as ``source``."""
    digest = hashlib.sha256()
    files = [root / "requirements" / name for name in upstream.PINS] + [root / "patches" / "series"]
    files += sorted((root / "patches").glob("*.yaml")) + sorted((root / "fork").glob("*.py"))
    files += [root / file for patch in patchset.load(root) for file in patch.files]
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    digest.update(str(source).encode())
    return digest.hexdigest()
