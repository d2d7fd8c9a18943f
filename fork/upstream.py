# SPDX-License-Identifier: Apache-2.0
"""Upstream's source: fetch a pinned release through pip, or take it from a path."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fork import ROOT, ForkError
from fork.repository import git_of_user

# The default release, and the others.
PINS = ("upstream.txt", "releases.txt")

# What a build writes into the source tree. A source distribution carries upstream's own copies; ours replace them.
BUILD_OUTPUTS = ("PKG-INFO", "build.txt", "build", "dist", "deepspeed.egg-info",
                 "deepspeed/git_version_info_installed.py")

# The symbolic links of upstream's repository. A source distribution has copies in their place.
LINKS = {
    "deepspeed/accelerator": "accelerator",
    "deepspeed/ops/csrc": "csrc",
    "deepspeed/ops/op_builder": "op_builder"
}

# What setup.py writes there, as far as it can be known without a build.
INSTALLED = """version = "{}"
git_hash = git_branch = "[none]"
installed_ops = {{}}
accelerator_name = ""
torch_info = dict.fromkeys(["version", "cuda_version", "nccl_version", "hip_version"], "0.0")
"""


def pins(root: Path = ROOT) -> dict:
    """``{version: requirement line}`` of the releases that ``requirements/`` pins; the first is the default."""
    lines = [line for name in PINS for line in (root / "requirements" / name).read_text().splitlines()]
    requirements = [line.strip() for line in lines if line.startswith("deepspeed==")]
    return {line.split()[0].removeprefix("deepspeed=="): line for line in requirements}


def place(target: Path, upstream: str = None, root: Path = ROOT) -> None:
    """Put upstream's source, without build outputs, into ``target``, which must not exist.

    Args:
        upstream: a version that ``requirements/`` pins (default: the first), or the path of a source
            distribution, of an unpacked one, or of a git checkout (its HEAD is taken).

    Raises:
        ForkError: the version is not pinned, cannot be had, or does not have the pinned hash; or the path is not
            DeepSpeed's source.
    """
    known = pins(root)
    with tempfile.TemporaryDirectory() as scratch:
        if upstream is None or upstream in known:
            source = _unpack(_download(known[upstream or next(iter(known))], Path(scratch)), Path(scratch))
        elif (Path(upstream) / ".git").exists():
            archive = Path(scratch) / "head.tar"
            _git_archive(Path(upstream), archive)
            source = _unpack(archive, Path(scratch) / "head")
        elif Path(upstream).is_file():
            source = _unpack(Path(upstream), Path(scratch))
        elif Path(upstream).is_dir():
            source = Path(upstream)
        else:
            raise ForkError(f"{upstream} is neither a path nor a version that requirements/releases.txt pins "
                            f"({', '.join(known)}).")
        if not (source / "deepspeed").is_dir() or not (source / "version.txt").is_file():
            raise ForkError(f"{upstream} is not DeepSpeed's source: it has no deepspeed folder and version.txt.")
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    for name in BUILD_OUTPUTS:
        path = target / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name, original in LINKS.items():
        path = target / name
        if path.is_dir() and not path.is_symlink():
            # The copy can hold files that the original lacks, as each is packed by patterns of its own.
            shutil.copytree(path, target / original, dirs_exist_ok=True)
            shutil.rmtree(path)
            path.symlink_to(os.path.relpath(target / original, path.parent), target_is_directory=True)


def as_installed(tree: Path) -> None:
    """Tell the DeepSpeed in ``tree`` its version.

    Without being built it takes itself for 0.0.0, and its own checkpoints for those of very old releases.
    """
    version = (tree / "version.txt").read_text().strip()
    (tree / "deepspeed" / "git_version_info_installed.py").write_text(INSTALLED.format(version))


def _download(requirement: str, folder: Path) -> Path:
    pinned = folder / "pinned.txt"
    pinned.write_text(requirement + "\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--no-binary=deepspeed", f"--dest={folder}", f"--requirement={pinned}"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode == 0:
        archive, = folder.glob("deepspeed-*.tar.gz")
        return archive
    name = requirement.split()[0]
    if "HASHES" in result.stderr:
        raise ForkError(f"The package index serves another {name} than the one requirements/upstream.txt pins by its "
                        "hash: check the index, or the pin.")
    reason = [line for line in result.stderr.splitlines() if line.strip()] or [f"exit status {result.returncode}"]
    reason = next((line for line in reversed(reason) if "error" in line.lower()), reason[-1])
    raise ForkError(
        f"pip could not download {name} ({reason.strip()}): check the network and pip's index settings, or "
        "give the path of its source distribution with --upstream.")


def _unpack(archive: Path, folder: Path) -> Path:
    try:
        with tarfile.open(archive) as tar:
            # Python 3.10 before 3.10.12 knows no filters.
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            tops = {Path(name).parts[0] for name in tar.getnames() if Path(name).parts}
    except (tarfile.TarError, EOFError) as error:
        raise ForkError(f"{archive} is not a source distribution (.tar.gz).") from error
    return folder / tops.pop() if len(tops) == 1 else folder


def _git_archive(checkout: Path, archive: Path) -> None:
    as_stored = ("core.autocrlf=false", "core.eol=lf")
    git_of_user(checkout, "archive", f"--output={archive.resolve()}", "HEAD", settings=as_stored)
