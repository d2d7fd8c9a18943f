# SPDX-License-Identifier: Apache-2.0
"""What the patch set costs a model that needs none of it: training steps of the stock release and of the fork.

The model is many small layers, so that the steps consist mostly of fetching parameters. Stock and fork run in turn,
each in new processes, and each pair gives one ratio, so that a machine whose speed drifts does not mislead.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import ranks  # noqa: E402

LAYERS = 200
WARM_UP = 5  # steps that record the trace of the model, and the first that follow it


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", type=Path, required=True, help="a folder that the stock release is installed in")
    parser.add_argument("--ranks", type=int, default=1, help="how many processes train together (default: 1)")
    parser.add_argument("--pairs", type=int, default=7, help="how often to measure both (default: 7)")
    parser.add_argument("--steps", type=int, default=30, help="how many steps to take each time (default: 30)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.steps)
        return
    columns = {
        "stock": ranks.environment(PYTHONPATH=str(options.stock.resolve()), TORCH_EXTENSIONS_DIR=f"{ranks.OPS}/stock"),
        "fork": ranks.environment(TORCH_EXTENSIONS_DIR=f"{ranks.OPS}/fork"),
    }
    for name, environment in columns.items():
        print(f"{name}: DeepSpeed {' '.join(ranks.load_op(environment))}", flush=True)
    ratios = []
    for pair in range(options.pairs):
        # Which goes first alternates, since the second finds the machine warmer.
        order = ["stock", "fork"] if pair % 2 == 0 else ["fork", "stock"]
        seconds = {name: measure(columns[name], options) for name in order}
        ratios.append(seconds["fork"] / seconds["stock"])
        print(
            f"pair {pair}: stock {seconds['stock'] * 1e3:.2f} ms, fork {seconds['fork'] * 1e3:.2f} ms a step, "
            f"ratio {ratios[-1]:.3f}",
            flush=True)
    print(f"fork / stock: min {min(ratios):.3f}, median {statistics.median(ratios):.3f}, max {max(ratios):.3f}")


def measure(environment, options):
    """The seconds of a step, as the median over the steps of rank 0."""
    command = [sys.executable, __file__, "--stock", str(options.stock), "--steps", str(options.steps)]
    code, output = ranks.run(command, options.ranks, environment, capture=True)
    if code != 0:
        sys.exit(f"A rank ended with exit code {code}:\n{output}")
    return json.loads(output.splitlines()[-1])


def run_rank(steps):
    import deepspeed
    import torch
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {
            "type": "Adam",
            "params": {
                "torch_adam": True
            }
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        seconds.append(time.perf_counter() - start)
    if os.environ["RANK"] == "0":
        print(json.dumps(statistics.median(seconds[WARM_UP:])), flush=True)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
