# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the stock release wrote load in the fork, and the fork's in the stock release."""

import glob
import os
import socket
import subprocess
import sys

import pytest
import torch

from checkpoints import BUILD, STAGES
from commands import ROOT
from unit.checkpoint.zero_sized_checkpoints import assert_converts_to

STOCK = ROOT / "build" / "stock"
SIZE = 2


def in_ranks(which, *arguments):
    """Run checkpoints.py in ranks that have the fork, which is installed here, or the stock release."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(STOCK)] * (which == "stock") + [str(ROOT / "tests")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "ops" / which),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(SIZE),
        "LOCAL_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port
    }
    command = [sys.executable, str(ROOT / "tests" / "fork" / "checkpoints.py"), *map(str, arguments)]
    ranks = [
        subprocess.Popen(command,
                         env={
                             **environment, "RANK": str(rank),
                             "LOCAL_RANK": str(rank)
                         },
                         stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT,
                         text=True) for rank in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for path in glob.glob(f"/dev/shm/deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*"):
            os.unlink(path)
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(outputs)


@pytest.mark.parametrize("writer, reader", [("stock", "fork"), ("fork", "stock")])
def test_resume(writer, reader, tmp_path):
    if not STOCK.is_dir():
        pytest.skip("the stock release is not installed: make build/stock does that")
    in_ranks(writer, "save", tmp_path)
    in_ranks(reader, "load", tmp_path)
    # The fork's zero_to_fp32 finds every parameter, whoever wrote the checkpoint. Only which zero-sized parameters are
    # shared is nowhere to be found in what the release wrote.
    for name in BUILD if writer == "fork" else ["mixed"]:
        for stage in filter(None, STAGES):  # stage 0 has nothing to convert
            folder = tmp_path / f"{name}-{stage}"
            assert_converts_to(BUILD[name], torch.load(folder / "weights"), folder)
