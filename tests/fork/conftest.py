# SPDX-License-Identifier: Apache-2.0
"""What the tests of the fork's tooling share: upstream's release, a tree composed of it, a copy of this repository."""

import sys

import pytest

from commands import ROOT, checked, copy_of_repository, fork


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The source distribution of the pinned release, as pip fetches and checks it."""
    folder = tmp_path_factory.mktemp("sdist")
    checked(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=deepspeed", "--require-hashes",
            f"--requirement={ROOT / 'requirements' / 'upstream.txt'}", f"--dest={folder}")
    archive, = folder.iterdir()
    return archive


@pytest.fixture(scope="session")
def tree(tmp_path_factory, sdist):
    """A composed tree."""
    folder = tmp_path_factory.mktemp("composed") / "tree"
    result = fork("tree", folder, "--upstream", sdist)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def repository(tmp_path):
    """A copy of this repository that a test may change."""
    return copy_of_repository(tmp_path / "repository")
