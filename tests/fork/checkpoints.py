# SPDX-License-Identifier: Apache-2.0
"""One rank that saves or loads checkpoints; see test_release_checkpoints.py.

Usage: checkpoints.py save|load FOLDER, with the environment of a rank.
"""

import os
import sys

import torch

import deepspeed
from unit.checkpoint.zero_sized_checkpoints import assert_same, mixed, tied, weights_of
from unit.runtime.zero.zero_sized import batch, config, engine_of, step

BUILD = {"mixed": mixed, "tied": tied}
STAGES = [0, 1, 2]  # the release can't train zero-sized parameters in stage 3


def main(action, root):
    deepspeed.init_distributed(dist_backend="gloo")
    for name, build in BUILD.items():
        for stage in STAGES:
            folder = os.path.join(root, f"{name}-{stage}")
            engine = engine_of(build, config(stage=stage))
            if action == "save":
                step(engine, batch(torch.float32))
                engine.save_checkpoint(folder)
                torch.save(weights_of(engine), os.path.join(folder, "weights"))
            else:
                path, _ = engine.load_checkpoint(folder)
                assert path, f"nothing was loaded from {folder}"
            losses = [step(engine, batch(torch.float32)) for _ in range(2)]
            after = os.path.join(folder, f"after-{os.environ['RANK']}")
            if action == "save":
                torch.save((losses, weights_of(engine)), after)
            else:
                expected_losses, expected = torch.load(after)
                assert losses == expected_losses
                assert_same(weights_of(engine), expected)
            engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # At the end of the interpreter a thread of torch's gloo backend may still want it, to free a tensor, and abort.
    sys.stdout.flush()
    os._exit(0)
