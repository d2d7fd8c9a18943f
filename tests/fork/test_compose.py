# SPDX-License-Identifier: Apache-2.0
"""``python -m fork tree`` and ``python -m fork check``: what they compose, and what they say when they cannot."""

import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from commands import PATCHES, ROOT, assert_error, checked, edit, fork, git, names_in

from fork import patchset, upstream

COORDINATOR = "deepspeed/runtime/zero/partitioned_param_coordinator.py"


class TestTree:

    def test_first_commit_is_the_pristine_release(self, tree, sdist):
        first = git(tree, "rev-list", "--max-parents=0", "HEAD")
        with tarfile.open(sdist) as tar:
            released = {member.name.partition("/")[2]: member for member in tar.getmembers() if member.isfile()}
            generated = re.compile(r"PKG-INFO|build\.txt|deepspeed\.egg-info/.*|"
                                   r"deepspeed/git_version_info_installed\.py")
            expected = {name for name in released if not generated.fullmatch(name)}
            # A source distribution holds these folders twice, upstream's repository a link in place of the second.
            for link, original in upstream.LINKS.items():
                inside = {name for name in expected if name.startswith(f"{link}/")}
                expected = expected - inside | {original + name.removeprefix(link) for name in inside}
            files = set(git(tree, "ls-tree", "-r", "--name-only", first).splitlines())
            assert files == expected | set(upstream.LINKS)
            expected &= set(released)
            for name in sorted(expected)[::97]:
                contents = subprocess.run(["git", "show", f"{first}:{name}"], cwd=tree, capture_output=True).stdout
                assert contents == tar.extractfile(released[name]).read()

    def test_one_signed_off_commit_for_each_patch(self, tree):
        subjects = git(tree, "log", "--reverse", "--format=%s").splitlines()
        assert subjects == ["DeepSpeed 0.19.8"] + [patch.subject for patch in PATCHES]
        added = set()
        for number, patch in reversed(list(enumerate(reversed(PATCHES)))):
            message = git(tree, "log", "-1", "--format=%B", f"HEAD~{number}")
            assert patch.message in message
            assert message.splitlines()[-1].startswith("Signed-off-by: ")
            changed = set(git(tree, "show", "--format=", "--name-only", f"HEAD~{number}").splitlines())
            assert changed == set(patch.files) - added | {rule.file for rule in patch.rules}
            added |= set(patch.files)

    def test_work_tree_is_clean(self, tree):
        assert git(tree, "status", "--porcelain") == ""

    def test_same_input_gives_the_same_commits_whatever_the_surroundings(self, tree, sdist, tmp_path):
        config = tmp_path / "gitconfig"
        config.write_text("[core]\n\tautocrlf = true\n\texcludesFile = /dev/null\n[commit]\n\tgpgSign = true\n"
                          "[user]\n\tname = Somebody\n[init]\n\tdefaultBranch = other\n")
        surroundings = {
            "GIT_CONFIG_GLOBAL": str(config),
            "GIT_AUTHOR_NAME": "Somebody Else",
            "GIT_DIR": str(tmp_path / "elsewhere"),
            "TZ": "Asia/Tokyo",
            "LC_ALL": "C"
        }
        before = os.umask(0o077)
        try:
            result = fork("tree", tmp_path / "again", "--upstream", sdist, env=surroundings)
        finally:
            os.umask(before)
        assert result.returncode == 0, result.stderr
        assert git(tmp_path / "again", "rev-parse", "HEAD") == git(tree, "rev-parse", "HEAD")

    def test_pinned_release_gives_the_same_and_is_then_up_to_date(self, tree, tmp_path):
        first = fork("tree", tmp_path / "tree")
        assert first.returncode == 0, first.stderr
        assert git(tmp_path / "tree", "rev-parse", "HEAD") == git(tree, "rev-parse", "HEAD")
        unreachable = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        second = fork("tree", tmp_path / "tree", env=unreachable)
        assert second.returncode == 0, second.stderr
        assert "up to date" in second.stdout

    def test_git_checkout_as_upstream_takes_its_head(self, tree, tmp_path):
        checkout = tmp_path / "checkout"
        checked("git", "clone", "--quiet", tree, checkout)
        git(checkout, "checkout", "--quiet", git(tree, "rev-list", "--max-parents=0", "HEAD"))
        (checkout / "version.txt").write_text("9.9.9\n")
        result = fork("tree", tmp_path / "tree", "--upstream", checkout)
        assert result.returncode == 0, result.stderr
        assert git(tmp_path / "tree", "rev-parse", "HEAD") == git(tree, "rev-parse", "HEAD")

    def test_git_checkout_as_upstream_whatever_git_is_told(self, tree, tmp_path):
        """Neither another repository in the environment nor line endings of the checkout change what is composed."""
        checkout = tmp_path / "checkout"
        checked("git", "clone", "--quiet", tree, checkout)
        git(checkout, "checkout", "--quiet", git(tree, "rev-list", "--max-parents=0", "HEAD"))
        git(checkout, "config", "core.autocrlf", "true")
        result = fork("tree", tmp_path / "tree", "--upstream", checkout, env={"GIT_DIR": "/nowhere"})
        assert result.returncode == 0, result.stderr
        assert git(tmp_path / "tree", "rev-parse", "HEAD") == git(tree, "rev-parse", "HEAD")

    def test_changed_patch_set_is_composed_anew(self, repository, sdist, tmp_path):
        assert fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository).returncode == 0
        edit(repository / "patches" / f"{PATCHES[-1].name}.yaml", PATCHES[-1].subject, "Another subject")
        assert fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository).returncode == 0
        assert git(tmp_path / "tree", "log", "-1", "--format=%s") == "Another subject"
        assert names_in(tmp_path) == ["repository", "tree"]


class TestCheck:

    def test_says_how_often_each_rule_matches(self, sdist):
        result = fork("check", "--upstream", sdist)
        assert result.returncode == 0
        lines = result.stdout.splitlines()
        rules = [(patch, rule) for patch in PATCHES for rule in patch.rules]
        assert len(lines) == len(rules)
        for line, (patch, rule) in zip(lines, rules):
            assert line.startswith("ok ")
            for part in (patch.name, rule.id, rule.file, f"matches {rule.matches} times", f"expected {rule.matches}"):
                assert part in line

    def test_reports_every_mismatch_and_goes_on(self, tree, tmp_path):
        source = tmp_path / "source"
        checked("git", "clone", "--quiet", tree, source)
        git(source, "checkout", "--quiet", git(tree, "rev-list", "--max-parents=0", "HEAD"))
        edit(source / COORDINATOR, "numel_prefetching > 0", "numel_prefetching >= 1")
        edit(source / COORDINATOR, "fetch_numel > 0", "fetch_numel >= 1")
        shutil.rmtree(source / ".git")
        result = fork("check", "--upstream", source)
        assert result.returncode == 1
        failed = [line for line in result.stdout.splitlines() if not line.startswith("ok ")]
        assert len(failed) == 2 and len(result.stdout.splitlines()) == sum(len(patch.rules) for patch in PATCHES)
        for line, rule in zip(failed, ("fetch-gate", "prefetch-gate")):
            assert line.startswith("FAIL") and f"rule {rule}" in line and "matches 0 times, expected 1" in line

    def test_help_names_the_commands(self):
        result = fork("--help")
        assert result.returncode == 0
        assert "tree" in result.stdout and "check" in result.stdout


class TestErrors:

    def test_registry_out_of_reach(self, tmp_path):
        nowhere = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_RETRIES": "0"
        }
        result = fork("tree", tmp_path / "tree", env=nowhere)
        assert_error(result, "pip could not download deepspeed==0.19.8", "check the network", "--upstream")
        assert names_in(tmp_path) == []

    def test_hash_mismatch(self, sdist, tmp_path):
        (tmp_path / "index").mkdir()
        other = tmp_path / "index" / sdist.name
        other.write_bytes(gzip.compress(gzip.decompress(sdist.read_bytes()), mtime=1))
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
        result = fork("tree", tmp_path / "tree", env=index)
        assert_error(result, "deepspeed==0.19.8", "hash", "requirements/upstream.txt")
        assert names_in(tmp_path) == ["index"]

    def test_rule_that_matches_the_wrong_number_of_times(self, repository, sdist, tmp_path):
        edit(repository / "patches" / "gather-what-is-not-available.yaml", "pattern: numel_prefetching > 0",
             "pattern: numel_prefetching")
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository)
        assert_error(result, "gather-what-is-not-available", "rule prefetch-gate", COORDINATOR, "expected 1")
        found = int(re.search(r"matches (\d+) times", result.stderr).group(1))
        assert found > 1
        assert names_in(tmp_path) == ["repository"]

    def test_rule_whose_file_is_not_there(self, tree, tmp_path):
        source = tmp_path / "source"
        checked("git", "clone", "--quiet", tree, source)
        git(source, "checkout", "--quiet", git(tree, "rev-list", "--max-parents=0", "HEAD"))
        git(source, "rm", "--quiet", PATCHES[0].rules[0].file)
        git(source, "-c", "user.name=T", "-c", "user.email=t@example.com", "commit", "--quiet", "-m", "Remove")
        result = fork("tree", tmp_path / "tree", "--upstream", source)
        assert_error(result, PATCHES[0].rules[0].file, "matches 0 times")

    def test_rule_whose_result_is_not_what_it_says(self, repository, sdist, tmp_path):
        edit(repository / "patches" / "gather-what-is-not-available.yaml", "fix: params_to_prefetch",
             "fix: numel_prefetching >= 0")
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository)
        assert_error(result, "prefetch-gate", "'applied'")

    def test_upstream_that_already_has_the_change(self, tree, tmp_path):
        result = fork("tree", tmp_path / "again", "--upstream", tree)
        assert_error(result, PATCHES[0].name, PATCHES[0].rules[0].id, "upstream already has the change")
        assert names_in(tmp_path) == []

    @pytest.mark.parametrize("what", ["folder", "file", "other repository"])
    def test_target_that_is_not_ours(self, what, sdist, tmp_path):
        target = tmp_path / "tree"
        if what == "file":
            target.write_text("mine")
        else:
            target.mkdir()
            (target / "mine.txt").write_text("mine")
        if what == "other repository":
            git(target, "init", "--quiet")
        result = fork("tree", target, "--upstream", sdist)
        assert_error(result, str(target), "not a composed tree")
        assert names_in(tmp_path) == ["tree"]
        assert (target if what == "file" else target / "mine.txt").read_text() == "mine"

    @pytest.mark.parametrize("committed", [False, True])
    def test_target_with_changes_of_the_users(self, committed, repository, sdist, tmp_path):
        target = tmp_path / "tree"
        assert fork("tree", target, "--upstream", sdist, cwd=repository).returncode == 0
        (target / "setup.py").write_text("mine")
        if committed:
            git(target, "-c", "user.name=T", "-c", "user.email=t@example.com", "commit", "--quiet", "-am", "Mine")
        edit(repository / "patches" / f"{PATCHES[-1].name}.yaml", PATCHES[-1].subject, "Another subject")
        result = fork("tree", target, "--upstream", sdist, cwd=repository)
        assert_error(result, str(target), "changes of yours")
        assert (target / "setup.py").read_text() == "mine"

    def test_interrupted_composition(self, tree, sdist, tmp_path):
        command = [sys.executable, "-m", "fork", "tree", str(tmp_path / "tree"), "--upstream", str(sdist)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
        while not list(tmp_path.glob("*/.git")) and not list(tmp_path.glob(".*/.git")):
            assert process.poll() is None, "it ended before it could be interrupted"
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "tree").exists()
        assert names_in(tmp_path) != []
        result = fork("tree", tmp_path / "tree", "--upstream", sdist)
        assert result.returncode == 0, result.stderr
        assert git(tmp_path / "tree", "rev-parse", "HEAD") == git(tree, "rev-parse", "HEAD")
        assert names_in(tmp_path) == ["tree"]

    def test_version_that_is_not_pinned(self, tmp_path):
        assert_error(fork("tree", tmp_path / "tree", "--upstream", "0.1.0"), "0.1.0", "0.19.8")

    @pytest.mark.parametrize("what", ["folder", "file"])
    def test_path_that_is_not_deepspeed(self, what, tmp_path):
        path = tmp_path / "other"
        path.mkdir() if what == "folder" else path.write_text("no archive")
        assert_error(fork("tree", tmp_path / "tree", "--upstream", path), str(path))
        assert names_in(tmp_path) == ["other"]

    def test_git_missing(self, sdist, tmp_path):
        (tmp_path / "bin").mkdir()
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, env={"PATH": str(tmp_path / "bin")})
        assert_error(result, "git is not installed")


class TestPatchFiles:

    def test_every_added_file_belongs_to_a_patch(self):
        harness = {"tests/unit/common.py"}
        tracked = checked("git", "ls-files", "--cached", "--others", "--exclude-standard", "deepspeed", "csrc",
                          "op_builder", "tests/unit").splitlines()
        added = {name for name in tracked if not name.endswith(("README.md", "__init__.py"))} - harness
        assert {file for patch in patchset.load() for file in patch.files} == added

    def test_only_a_file_that_tests_import_belongs_to_several(self):
        owned = [file for patch in PATCHES for file in set(patch.files)]
        for file in {file for file in owned if owned.count(file) > 1}:
            assert file.startswith("tests/unit/") and not file.rpartition("/")[2].startswith("test_")

    @pytest.mark.parametrize("old, new, complaint", [
        ("subject:", "topic:", "lacks the key 'subject'"),
        ("id: notice", "name: notice", "lacks the key 'id'"),
        ("metadata:", "metadata: [", "cannot be read"),
        ("- tests/unit/runtime/test_zero_sized_notice.py", "- tests/unit/absent.py", "names tests/unit/absent.py"),
    ])
    def test_patch_file_with_a_fault(self, old, new, complaint, repository, sdist, tmp_path):
        edit(repository / "patches" / "name-zero-sized-parameters.yaml", old, new)
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository)
        assert_error(result, "patches/name-zero-sized-parameters.yaml", complaint)

    def test_patch_file_that_the_series_does_not_list(self, repository, sdist, tmp_path):
        edit(repository / "patches" / "series", "\nname-zero-sized-parameters\n", "\n")
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository)
        assert_error(result, "patches/name-zero-sized-parameters.yaml is not in patches/series")

    def test_series_that_lists_a_patch_that_is_not_there(self, repository, sdist, tmp_path):
        edit(repository / "patches" / "series", "\nname-zero-sized-parameters\n",
             "\nname-zero-sized-parameters\nabsent\n")
        result = fork("tree", tmp_path / "tree", "--upstream", sdist, cwd=repository)
        assert_error(result, "patches/absent.yaml")


class TestRange:

    def test_no_patch_needs_a_later_one(self):
        since = {patch.name: patch.since for patch in patchset.load()}
        for patch in patchset.load():
            assert all(since[name] <= patch.since for name in patch.needs), patch.name

    def test_every_release_takes_the_gates(self):
        for version in upstream.pins():
            names = {patch.name for patch in PATCHES if patch.applies_to(version)}
            assert {"gather-what-is-not-available", "coalesced-gather-of-zero-sized"} <= names

    def test_check_of_an_older_release(self):
        result = fork("check", "--upstream", "0.17.0")
        assert result.returncode == 0, result.stdout
        assert "gather-what-is-not-available" in result.stdout and "cpu-quantizer" not in result.stdout
        assert "wait-for-every-gather" in result.stdout and "wait-for-every-gather" not in fork("check").stdout

    def test_compat_without_tests(self):
        result = fork("compat", "0.17.0", "--tests", "tests/unit/ops")
        assert result.returncode == 1
        assert result.stderr == ("error: None of the patches that apply to 0.17.0 has a test in tests/unit/ops: name "
                                 "another path with --tests.\n")
