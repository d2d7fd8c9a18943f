# SPDX-License-Identifier: Apache-2.0
"""The example of CONTRIBUTING.md does what it says."""

import re
import sys

from commands import ROOT, checked, fork, git, run

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAME = "show-sparse-tensor-without-entries"
TEST = "tests/unit/runtime/test_sparse_tensor_without_entries.py"


def block(language):
    found, = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return found


def test_example(repository, tree, tmp_path):
    assert f"`patches/{NAME}.yaml`" in TEXT and f"`{TEST}`" in TEXT
    (repository / TEST).write_text(block("python"))
    (repository / "patches" / f"{NAME}.yaml").write_text(block("yaml"))
    series = repository / "patches" / "series"
    series.write_text(series.read_text() + f"{NAME}\n")

    checkout = tmp_path / "checkout"
    checked("git", "clone", "--quiet", "--shared", tree, checkout)
    for setting in ("user.name=Ann Exporter", "user.email=ann@example.com"):
        git(checkout, "config", *setting.split("=", 1))
    git(checkout, "checkout", "--quiet", "-B", "main", git(tree, "rev-list", "--max-parents=0", "HEAD"))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", repository / TEST]
    # The released source, unlike a checkout, does not tell git to ignore bytecode.
    environment = {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    before = run(*tests, cwd=tmp_path, env=environment)
    assert before.returncode == 1 and "ZeroDivisionError" in before.stdout
    result = fork("export", checkout, "--branch", "show-sparse", "--only", NAME, cwd=repository)
    assert result.returncode == 0, result.stderr
    assert git(checkout, "log", "--format=%s", "main..show-sparse") == "Show sparse tensors without entries"
    checked(*tests, cwd=tmp_path, env=environment)
