# SPDX-License-Identifier: Apache-2.0
"""The commands that the tests of the fork's tooling run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fork import patchset, upstream

ROOT = Path(__file__).resolve().parents[2]
# The patches that apply to the pinned release.
PATCHES = [patch for patch in patchset.load() if patch.applies_to(next(iter(upstream.pins())))]


def run(*command, cwd=ROOT, env=None):
    """The finished process of a command; its output is text."""
    # DeepSpeed prints which accelerator it found, unless it is told.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **(env or {})}
    return subprocess.run([str(part) for part in command],
                          cwd=cwd,
                          env=environment,
                          stdin=subprocess.DEVNULL,
                          capture_output=True,
                          text=True)


def checked(*command, **where):
    """The output of a command that has to succeed."""
    result = run(*command, **where)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def fork(*arguments, cwd=ROOT, env=None):
    """``python -m fork`` with these arguments, of the checkout ``cwd``."""
    return run(sys.executable, "-m", "fork", *arguments, cwd=cwd, env={"PYTHONPATH": "", **(env or {})})


def git(folder, *arguments):
    return checked("git", *arguments, cwd=folder).strip()


def copy_of_repository(target):
    """Copy what git tracks here, and what it would, as a repository of one commit."""
    files = checked("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for file in filter(lambda file: (ROOT / file).is_file(), files):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, target / file)
    git(target, "init", "--quiet", "--initial-branch=main")
    git(target, "add", "--all")
    git(target, "-c", "user.name=Tester", "-c", "user.email=tester@example.com", "commit", "--quiet", "-m", "Copy")
    return target


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def assert_error(result, *parts):
    """One sentence on stderr that has all the parts, and no traceback."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
