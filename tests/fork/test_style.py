# SPDX-License-Identifier: Apache-2.0
"""What the patch set changes and adds in the composed tree meets upstream's style."""

import re
import sys
from pathlib import Path

import pytest

from commands import checked, git, run

from fork import patchset

FILES = sorted({
    file
    for patch in patchset.load()
    for file in patch.files + tuple(rule.file for rule in patch.rules) if file.endswith(".py")
})
LICENCE = "# SPDX-License-Identifier: Apache-2.0"


def findings(folder, file):
    """What flake8, with upstream's selection, says of a file, without the line numbers."""
    result = run(sys.executable,
                 "-m",
                 "flake8",
                 "--isolated",
                 "--select=E9,F,W6",
                 "--ignore=F403,F405,F541,F841",
                 "--per-file-ignores=__init__.py:F401",
                 "--format=%(code)s %(text)s",
                 file,
                 cwd=folder)
    return sorted(re.sub(r"line \d+", "line", finding) for finding in result.stdout.splitlines())


@pytest.mark.parametrize("file", FILES)
def test_yapf(file, tree):
    checked(sys.executable,
            "-m",
            "yapf",
            "--style={based_on_style: pep8, column_limit: 119}",
            "--diff",
            file,
            cwd=tree)


@pytest.mark.parametrize("file", FILES)
def test_flake8_finds_nothing_new(file, tree, tmp_path):
    first = git(tree, "rev-list", "--max-parents=0", "HEAD")
    before = []
    if git(tree, "ls-tree", first, file):
        name = Path(file).name  # which flake8's settings go by
        (tmp_path / name).write_text(git(tree, "show", f"{first}:{file}") + "\n")
        before = findings(tmp_path, name)
    assert findings(tree, file) == before


@pytest.mark.parametrize("file", FILES)
def test_licence_and_abstractions(file, tree):
    text = (tree / file).read_text()
    head = text.splitlines()[:6]  # a script has two lines more, for its interpreter
    assert LICENCE in head and "# DeepSpeed Team" in head
    added = git(tree, "diff", "--unified=0", git(tree, "rev-list", "--max-parents=0", "HEAD"), "HEAD", "--", file)
    added = [line for line in added.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added
    for line in added:
        assert "torch.distributed" not in line and "torch.cuda" not in line
        assert line == line.rstrip()
