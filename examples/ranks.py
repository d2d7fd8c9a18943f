# SPDX-License-Identifier: Apache-2.0
"""Runs a command in several rank processes on this machine, over gloo on the CPU.

As a program it loads the op that DeepSpeed's collectives use on the CPU, and compiles it first if it has to. That has
to happen before ranks start: a rank that is killed while it compiles leaves a lock that every later run waits for.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "build" / "ops"
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed chooses when it is imported, so import this module first
GRACE = 5  # seconds that the other ranks get to end after one has failed


def environment(**variables):
    """The environment of a process that runs DeepSpeed on the CPU and looks nothing up on the network."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    return {"TORCH_EXTENSIONS_DIR": str(OPS / "fork"), **os.environ, **fixed, **quiet, **variables}


def load_op(variables):
    """Load DeepSpeed's op in a process of its own; returns what that prints last, DeepSpeed's version and file."""
    done = subprocess.run([sys.executable, __file__], env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"DeepSpeed's op for collectives on the CPU could not be loaded:\n{done.stdout}")
    return done.stdout.splitlines()[-2:]


def run(command, size, variables, limit=None, capture=False):
    """Run a command in `size` ranks; returns the exit code and the output of the first that failed, or of rank 0.

    The output is captured or else goes where this process's goes. The code is None if time ran out.
    """
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # not without cleaning up
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, terminate)
        port_holder = stack.enter_context(socket.socket())  # bound, but not listening: rank 0 still can
        port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port_holder.bind(("127.0.0.1", 0))
        address, port = port_holder.getsockname()
        outputs, processes = [], []
        for rank in range(size):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
            own.update(MASTER_ADDR=address, MASTER_PORT=port)
            own = dict(variables, **{name: str(value) for name, value in own.items()})
            # DeepSpeed never removes this shared memory, 69 MB a rank.
            segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")
            stack.callback(segment.unlink, missing_ok=True)
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) if capture else None)
            processes.append(subprocess.Popen(command, env=own, stdout=outputs[-1], stderr=outputs[-1]))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        rank, code = _first_to_fail(processes, limit)
        if code != 0:
            _wait(processes, GRACE if code else 0)
        if capture:
            outputs[rank].seek(0)
        return code, outputs[rank].read() if capture else ""


def _first_to_fail(processes, limit):
    """The rank and the exit code of the first process that fails; rank 0 if none does, with None if time runs out."""
    deadline = time.monotonic() + (limit or float("inf"))
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if None not in codes:
            return 0, 0
        time.sleep(0.05)
    return 0, None


def _wait(processes, seconds):
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0, deadline - time.monotonic()))


if __name__ == "__main__":
    import deepspeed
    from deepspeed.comm.torch import build_shm_op
    build_shm_op()
    print(deepspeed.__version__)
    print(deepspeed.__file__)
