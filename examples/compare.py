# SPDX-License-Identifier: Apache-2.0
"""Train small models with zero-sized parameters under ZeRO-3, on the stock release of DeepSpeed and on this fork.

Each cell of the table is a training in processes of its own: "OK" if all steps ran and the loss fell, otherwise the
first line of the error.
"""

import argparse
import importlib.util
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

import ranks  # before DeepSpeed

import deepspeed
import torch
from torch import nn

WIDTH = 8
STEPS = 5
LIMIT = 90  # seconds for a cell
SHOWN = 72  # characters of an error
ANSWER = "The answer of this cell: "


class Adding(nn.Module):
    """Adds a module's output to its input; the output's sum, if it has another shape."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        output = self.module(x)
        return x + (output if output.shape == x.shape else output.sum())


class Placeholders(nn.Module):
    """Owns nothing but placeholders."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(0))
        self.shift = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return x + self.scale.sum() + self.shift.sum()


class LinearWithPlaceholder(nn.Linear):
    """Owns a placeholder beside its weight and bias."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.placeholder = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return super().forward(x) + self.placeholder.sum()


class LlamaWithoutLabels(nn.Module):
    """A Llama classifier whose head has no labels, trained on its last hidden state as well."""

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForSequenceClassification
        self.llama = LlamaForSequenceClassification(
            LlamaConfig(vocab_size=3,
                        hidden_size=WIDTH,
                        intermediate_size=2 * WIDTH,
                        num_hidden_layers=2,
                        num_attention_heads=2,
                        pad_token_id=0,
                        bos_token_id=1,
                        eos_token_id=2,
                        num_labels=0))

    def forward(self, x):
        tokens = 1 + (x[..., 0] > 0).long()
        outputs = self.llama(tokens, output_hidden_states=True)
        return outputs.hidden_states[-1] + outputs.logits.sum()


class Digits(nn.Module):
    """The model of train_digits.py."""

    def __init__(self):
        super().__init__()
        from train_digits import DigitClassifier
        self.classifier = DigitClassifier()

    def forward(self, x):
        images = x.view(-1, 1, 8, 8)
        loss, _ = self.classifier(images, torch.arange(len(images)))
        return loss


def between(module):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Adding(module), nn.Linear(WIDTH, WIDTH))


def adalora():
    """A model one of whose layers has an adapter that AdaLoRA's budget leaves no rank to, as PEFT builds it."""
    from peft import AdaLoraConfig, get_peft_model
    config = AdaLoraConfig(init_r=0, target_r=0, total_step=STEPS, target_modules=["0"], modules_to_save=["2"])
    return get_peft_model(between(nn.Identity()), config)


CASES = {
    "no zero-sized parameter": lambda: between(nn.Linear(WIDTH, WIDTH)),
    "nn.Linear(8, 0, bias=False)": lambda: between(nn.Linear(WIDTH, 0, bias=False)),
    "several on one module": lambda: between(nn.Linear(WIDTH, 0)),
    "beside a weight and a bias": lambda: between(LinearWithPlaceholder()),
    "frozen": lambda: between(nn.Linear(WIDTH, 0).requires_grad_(False)),
    "rank-0 adapter": lambda: between(nn.Sequential(nn.Linear(WIDTH, 0, False), nn.Linear(0, WIDTH, False))),
    "torch.zeros(0) placeholders": lambda: between(Placeholders()),
    "placeholders, built in zero.Init": lambda: between(Placeholders()),
    "Llama classifier, num_labels=0": LlamaWithoutLabels,
    "PEFT AdaLoRA, rank 0": adalora,
    "ViT of train_digits.py": Digits,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock",
                        type=Path,
                        metavar="DIR",
                        help="where the stock release is, installed by pip install --no-deps --target DIR deepspeed")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes train together (default: 2)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--case", choices=CASES, help="only train this model, as one rank with what is installed")
    options = parser.parse_args()
    if options.case:
        sys.exit(run_rank(options.case))
    if not options.stock or not (options.stock / "deepspeed").is_dir():
        parser.error("--stock DIR has to name a folder with DeepSpeed's stock release")
    sys.exit(compare(options.stock.resolve(), options.ranks, options.markdown))


def compare(stock, size, markdown):
    """Fill in the table and print it; returns 1 if a cell of the fork is not OK."""
    paths = os.pathsep.join(filter(None, [str(stock), os.environ.get("PYTHONPATH")]))
    columns = {
        "stock": ranks.environment(PYTHONPATH=paths, TORCH_EXTENSIONS_DIR=str(ranks.OPS / "stock")),
        "fork": ranks.environment(),
    }
    versions = {}
    for column, environment in columns.items():
        print(f"Loading the op for collectives on the CPU, {column}. The first time this takes a minute.", flush=True)
        versions[column], file = ranks.load_op(environment)
        if (stock in Path(file).resolve().parents) != (column == "stock"):
            return f"The column '{column}' would use {file}."
    cases = [case for case in CASES if "PEFT" not in case or importlib.util.find_spec("peft")]
    table = [["zero-sized parameters", f"stock release {versions['stock']}", f"this fork {versions['fork']}"]]
    for case in cases:
        table.append([case])
        for column, environment in columns.items():
            start = time.monotonic()
            table[-1].append(cell(case, size, environment))
            print(f"{time.monotonic() - start:5.1f} s  {column:5}  {case}: {table[-1][-1]}", flush=True)
    print()
    print_table(table, markdown)
    if len(cases) < len(CASES):
        print("PEFT is not installed, so its case was left out.")
    return int(any(row[-1] != "OK" for row in table[1:]))


def cell(case, size, environment):
    """Train a case in new processes; returns "OK" or what went wrong."""
    command = [sys.executable, __file__, "--case", case]
    code, output = ranks.run(command, size, environment, LIMIT, capture=True)
    if code is None:
        return f"not done after {LIMIT} s"
    answers = [line.removeprefix(ANSWER) for line in output.splitlines() if line.startswith(ANSWER)]
    if not answers:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    answer = answers[-1]
    return answer if len(answer) <= SHOWN else answer[:SHOWN - 3] + "..."


def print_table(table, markdown):
    if markdown:
        table = [[text.replace("|", "\\|") for text in row] for row in table]
    widths = [max(len(text) for text in column) for column in zip(*table)]
    for row in [table[0], ["-" * width for width in widths]] + table[1:]:
        line = " | ".join(text.ljust(width) for text, width in zip(row, widths))
        print(f"| {line} |" if markdown else line.rstrip())


def run_rank(case):
    """Train a case as one of the ranks and print the answer; returns an exit code."""
    try:
        train(case)
        answer = "OK"
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        answer = f"{type(error).__name__}: {first_line}"
    print(f"\n{ANSWER}{answer}", flush=True)
    return int(answer != "OK")


def train(case):
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 1e-2,
                "torch_adam": True
            }
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
        },
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled="zero.Init" in case):
        model = CASES[case]()
    has_zero_sized = any(getattr(p, "ds_numel", p.numel()) == 0 for p in model.parameters())
    if has_zero_sized == (case == "no zero-sized parameter"):
        raise AssertionError("the model is not what the case says")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    x = torch.randn(4, 6, WIDTH)
    losses = []
    for _ in range(STEPS):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    deepspeed.comm.destroy_process_group()
    if not (all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0]):
        raise AssertionError(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
