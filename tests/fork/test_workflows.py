# SPDX-License-Identifier: Apache-2.0
"""What can be known of the workflows in .github without running them: their form, and that what they name exists."""

import re
import shlex

import pytest
import yaml

from commands import ROOT, checked, fork, run

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOB_KEYS = {"name", "if", "needs", "runs-on", "timeout-minutes", "strategy", "env", "outputs", "permissions", "steps"}
STEP_KEYS = {"name", "id", "if", "uses", "with", "run", "env", "working-directory"}
EVENTS = {"push", "pull_request", "workflow_dispatch", "schedule"}
CONTEXTS = {"github", "matrix", "needs", "steps", "runner", "vars", "env"}
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)


def load(path):
    # All scalars as text: otherwise the key "on" would be True, and the version 3.10 a number.
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


JOBS = [pytest.param(path, name, id=f"{path.stem}-{name}") for path in WORKFLOWS for name in load(path)["jobs"]]
SCRIPTS = [
    pytest.param(step["run"], id=f"{path.stem}-{name}-{index}") for path in WORKFLOWS
    for name, job in load(path)["jobs"].items() for index, step in enumerate(job["steps"]) if "run" in step
]


def texts(value):
    """All strings of a document, keys left out."""
    if isinstance(value, str):
        return [value]
    return [text for part in (value.values() if isinstance(value, dict) else value) for text in texts(part)]


def expressions(job):
    found = [expression for text in texts(job) for expression in EXPRESSION.findall(text)]
    return found + [each["if"] for each in [job, *job["steps"]] if "if" in each]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path):
    workflow = load(path)
    assert set(workflow) <= {"name", "on", "permissions", "concurrency", "jobs"}
    assert workflow["on"] and set(workflow["on"]) <= EVENTS
    for entry in workflow["on"].get("schedule", []):
        assert len(entry["cron"].split()) == 5
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path, name", JOBS)
def test_job(path, name):
    jobs = load(path)["jobs"]
    job = jobs[name]
    assert re.fullmatch(r"[A-Za-z_][\w-]*", name)
    assert set(job) <= JOB_KEYS and job["runs-on"] and job["steps"]
    assert int(job["timeout-minutes"]) > 0
    needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
    assert set(needs) <= set(jobs) - {name}
    strategy = job.get("strategy", {})
    assert set(strategy) <= {"fail-fast", "max-parallel", "matrix"}
    ids = [step["id"] for step in job["steps"] if "id" in step]
    assert len(set(ids)) == len(ids)
    for step in job["steps"]:
        assert set(step) <= STEP_KEYS
        assert ("uses" in step) != ("run" in step)
        assert "with" not in step or "uses" in step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/none@v1"))
    for expression in expressions(job):
        assert set(re.findall(r"(?<![\w.'])([a-z]+)\.", expression)) <= CONTEXTS, expression
        assert set(re.findall(r"\bmatrix\.([\w-]+)", expression)) <= set(strategy.get("matrix", {})), expression
        assert set(re.findall(r"\bsteps\.([\w-]+)\.outputs", expression)) <= set(ids), expression
        for other, output in re.findall(r"\bneeds\.([\w-]+)\.outputs\.([\w-]+)", expression):
            assert other in needs and output in jobs[other]["outputs"], expression


@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script):
    assert not EXPRESSION.search(script), "give it to the script as an environment variable"
    assert run("bash", "-n", "-c", script).returncode == 0
    makefile = (ROOT / "Makefile").read_text()
    for line in script.splitlines():
        words = shlex.split(line, comments=True) if line.count('"') % 2 == line.count("'") % 2 == 0 else line.split()
        if words[:1] == ["make"]:
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"no target {target}"
        for test in re.findall(r'TESTS="?([\w/.]+)', line):
            assert (ROOT / test).exists()
    for file in re.findall(r"(?<![\w$./-])(?:tests|requirements|patches|benchmarks|examples|fork)/[\w./-]+", script):
        assert (ROOT / file).exists(), f"no {file}"
    for command in re.findall(r"-m fork (\w+)", script):
        assert fork(command, "--help").returncode == 0, f"no command {command}"


def test_python_versions_are_those_of_the_readme():
    versions = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert f"Python {versions[0]} or newer" in (ROOT / "README.md").read_text()
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


@pytest.mark.parametrize("file", [".github/pull_request_template.md", "CONTRIBUTING.md", "README.md"])
def test_documents_name_what_is_there(file):
    text = (ROOT / file).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    for command in set(re.findall(r"python -m fork (\w+)", text)):
        assert fork(command, "--help").returncode == 0, f"no command {command}"
    assert checked("git", "ls-files", "--cached", "--others", "--exclude-standard", file).strip() == file
