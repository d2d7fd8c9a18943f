# SPDX-License-Identifier: Apache-2.0
"""Every way to build and install the fork, from a copy of this repository."""

import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from commands import ROOT, checked, copy_of_repository, fork, git, run

from fork import patchset

VERSION = "0.19.8+zerosized.1"
WHEEL = f"deepspeed-{VERSION}-py3-none-any.whl"
PATCHED = sorted({rule.file for patch in patchset.load() for rule in patch.rules})
PIP = (sys.executable, "-m", "pip")
SHOW_VERSION = "import deepspeed; print(deepspeed.__version__, deepspeed.__file__)"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of this repository that the tests build in one after another, as a user does."""
    return copy_of_repository(tmp_path_factory.mktemp("source") / "repository")


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    checked(*PIP, "wheel", "--no-deps", f"--wheel-dir={folder}", source)
    assert [path.name for path in folder.iterdir()] == [WHEEL]
    return folder / WHEEL


@pytest.fixture(scope="module")
def stock_wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    checked(*PIP, "wheel", "--no-deps", "--require-hashes", f"--wheel-dir={folder}",
            f"--requirement={ROOT / 'requirements' / 'upstream.txt'}")
    built, = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def source_distribution(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    checked(sys.executable, "-m", "build", "--sdist", f"--outdir={folder}", source)
    archive, = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    """A virtual environment with all that is installed here, but for DeepSpeed."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    ours, theirs = Path(sysconfig.get_path("purelib")), next(folder.glob("lib/python*/site-packages"))
    for path in ours.iterdir():
        if not path.name.startswith("deepspeed") and not (theirs / path.name).exists():
            (theirs / path.name).symlink_to(path)
    return folder / "bin"


def files_in(wheel):
    """The names of a wheel's files, without the version in that of the metadata folder."""
    with zipfile.ZipFile(wheel) as archive:
        return {name.replace(VERSION, "0.19.8") for name in archive.namelist()}


class TestWheel:

    def test_has_the_files_of_the_stock_wheel_and_the_added_ones(self, wheel, stock_wheel):
        files = [Path(file) for patch in patchset.load() for file in patch.files]
        added = {file.as_posix() for file in files if file.parts[0] == "deepspeed"}
        added |= {f"deepspeed/ops/{file.as_posix()}" for file in files if file.parts[0] in ("csrc", "op_builder")}
        assert files_in(wheel) == files_in(stock_wheel) | added

    def test_only_patched_files_differ_from_the_stock_wheel(self, wheel, stock_wheel):
        with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(stock_wheel) as theirs:
            common = set(ours.namelist()) & set(theirs.namelist())
            differing = {name for name in common if ours.read(name) != theirs.read(name)}
        expected = {file for file in PATCHED if file.startswith("deepspeed/")}
        expected |= {f"deepspeed/ops/{file}" for file in PATCHED if file.startswith(("csrc/", "op_builder/"))}
        expected |= {f"deepspeed/{file}" for file in PATCHED if file.startswith("accelerator/")}
        assert differing - {"deepspeed/git_version_info_installed.py"} == expected

    def test_holds_the_composed_sources(self, wheel, tree):
        with zipfile.ZipFile(wheel) as archive:
            for file in PATCHED:
                if file.startswith("deepspeed/"):
                    assert archive.read(file) == (tree / file).read_bytes()

    def test_build_leaves_the_tree_clean_and_is_not_composed_anew(self, wheel, source):
        assert git(source / "build" / "tree", "status", "--porcelain") == ""
        result = fork("tree", cwd=source, env=OFFLINE)
        assert "up to date" in result.stdout

    def test_build_string_means_what_it_means_upstream(self, source, tmp_path):
        checked(*PIP, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", source, env={"DS_BUILD_STRING": ".dev7"})
        assert [path.name for path in tmp_path.iterdir()] == ["deepspeed-0.19.8.dev7-py3-none-any.whl"]

    def test_failed_composition_is_one_sentence(self, tmp_path):
        source = copy_of_repository(tmp_path / "repository")
        series = source / "patches" / "series"
        series.write_text(series.read_text() + "absent\n")
        result = run(*PIP, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", source)
        assert result.returncode != 0
        assert "error: patches/series lists absent" in result.stdout + result.stderr


class TestRelease:

    def test_another_release(self, source, tmp_path):
        command = [*PIP, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", source]
        checked(*command, env={"DS_UPSTREAM_VERSION": "0.18.9"})
        wheel, = tmp_path.iterdir()
        assert wheel.name == WHEEL.replace("0.19.8", "0.18.9")
        with zipfile.ZipFile(wheel) as archive:
            coordinator = archive.read("deepspeed/runtime/zero/partitioned_param_coordinator.py").decode()
        assert "params_not_available" in coordinator

    def test_unknown_release(self, source, tmp_path):
        result = run(*PIP,
                     "wheel",
                     "--no-deps",
                     f"--wheel-dir={tmp_path}",
                     source,
                     env={"DS_UPSTREAM_VERSION": "0.0.1"})
        assert result.returncode != 0
        assert "error: 0.0.1 is neither a path nor a version that requirements/releases.txt pins" in result.stderr


class TestSourceDistribution:

    def test_holds_the_patched_source(self, source_distribution, tree):
        with tarfile.open(source_distribution) as archive:
            top = archive.getnames()[0].partition("/")[0]
            assert top == f"deepspeed-{VERSION}"
            for file in PATCHED:
                assert archive.extractfile(f"{top}/{file}").read() == (tree / file).read_bytes()

    def test_builds_the_same_wheel_without_network(self, source_distribution, wheel, tmp_path):
        checked(*PIP,
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                f"--wheel-dir={tmp_path}",
                source_distribution,
                env=OFFLINE)
        built, = tmp_path.iterdir()
        assert built.name == WHEEL
        assert files_in(built) == files_in(wheel)


class TestInstall:

    def test_git_url(self, source, tmp_path):
        checked(*PIP, "install", "--no-deps", f"--target={tmp_path}", f"git+file://{source}")
        version, file = checked(sys.executable, "-c", SHOW_VERSION, env={"PYTHONPATH": str(tmp_path)}).split()
        assert version == VERSION
        assert Path(file).is_relative_to(tmp_path)

    def test_uv(self, source, empty_environment):
        python = empty_environment / "python"
        checked(sys.executable, "-m", "uv", "pip", "install", "--no-deps", f"--python={python}", source)
        version, file = checked(python, "-c", SHOW_VERSION, env={"PYTHONPATH": ""}).split()
        assert version == VERSION
        assert Path(file).is_relative_to(empty_environment.parent)
        checked(sys.executable, "-m", "uv", "pip", "uninstall", f"--python={python}", "deepspeed")

    def test_editable_is_the_composed_tree_also_inside_the_checkout(self, source, empty_environment, tmp_path):
        python = empty_environment / "python"
        checked(python, "-m", "pip", "install", "--no-deps", "--editable", source)
        for folder in (source, tmp_path):
            version, file = checked(python, "-c", SHOW_VERSION, cwd=folder, env={"PYTHONPATH": ""}).split()
            assert version == VERSION
            assert Path(file) == source / "build" / "tree" / "deepspeed" / "__init__.py"
        checked(python, "-m", "pip", "uninstall", "--yes", "deepspeed")


class TestInstalled:
    """What is installed here, where the tests run."""

    def test_versions_agree(self):
        import deepspeed
        shown = checked(*PIP, "show", "deepspeed")
        assert deepspeed.__version__ == metadata.version("deepspeed") == VERSION
        assert f"Version: {VERSION}" in shown.splitlines()

    def test_no_requirement_is_broken(self):
        assert "deepspeed" not in checked(*PIP, "check")

    def test_report(self):
        program = shutil.which("ds_report", path=sysconfig.get_path("scripts"))
        assert VERSION in checked(program)
