# SPDX-License-Identifier: Apache-2.0
"""Export the patch set to a git checkout of DeepSpeed: a branch of a commit for each patch, or files for git am."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fork import ROOT, ForkError, compose, patchset
from fork.repository import git, git_of_user

BRANCH = "zero-sized-parameters"


def branch(checkout: Path, base: str = "HEAD", names=None, name: str = BRANCH, root: Path = ROOT) -> list:
    """Make a branch of ``checkout`` that adds the patch set to ``base``, and switch to it.

    Args:
        names: the patches to take, which bring what they need; None takes those for the release that version.txt
            names.

    Returns:
        The exported patches, in the order of their commits.

    Raises:
        ForkError: ``checkout`` is not a clean git checkout of DeepSpeed, has no identity to sign off with, has such a
            branch already, or differs from what the patches expect. It is then as it was.
    """
    top, start, author = _look_at(checkout, base)
    if not _names_branch(top, name):
        raise ForkError(f"{name} cannot be the name of a branch: name another with --branch.")
    if git_of_user(top, "for-each-ref", f"refs/heads/{name}"):
        raise ForkError(f"{checkout} has a branch {name} already: delete it, or name another with --branch.")
    with _composed(top, start, author, names, root) as (folder, patches):
        git_of_user(top, "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", str(folder),
                    f"HEAD:refs/heads/{name}")
    no_hooks = (f"core.hooksPath={os.devnull}", )  # one that fails would leave the checkout on the branch
    try:
        git_of_user(top, "switch", "--quiet", "--no-overwrite-ignore", name, settings=no_hooks)
    except ForkError:
        git_of_user(top, "branch", "--quiet", "-D", name)
        if git_of_user(top, "status", "--porcelain"):
            git_of_user(top, "read-tree", "-u", "--reset", "HEAD")
        raise
    return patches


def files(checkout: Path, folder: Path, base: str = "HEAD", names=None, root: Path = ROOT) -> list:
    """Write the commits of :func:`branch` as files for ``git am`` into ``folder``, and leave ``checkout`` alone."""
    top, start, author = _look_at(checkout, base)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ForkError(f"{folder} is not empty: empty it, or name another folder.")
        with _composed(top, start, author, names, root) as (composed, patches):
            written = composed.parent / "patches"
            git(composed, "format-patch", "--quiet", "--no-signature", f"--output-directory={written}", start)
            shutil.copytree(written, folder, dirs_exist_ok=True)
    except OSError as error:
        raise ForkError(f"{folder} cannot be written to ({error.strerror}): name another folder.") from error
    return patches


def _look_at(checkout: Path, base: str) -> tuple:
    """The absolute path of a checkout, the id of the base commit, and who signs off."""
    top = Path(os.path.abspath(checkout))
    if not (top / ".git").exists() or not top.samefile(git_of_user(top, "rev-parse", "--show-toplevel")):
        raise ForkError(f"{checkout} is not a git checkout: clone DeepSpeed and name its folder.")
    if git_of_user(top, "status", "--porcelain"):
        raise ForkError(f"{checkout} has changes that are not committed: commit, stash or remove them first.")
    try:
        start = git_of_user(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
    except ForkError as error:
        raise ForkError(f"{base} is not a commit of {checkout}: name one with --base.") from error
    author = []
    for key in ("user.name", "user.email"):
        with contextlib.suppress(ForkError):  # which says that the key is not set
            author.append(git_of_user(top, "config", key))
    if len(author) < 2 or not all(author):
        raise ForkError(f"{checkout} does not say who signs off: set user.name and user.email with git config.")
    return top, start, tuple(author)


def _names_branch(top: Path, name: str) -> bool:
    with contextlib.suppress(ForkError):
        return git_of_user(top, "check-ref-format", "--branch", name) == name  # "-" is the one before this
    return False


@contextlib.contextmanager
def _composed(top: Path, start: str, author: tuple, names, root: Path):
    """A repository that borrows the objects of ``top`` and has the patches committed on ``start``, and the patches."""
    patches = patchset.load(root)
    patches = patches if names is None else patchset.select(patches, names)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tree"
        folder.mkdir()
        git(folder, "init", "--quiet", "--object-format=sha1")
        objects = top / git_of_user(top, "rev-parse", "--git-path", "objects")
        (folder / ".git" / "objects" / "info" / "alternates").write_text(f"{objects}\n")
        shallow = top / git_of_user(top, "rev-parse", "--git-path", "shallow")
        if shallow.is_file():
            shutil.copy(shallow, folder / ".git" / "shallow")
        git(folder, "checkout", "--quiet", "--detach", start)
        if git(folder, "status", "--porcelain"):
            raise ForkError(
                f"{top} lacks files of {start}, as a partial clone does: check that commit out there once, or "
                "make a full clone.")
        if not (folder / "deepspeed").is_dir() or not (folder / "version.txt").is_file():
            raise ForkError(f"{top} is not a checkout of DeepSpeed: it has no deepspeed folder and version.txt.")
        if names is None:
            patches = patchset.for_source(patches, folder)
        for patch in patches:
            compose.apply(folder, patch, root)
            compose.commit(folder, patch.subject, patch.message, author=author, date=None)
        yield folder, patches
