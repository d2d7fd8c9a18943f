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

IDENTITY = ("DeepSpeed zero-sized parameters", "zerosized@users.noreply.example")
DATE = "2026-01-01T00:00:00+00:00"  # fixed, so that the same input gives the same commit ids


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
        if _git(target, "status", "--porcelain") or _git(target, "rev-parse", "HEAD") != _config(target, "fork.head"):
            raise ForkError(f"{target} holds changes of yours: keep them elsewhere and remove it, or name another "
                            "folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a composition that was interrupted
    try:
        _compose(partial, source, root)
        _git(partial, "config", "fork.key", key)
        _git(partial, "config", "fork.head", _git(partial, "rev-parse", "HEAD"))
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
        for patch in patchset.load(root):
            for rule in patch.rules:
                matches.append(_match(folder, patch, rule))
                if matches[-1].ok:
                    _rewrite(folder, rule)
        return matches


def _compose(folder: Path, source: str, root: Path) -> None:
    patches = patchset.load(root)
    upstream.place(folder, source, root)
    _git(folder, "init", "--quiet", "--initial-branch=main", "--object-format=sha1")
    exclude = folder / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"/{name}\n" for name in upstream.BUILD_OUTPUTS) + "__pycache__/\n")
    version = (folder / "version.txt").read_text().strip()
    _commit(folder, f"DeepSpeed {version}", "Upstream's source as released, without what a build writes into it.")
    for patch in patches:
        for rule in patch.rules:
            match = _match(folder, patch, rule)
            if not match.ok:
                raise ForkError(f"{match}.")
            _rewrite(folder, rule)
        for file in patch.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, folder / file)
        _commit(folder, patch.subject, patch.message)


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


def _commit(folder: Path, subject: str, body: str) -> None:
    _git(folder, "add", "--all", "--force", "--", ".", *(f":(exclude){name}" for name in upstream.BUILD_OUTPUTS))
    _git(folder, "commit", "--quiet", "--signoff", "--message", subject, "--message", body)


def _git(folder: Path, *arguments: str) -> str:
    # Nothing of the caller's configuration or surroundings may show in the commits.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(GIT_CONFIG_GLOBAL=os.devnull,
                       GIT_CONFIG_NOSYSTEM="1",
                       GIT_CEILING_DIRECTORIES=str(folder.parent))
    for role in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{role}_NAME"], environment[f"GIT_{role}_EMAIL"] = IDENTITY
        environment[f"GIT_{role}_DATE"] = DATE
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ForkError("git is not installed, and a tree is composed as a git repository: install git.") from error
    if result.returncode:
        raise ForkError(f"git {arguments[0]} failed in {folder}: {' '.join(result.stderr.split())}.")
    return result.stdout.strip()


def _config(folder: Path, name: str) -> str:
    return _git(folder, "config", "--local", name)


def _composed_from(target: Path) -> str:
    with contextlib.suppress(ForkError, NotADirectoryError):
        return _config(target, "fork.key")
    raise ForkError(f"{target} exists and is not a composed tree: remove it or name another folder.")


def _key(source: str, root: Path) -> str:
    """Identifies everything a tree is composed from, but for the contents of a path given as ``source``."""
    digest = hashlib.sha256()
    files = [root / "requirements" / "upstream.txt", root / "patches" / "series"]
    files += sorted((root / "patches").glob("*.yaml")) + sorted((root / "fork").glob("*.py"))
    files += [root / file for patch in patchset.load(root) for file in patch.files]
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    digest.update(str(source).encode())
    return digest.hexdigest()
