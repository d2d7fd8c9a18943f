# SPDX-License-Identifier: Apache-2.0
"""Train a Vision Transformer that is full of zero-sized parameters with ZeRO-3, on scikit-learn's handwritten digits.

The ranks train from scratch and save a checkpoint half way. New processes resume it and have to go on exactly as the
first did: to the same losses and the same weights, bit for bit.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import ranks  # before DeepSpeed

import deepspeed
import deepspeed.comm as dist
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.modeling_vit import ViTLayer

BATCH = 32  # digits a rank takes in a step
WIDTH = 64
NEEDED_ACCURACY = 0.9
REPORTS = 12  # lines of progress


class Adapted(nn.Module):
    """A projection with a low-rank adapter, of rank 0."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection
        self.down = nn.Linear(projection.in_features, 0, bias=False)
        self.up = nn.Linear(0, projection.out_features, bias=False)

    def forward(self, x):
        return self.projection(x) + self.up(self.down(x))


class WithPlaceholder(nn.Linear):
    """A linear layer that owns a placeholder beside its weight and bias."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.placeholder = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return super().forward(x) + self.placeholder.sum()


class DigitClassifier(nn.Module):
    """A small ViT for images of 8x8 pixels, with zero-sized parameters in all layers and in a second head."""

    def __init__(self):
        super().__init__()
        self.vit = ViTForImageClassification(
            ViTConfig(image_size=8,
                      patch_size=2,
                      num_channels=1,
                      hidden_size=WIDTH,
                      intermediate_size=2 * WIDTH,
                      num_hidden_layers=3,
                      num_attention_heads=4,
                      initializer_range=0.1,
                      num_labels=10))
        for layer in [module for module in self.vit.modules() if isinstance(module, ViTLayer)]:
            for name, module in list(layer.named_modules()):
                if isinstance(module, nn.Linear):
                    kind = Adapted if name.startswith("attention.") else WithPlaceholder
                    layer.set_submodule(name, kind(module))
        self.second_head = nn.Linear(WIDTH, 0)  # for labels that nobody has come up with yet

    def forward(self, images, labels):
        outputs = self.vit(images, labels=labels, output_hidden_states=True)
        second_scores = self.second_head(outputs.hidden_states[-1][:, 0])
        return outputs.loss + second_scores.square().sum(), outputs.logits


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many processes train together (default: 2)")
    parser.add_argument("--steps", type=int, default=300, help="how many optimizer steps to take (default: 300)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where to keep the checkpoint, if anywhere")
    parser.add_argument("--resume", action="store_true", help="only resume the run that --checkpoint is from")
    options = parser.parse_args()
    if "RANK" in os.environ:
        problem = run_rank(options)
        dist.destroy_process_group()
        sys.exit(problem if os.environ["RANK"] == "0" else bool(problem))
    with tempfile.TemporaryDirectory() as temporary:
        options.checkpoint = options.checkpoint or Path(temporary)
        sys.exit(start_ranks(options))


def start_ranks(options):
    """Train, then resume, each in new processes; returns what is wrong, if anything."""
    environment = ranks.environment()
    print("Loading DeepSpeed's op for collectives on the CPU. The first time this takes a minute.", flush=True)
    version, _ = ranks.load_op(environment)
    print(f"DeepSpeed {version}, ZeRO-3, {options.ranks} ranks over gloo", flush=True)
    command = [sys.executable, __file__, "--steps", str(options.steps), "--checkpoint", str(options.checkpoint)]
    for part in [["--resume"]] if options.resume else [[], ["--resume"]]:
        code, _ = ranks.run(command + part, options.ranks, environment)
        if code != 0:
            return f"A rank ended with exit code {code}."
    return None


def run_rank(options):
    """Train or resume as one of the ranks; returns what is wrong, if anything."""
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.WARNING if os.environ["RANK"] == "0" else logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    record_file = options.checkpoint / "record.json"  # of the run that was not interrupted
    (images, labels), held_out = digits()
    engine = build_engine(options.steps)
    shapes = [parameter.ds_shape for parameter in engine.module.parameters()]
    empty = sum(shape.numel() == 0 for shape in shapes)
    if options.resume:
        engine.load_checkpoint(options.checkpoint, tag="half-way")
        say(f"New processes resume the checkpoint at step {engine.global_steps}.")
    else:
        say(f"The model has {len(shapes)} parameters. {empty} are zero-sized, the others have "
            f"{sum(shape.numel() for shape in shapes)} elements.")
        say(f"It learns from {len(labels)} digits; {len(held_out[1])} are held out.")
    losses = train(engine, images, labels, options)
    accuracy = accuracy_on(engine, *held_out)
    say(f"Accuracy on the digits held out: {accuracy:.3f}")
    record = {"losses": losses, "accuracy": accuracy, "weights": digest_of_weights(engine.module)}

    if options.resume:
        expected = json.loads(record_file.read_text())
        expected["losses"] = expected["losses"][-len(losses):]
        for what in record:
            if record[what] != expected[what]:
                return f"The resumed run came to other {what} than the run that was not interrupted."
        say(f"Losses of all {len(losses)} steps and final weights are bitwise those of the run without interruption.")
        return None
    if dist.get_rank() == 0:
        record_file.write_text(json.dumps(record))
    if not losses[-1] < losses[0]:
        return f"The loss did not fall: it was {losses[0]:.4f} and is {losses[-1]:.4f}."
    if accuracy < NEEDED_ACCURACY:
        return f"The accuracy on the digits held out is {accuracy:.3f}, less than {NEEDED_ACCURACY}."
    return None


def say(text):
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def digits():
    """The images and labels to learn from, and those held out."""
    images, labels = load_digits(return_X_y=True)
    learned, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    return (images[learned], labels[learned]), (images[held_out], labels[held_out])


def build_engine(steps):
    torch.manual_seed(0)
    model = DigitClassifier()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {
            "type": "Adam",
            "params": {
                "torch_adam": True
            }
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": max(2, steps // 10),
                "warmup_max_lr": 3e-3
            }
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 10000,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine, images, labels, options):
    """Take the steps that are left; returns their losses. Half way an uninterrupted run saves a checkpoint."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start = time.monotonic()
    losses = []
    for step in range(engine.global_steps, options.steps):
        if step == options.steps // 2 and not options.resume:
            engine.save_checkpoint(options.checkpoint, tag="half-way")
            say(f"step {step:4}  checkpoint saved")
        generator = torch.Generator().manual_seed(step * size + rank)
        batch = torch.randint(len(labels), (BATCH, ), generator=generator)
        loss, _ = engine(images[batch], labels[batch])
        engine.backward(loss)
        engine.step()
        losses.append(total(loss) / size)
        if step % max(1, options.steps // REPORTS) == 0 or step == options.steps - 1:
            say(f"step {step:4}  loss {losses[-1]:.4f}  {time.monotonic() - start:5.1f} s")
    return losses


def accuracy_on(engine, images, labels):
    rank, size = dist.get_rank(), dist.get_world_size()
    engine.eval()
    with torch.no_grad():
        _, scores = engine(images[rank::size], labels[rank::size])
    return total((scores.argmax(-1) == labels[rank::size]).sum()) / len(labels)


def total(number):
    """The sum over the ranks of a tensor with one element."""
    number = number.detach().double()
    dist.all_reduce(number)
    return number.item()


def digest_of_weights(model):
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
