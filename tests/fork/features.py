# SPDX-License-Identifier: Apache-2.0
"""Write docs/features.md: every feature at every stage, on the stock release and on this fork, from live runs."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = "0123"
SHOWN = 160  # characters of an error
# Compiling an op within a cell would take longer than a cell may.
LOAD_OPS = """
import deepspeed
from deepspeed.accelerator import get_accelerator
from unit.runtime.zero.zero_sized_features import FEATURES
for name in {feature.op for feature in FEATURES.values() if feature.op and not feature.only_cuda}:
    builder = get_accelerator().create_op_builder(name)
    if builder.is_compatible():
        builder.load()
print(deepspeed.__version__)
"""
PAGE = """# Zero-sized parameters in every feature

`make features` writes this page. Each cell is a training of four steps on two gloo ranks, of a model that is full of
zero-sized parameters, and of the same model without them. "OK" means that losses and final weights of the two are
bitwise equal. A blank cell is a stage that does not have the feature. The features are declared in
`tests/unit/runtime/zero/zero_sized_features.py`; those that fail on the stock release are unit tests too.

Stock is {stock}, the fork is {fork}. The sized parameters are the control: they work in every cell.

{table}

{notes}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", type=Path, required=True, help="a folder that the stock release is installed in")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "features.md")
    options = parser.parse_args()
    paths = {"stock": str(options.stock.resolve()), "fork": os.environ.get("PYTHONPATH", "")}
    versions, environments = {}, {}
    for column, path in paths.items():
        environments[column] = dict(os.environ,
                                    PYTHONPATH=path,
                                    DS_ACCELERATOR="cpu",
                                    TORCH_EXTENSIONS_DIR=str(ROOT / "build" / "ops" / column))
        print(f"Loading the ops of the {column}. The first time this takes minutes.", flush=True)
        command = [sys.executable, "-c", LOAD_OPS]
        output = subprocess.check_output(command, cwd=ROOT / "tests", env=environments[column], text=True)
        versions[column] = output.split()[-1]
    print(f"Running every feature on DeepSpeed {' and '.join(versions.values())} takes some minutes.", flush=True)
    with ThreadPoolExecutor() as executor:
        results = dict(zip(environments, executor.map(run, environments.values())))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page(results, versions))
    unexpected = [name for name, answer in results["fork"].items() if answer != "OK" and not answer.startswith("not")]
    for name in unexpected:
        print(f"not OK on the fork: {', stage '.join(name)}")
    return int(bool(unexpected))


def run(environment):
    """What became of each cell, by feature and stage: "OK", or why not."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--tb=short", f"--junit-xml={report.name}"]
        command.append(str(ROOT / "tests" / "fork" / "every_feature.py"))
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"pytest did not run the features:\n{done.stdout}{done.stderr}")
        cases = xml.etree.ElementTree.parse(report.name).getroot().iter("testcase")
        return {tuple(case.get("name")[len("test["):-1].rsplit("-", 1)): answer(case) for case in cases}


def answer(case):
    skipped, failed = case.find("skipped"), case.find("failure")
    if skipped is not None:
        return f"not run: {skipped.get('message')}"
    if failed is None:
        return "OK"
    # The harness shows the traceback of the rank that failed first, whose last line is the error.
    first = re.split("\n---- rank |\n---+ Captured", failed.text.split("---- rank ", 1)[1])[0]
    if "had not finished" in first.splitlines()[0]:
        return first.splitlines()[0].split(" ", 3)[-1].strip(" -")
    error = [line for line in first.splitlines() if re.match(r"[\w.]+(: |$)", line)][-1]
    error = re.sub(r"\{'id': .*", "a parameter that is NOT_AVAILABLE", error)
    if error == "AssertionError" and "zero_sized_features.py" in re.findall('File "(.*)"', first)[-1]:
        return "trains, but not bitwise as without zero-sized parameters"
    return error if len(error) <= SHOWN else error[:SHOWN - 3] + "..."


def page(results, versions):
    features = list(dict.fromkeys(name for name, _ in results["fork"]))
    notes = list(dict.fromkeys(text for cells in results.values() for text in cells.values() if text != "OK"))

    def cell(column, name, stage):
        text = results[column].get((name, stage), "")
        if text in ("", "OK"):
            return text
        kind = re.match("not run|trains|", text).group() or "fails"
        return f"{kind} ({notes.index(text) + 1})"

    heads = [f"{column}, stage {stage}" for column in results for stage in STAGES]
    rows = [["feature", *heads], ["---"] * (1 + len(heads))]
    rows += [[name, *(cell(column, name, stage) for column in results for stage in STAGES)] for name in features]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    listed = "\n".join(f"{number}. {escape(text)}" for number, text in enumerate(notes, 1))
    return PAGE.format(table=table, notes=listed, **{column: f"`{version}`" for column, version in versions.items()})


def escape(text):
    return f"`{text.replace('`', '')}`" if re.match(r"[\w.]+(:|$)", text) else text


if __name__ == "__main__":
    sys.exit(main())
