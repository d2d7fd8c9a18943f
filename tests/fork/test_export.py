# SPDX-License-Identifier: Apache-2.0
"""``python -m fork export``: the branch it makes, the files it writes, and what it leaves alone when it cannot."""

import ast
import os
import re

import pytest

from commands import PATCHES, ROOT, assert_error, checked, edit, fork, git, names_in

from fork import compose, patchset

IDENTITY = ("user.name=Ann Exporter", "user.email=ann@example.com")
SIGNATURE = "Ann Exporter <ann@example.com>"
NOBODY = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
BRANCH = "zero-sized-parameters"


def released(tree):
    """The commit of the release, before any patch."""
    return git(tree, "rev-list", "--max-parents=0", "HEAD")


@pytest.fixture
def checkout(tree, tmp_path):
    """A checkout of DeepSpeed as released, whose user is set in its configuration."""
    folder = tmp_path / "checkout"
    checked("git", "clone", "--quiet", "--shared", "--no-checkout", tree, folder)
    for setting in IDENTITY:
        git(folder, "config", *setting.split("=", 1))
    git(folder, "checkout", "--quiet", "-B", "main", released(tree))
    git(folder, "remote", "remove", "origin")
    return folder


def state(checkout):
    """All that an export must not change if it fails."""
    head = git(checkout, "rev-parse", "--symbolic-full-name", "HEAD")
    return head, git(checkout, "for-each-ref"), git(checkout, "status", "--porcelain", "--ignored"), names_in(checkout)


def exported(checkout, base="main"):
    return git(checkout, "log", "--reverse", "--format=%s", f"{base}..{BRANCH}").splitlines()


class TestBranch:

    def test_one_commit_for_each_patch_signed_off_by_the_user_of_the_checkout(self, checkout, tree):
        surroundings = {
            **NOBODY, "GIT_AUTHOR_NAME": "Somebody Else",
            "GIT_DIR": "/nowhere",
            "EMAIL": "else@example.com"
        }
        result = fork("export", checkout, env=surroundings)
        assert result.returncode == 0, result.stderr
        assert git(checkout, "branch", "--show-current") == BRANCH
        assert git(checkout, "status", "--porcelain", "--ignored") == ""
        assert exported(checkout) == [patch.subject for patch in PATCHES]
        for number, patch in enumerate(reversed(PATCHES)):
            commit = f"{BRANCH}~{number}"
            assert git(checkout, "log", "-1", "--format=%an <%ae>", commit) == SIGNATURE
            assert git(checkout, "log", "-1", "--format=%cn <%ce>", commit) == SIGNATURE
            message = git(checkout, "log", "-1", "--format=%B", commit)
            assert patch.message in message
            assert re.findall("Signed-off-by: .*", message) == [f"Signed-off-by: {SIGNATURE}"]
            assert patch.subject in result.stdout
        assert git(checkout, "rev-parse", f"{BRANCH}^{{tree}}") == git(tree, "rev-parse", "HEAD^{tree}")
        assert git(checkout, "rev-parse", "main") == released(tree)
        git(checkout, "fsck", "--connectivity-only")

    def test_hook_that_fails(self, checkout):
        hook = checkout / ".git" / "hooks" / "post-checkout"
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
        assert fork("export", checkout).returncode == 0
        assert git(checkout, "branch", "--show-current") == BRANCH

    def test_checkout_whose_branch_has_no_commit_yet(self, checkout):
        git(checkout, "switch", "--quiet", "--orphan", "new")
        result = fork("export", checkout, "--base", "main")
        assert result.returncode == 0, result.stderr
        assert exported(checkout) == [patch.subject for patch in PATCHES]

    def test_base_and_name_of_the_branch(self, checkout, tree):
        (checkout / "README.md").write_text("Newer than the release.\n")
        git(checkout, "commit", "--quiet", "--all", "--message", "A later commit")
        result = fork("export", checkout, "--base", "main~1", "--branch", "other")
        assert result.returncode == 0, result.stderr
        assert git(checkout, "rev-parse", "other^{tree}") == git(tree, "rev-parse", "HEAD^{tree}")
        assert git(checkout, "merge-base", "main", "other") == released(tree)

    def test_runs_no_hook_of_the_checkout_on_a_commit(self, checkout):
        hook = checkout / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
        result = fork("export", checkout)
        assert result.returncode == 0, result.stderr
        assert exported(checkout) == [patch.subject for patch in PATCHES]

    def test_shallow_clone_and_second_work_tree(self, checkout, tmp_path):
        git(checkout, "commit", "--quiet", "--allow-empty", "--message", "Another")
        checked("git", "clone", "--quiet", "--depth=1", f"file://{checkout}", tmp_path / "shallow")
        git(tmp_path / "shallow", "worktree", "add", "--quiet", "--detach", tmp_path / "second")
        for setting in IDENTITY:
            git(tmp_path / "shallow", "config", *setting.split("=", 1))
        result = fork("export", tmp_path / "second")
        assert result.returncode == 0, result.stderr
        assert exported(tmp_path / "second") == [patch.subject for patch in PATCHES]
        assert git(tmp_path / "shallow", "branch", "--show-current") == "main"


class TestFiles:

    def test_git_am_gives_the_same_tree(self, checkout, tree, tmp_path):
        before = state(checkout)
        result = fork("export", checkout, "--patches", tmp_path / "files")
        assert result.returncode == 0, result.stderr
        assert state(checkout) == before
        written = [tmp_path / "files" / name for name in names_in(tmp_path / "files")]
        assert len(written) == len(PATCHES)
        git(checkout, "am", "--quiet", *written)
        assert git(checkout, "rev-parse", "HEAD^{tree}") == git(tree, "rev-parse", "HEAD^{tree}")
        assert git(checkout, "log", "-1", "--format=%an <%ae>") == SIGNATURE
        assert git(checkout, "log", "--reverse", "--format=%s").splitlines()[1:] == [p.subject for p in PATCHES]

    def test_folder_that_is_not_empty(self, checkout, tmp_path):
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "mine.patch").write_text("mine")
        result = fork("export", checkout, "--patches", tmp_path / "files")
        assert_error(result, str(tmp_path / "files"), "not empty")
        assert names_in(tmp_path / "files") == ["mine.patch"]

    def test_folder_that_is_a_file(self, checkout, tmp_path):
        (tmp_path / "files").write_text("mine")
        assert_error(fork("export", checkout, "--patches", tmp_path / "files"), str(tmp_path / "files"))
        assert (tmp_path / "files").read_text() == "mine"


class TestOnly:

    def test_takes_a_patch_with_what_it_needs(self, checkout):
        patch = max(PATCHES, key=lambda patch: len(patchset.select(PATCHES, [patch.name])))
        needed = patchset.select(PATCHES, [patch.name])
        assert len(needed) > 1
        result = fork("export", checkout, "--only", patch.name)
        assert result.returncode == 0, result.stderr
        assert exported(checkout) == [each.subject for each in needed]
        assert result.stdout.count("(needed by the others)") == len(needed) - 1

    def test_several_come_in_the_order_of_the_series(self, checkout):
        result = fork("export", checkout, "--only", "name-zero-sized-parameters", "linear-backward-of-zero-sized")
        assert result.returncode == 0, result.stderr
        linear, notice = exported(checkout)
        assert "linear backward" in linear and notice.startswith("Name the zero-sized parameters")

    def test_name_of_no_patch(self, checkout):
        before = state(checkout)
        assert_error(fork("export", checkout, "--only", "absent"), "absent is not a patch", PATCHES[0].name)
        assert state(checkout) == before

    def test_patch_for_other_releases(self, checkout):
        """All that a plain export leaves out is what upstream has mended, and it says so."""
        result = fork("export", checkout, "--branch", "all")
        assert result.stdout.partition("Left out")[2].split()[-1:] == ["wait-for-every-gather"]
        before = state(checkout)
        result = fork("export", checkout, "--base", "main", "--only", "wait-for-every-gather")
        assert_error(result, "wait-for-every-gather", "upstream already has the change")
        assert state(checkout) == before

    def test_takes_a_patch_whatever_version_txt_says(self, checkout):
        (checkout / "version.txt").write_text("0.17.0\n")
        checked("git", "-C", checkout, "commit", "--quiet", "--all", "--message", "Lag behind")
        result = fork("export", checkout, "--only", "zero-sized-state-in-zero-3")
        assert result.returncode == 0, result.stderr
        assert "Left out" not in result.stdout

    @pytest.mark.parametrize("name", [patch.name for patch in PATCHES])
    def test_every_patch_applies_with_no_more_than_it_needs(self, name, tree, tmp_path):
        """Its rules match, and every module of the unit tests that its own tests import is there."""
        files = sorted({rule.file for patch in PATCHES for rule in patch.rules})
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(git(tree, "show", f"{released(tree)}:{file}") + "\n")
        selected = patchset.select(PATCHES, [name])
        for patch in selected:
            compose.apply(tmp_path, patch)
        for test in (tmp_path / file for file in selected[-1].files if file.startswith("tests/unit/")):
            for node in ast.walk(ast.parse(test.read_text())):
                module = getattr(node, "module", None) or ""
                if isinstance(node, ast.ImportFrom) and module.startswith("unit.") and module != "unit.common":
                    assert (tmp_path / "tests" / f"{module.replace('.', '/')}.py").is_file(), \
                        f"{test.name} imports {module}: list its file in patches/{name}.yaml, or what adds it in needs"

    def test_need_that_does_not_come_before(self, repository, checkout):
        edit(repository / "patches" / f"{PATCHES[0].name}.yaml", "\nfiles:\n",
             f"\nneeds: [{PATCHES[1].name}]\nfiles:\n")
        result = fork("export", checkout, cwd=repository)
        assert_error(result, f"patches/{PATCHES[0].name}.yaml needs {PATCHES[1].name}", "before")


class TestErrors:
    """One sentence, and the checkout as it was."""

    @pytest.fixture(autouse=True)
    def unchanged(self, checkout):
        self.checkout = checkout
        yield
        assert state(self.checkout) == self.before

    def fails(self, *arguments, env=None, cwd=ROOT, says):
        self.before = state(self.checkout)
        assert_error(fork("export", *arguments, env=env, cwd=cwd), *says)

    @pytest.mark.parametrize("what", ["changed", "staged", "untracked"])
    @pytest.mark.parametrize("files", [False, True])
    def test_checkout_with_changes(self, what, files, tmp_path):
        (self.checkout / ("new.txt" if what == "untracked" else "setup.py")).write_text("mine")
        if what == "staged":
            git(self.checkout, "add", "setup.py")
        options = ["--patches", tmp_path / "files"] if files else []
        self.fails(self.checkout, *options, says=[str(self.checkout), "not committed", "stash"])

    @pytest.mark.parametrize("key", ["user.name", "user.email"])
    def test_identity_that_is_missing(self, key):
        git(self.checkout, "config", "--unset", key)
        surroundings = {
            **NOBODY, "GIT_AUTHOR_NAME": "N",
            "GIT_AUTHOR_EMAIL": "e@example.com",
            "EMAIL": "e@example.com"
        }
        self.fails(self.checkout, env=surroundings, says=["user.name and user.email", str(self.checkout)])

    def test_base_that_a_rule_does_not_match(self, tmp_path):
        rule = PATCHES[-1].rules[-1]
        (self.checkout / rule.file).write_text("")
        git(self.checkout, "commit", "--quiet", "--all", "--message", "Rewrite")
        first = next((p, r) for p in PATCHES for r in p.rules if r.file == rule.file)
        says = [first[0].name, f"rule {first[1].id}", rule.file, "matches 0 times, expected"]
        self.fails(self.checkout, says=says)
        self.fails(self.checkout, "--patches", tmp_path / "files", says=says)
        assert not (tmp_path / "files").exists()

    def test_base_that_has_another_file_of_the_same_name(self):
        file = self.checkout / PATCHES[-1].tests[0]
        file.parent.mkdir(parents=True)
        file.write_text("theirs")
        git(self.checkout, "add", "--all")
        git(self.checkout, "commit", "--quiet", "--message", "A test of the same name")
        self.fails(self.checkout, says=[PATCHES[-1].name, PATCHES[-1].tests[0], "other contents"])

    def test_base_that_is_no_commit(self):
        self.fails(self.checkout, "--base", "v0.0", says=["v0.0 is not a commit", "--base"])

    def test_branch_that_is_there(self):
        git(self.checkout, "branch", BRANCH)
        self.fails(self.checkout, says=[f"a branch {BRANCH} already", "--branch"])

    @pytest.mark.parametrize("name", ["", "-", "-x", "two words", "a..b", "HEAD"])
    def test_name_that_no_branch_can_have(self, name):
        git(self.checkout, "branch", "before")
        git(self.checkout, "switch", "--quiet", "before")
        self.fails(self.checkout, f"--branch={name}", says=["cannot be the name of a branch", "--branch"])

    def test_ignored_file_where_a_patch_adds_one(self):
        file = self.checkout / PATCHES[0].tests[0]
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        (self.checkout / ".git" / "info" / "exclude").write_text(f"{PATCHES[0].tests[0]}\n")
        self.fails(self.checkout, says=["git", PATCHES[0].tests[0]])
        assert file.read_text() == "mine"

    def test_head_that_is_locked(self):
        """Git then changes the files, and stops."""
        (self.checkout / ".git" / "HEAD.lock").write_text("")
        self.fails(self.checkout, says=["HEAD.lock"])

    def test_partial_clone(self, tmp_path):
        """Only what is checked out is there."""
        git(self.checkout, "config", "uploadpack.allowFilter", "true")
        for text in ("first", "second"):
            (self.checkout / "LICENSE").write_text(text)
            git(self.checkout, "commit", "--quiet", "--all", "--message", text)
        checked("git", "clone", "--quiet", "--filter=blob:none", self.checkout.as_uri(), tmp_path / "partial")
        self.checkout = tmp_path / "partial"
        for setting in IDENTITY:
            git(self.checkout, "config", *setting.split("=", 1))
        self.fails(self.checkout, "--base", "HEAD~1", says=["partial clone", "full clone"])

    def test_version_that_is_none(self):
        (self.checkout / "version.txt").write_text("next\n")
        git(self.checkout, "commit", "--quiet", "--all", "--message", "A version to come")
        self.fails(self.checkout, says=["version.txt says 'next'", "--only"])

    def test_checkout_that_cannot_switch(self):
        """A merge that was begun has no changes to show, but git does not leave it."""
        (self.checkout / ".git" / "MERGE_HEAD").write_text(git(self.checkout, "rev-parse", "HEAD") + "\n")
        self.fails(self.checkout, says=["git switch", "merging"])

    @pytest.mark.parametrize("what", ["folder", "file", "nothing", "bare repository", "folder of it"])
    def test_path_that_is_not_a_checkout(self, what, tmp_path):
        path = tmp_path / "other"
        if what == "folder":
            path.mkdir()
        elif what == "file":
            path.write_text("")
        elif what == "bare repository":
            checked("git", "init", "--quiet", "--bare", path)
        elif what == "folder of it":
            path = self.checkout / "build"
            (path / ".git").mkdir(parents=True)  # without a repository in it, git looks further up
            (self.checkout / ".git" / "info" / "exclude").write_text("build/\n")
        self.fails(path, says=[f"{path} is not a git checkout"])

    def test_checkout_of_something_else(self, tmp_path):
        other = tmp_path / "other"
        checked("git", "init", "--quiet", other)
        for setting in IDENTITY:
            git(other, "config", *setting.split("=", 1))
        self.fails(other, says=["HEAD is not a commit"])
        git(other, "commit", "--quiet", "--allow-empty", "--message", "Empty")
        self.fails(other, says=[f"{other} is not a checkout of DeepSpeed"])
        assert git(other, "branch", "--list", BRANCH) == ""

    def test_git_missing(self, tmp_path):
        (tmp_path / "bin").mkdir()
        self.fails(self.checkout, env={"PATH": str(tmp_path / "bin")}, says=["git is not installed"])

    def test_files_and_a_branch(self, tmp_path):
        self.before = state(self.checkout)
        result = fork("export", self.checkout, "--patches", tmp_path / "files", "--branch", "mine")
        assert result.returncode == 2 and "leave out --branch" in result.stderr


def test_help_names_the_options():
    text = fork("export", "--help").stdout
    for option in ("--base", "--branch", "--only", "--patches"):
        assert option in text
