# SPDX-License-Identifier: Apache-2.0
"""What the patch set changes and adds in the composed tree meets upstream's style."""

import re
import sys
from pathlib import Path

import pytest

from commands import PATCHES, checked, git, run

# Every text file that the patch set changes or adds.
ALL_FILES = sorted({file for patch in PATCHES for file in patch.files + tuple(rule.file for rule in patch.rules)})
FILES = [file for file in ALL_FILES if file.endswith(".py")]
# What upstream's hooks ask of a file, and forbid in one. None of our files is among their exceptions.
HEADER = ("SPDX-License-Identifier: Apache-2.0", "DeepSpeed Team")
FORBIDDEN = re.compile(r"torch\.distributed(?!\.nn)|torch\.cuda(?!.*#ignore-cuda)|\.cuda\(\)|\.is_cuda\b|"
                       r"--extra-index-url")


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


def added_lines(tree, file):
    """What the patch set adds to a file, line by line."""
    diff = git(tree, "diff", "--unified=0", git(tree, "rev-list", "--max-parents=0", "HEAD"), "HEAD", "--", file)
    return [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


@pytest.mark.parametrize("file", ALL_FILES)
def test_licence_and_abstractions(file, tree):
    text = (tree / file).read_text()
    comment = "#" if file.endswith(".py") else "//"
    head = text.splitlines()[:6]  # a script has two lines more, for its interpreter
    assert {f"{comment} {line}" for line in HEADER} <= set(head)
    assert text.endswith("\n") and not text.endswith("\n\n") and "\r" not in text
    added = added_lines(tree, file)
    assert added
    for line in added:
        assert not FORBIDDEN.search(line)
        assert line == line.rstrip()


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.name for patch in PATCHES])
def test_codespell(patch, tree, tmp_path):
    """Of the message, the names of the files, and all that the patch set adds to them."""
    (tmp_path / "message").write_text(f"{patch.subject}\n\n{patch.message}\n")
    for file in {*patch.files, *(rule.file for rule in patch.rules)}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("\n".join(added_lines(tree, file)))
    result = run(sys.executable, "-m", "codespell_lib", "--check-filenames", "--check-hidden", "--ignore-regex=\\\\n",
                 "--ignore-words-list=youn,unsupport,noe,cann", tmp_path)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_messages_fit_upstream(tree):
    """A subject that git and GitHub show whole, and lines of a message that git log shows unbroken."""
    for patch in PATCHES:
        assert len(patch.subject) <= 80 and not patch.subject.endswith(".")
        assert max(map(len, patch.message.splitlines())) <= 80
