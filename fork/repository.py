# SPDX-License-Identifier: Apache-2.0
"""Run git: on a repository of our own nothing of the caller's configuration shows; on the caller's it is used."""

import os
import subprocess
from pathlib import Path

from fork import ForkError

IDENTITY = ("DeepSpeed zero-sized parameters", "zerosized@users.noreply.example")
DATE = "2026-01-01T00:00:00+00:00"  # fixed, so that the same input gives the same commit ids


def git(folder: Path, *arguments: str, author: tuple = IDENTITY, date: str = DATE) -> str:
    """The output of a git command.

    Args:
        author: the name and the e-mail address of who commits.
        date: when; None stands for now.

    Raises:
        ForkError: git is not installed, or the command failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(GIT_CONFIG_GLOBAL=os.devnull,
                       GIT_CONFIG_NOSYSTEM="1",
                       GIT_CEILING_DIRECTORIES=str(folder.parent))
    for role in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{role}_NAME"], environment[f"GIT_{role}_EMAIL"] = author
        if date:
            environment[f"GIT_{role}_DATE"] = date
    return run(folder, environment, *arguments)


def git_of_user(folder: Path, *arguments: str, settings: tuple = ()) -> str:
    """The output of git in a checkout of the user's, with the user's configuration, but not for another repository.

    Args:
        settings: ``name=value`` of each setting that the configuration is not asked for.
    """
    environment = {
        name: value
        for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")
    }
    return run(folder, environment, *arguments, settings=settings)


def run(folder: Path, environment: dict, *arguments: str, settings: tuple = ()) -> str:
    """The output of a git command in an environment of the caller's; the errors are those of :func:`git`."""
    command = ["git", *(part for setting in settings for part in ("-c", setting)), *arguments]
    try:
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ForkError("git is not installed, and a tree is composed as a git repository: install git.") from error
    if result.returncode:
        raise ForkError(f"git {arguments[0]} failed in {folder}: {' '.join(result.stderr.split())}.")
    return result.stdout.strip()
