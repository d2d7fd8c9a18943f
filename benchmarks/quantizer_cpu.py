# SPDX-License-Identifier: Apache-2.0
"""Compare the CPU quantizer op with memcpy of the same bytes, and with a plain torch expression.

All that is compared takes turns, many times, and the best time of each counts: on a machine that does other work too,
the ratios mean more than the rates. A rate counts the bytes read and written.
"""

import argparse
import ctypes
import os
import platform
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402

from deepspeed.accelerator import get_accelerator  # noqa: E402

GROUP_SIZE = 8000  # what CUDAQuantizer aims at


def torch_quantize(values, groups, bits):
    """Symmetric quantization, as one would write it without the op."""
    values = values.view(groups, -1).float()
    high = values.abs().amax(dim=1, keepdim=True)
    scale = torch.where(high == 0, 1.0, 2.0**bits / (2 * high))
    levels = (values * scale).round().clamp(-2**(bits - 1), 2**(bits - 1) - 1).to(torch.int8)
    if bits == 4:
        levels = levels[:, ::2] << 4 | levels[:, 1::2] & 15
    return levels.flatten(), 1 / scale


def torch_dequantize(packed, params, groups, bits):
    levels = packed
    if bits == 4:
        levels = torch.stack((packed >> 4, packed << 4 >> 4), dim=-1)
    return (levels.view(groups, -1) * params).half().flatten()


def best_times(calls, seconds):
    """The best time of each of the calls, which take turns for so long, but twice at least."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
        rounds += 1
    return best


def compare(op, elems, bits, seconds):
    groups = max(elems // GROUP_SIZE, 1)
    elems = groups * GROUP_SIZE
    values = torch.randn(elems).half()
    packed, params = op.quantize(values, groups, bits, op.Symmetric)
    moved = elems * 2 + elems * bits // 8
    source = torch.ones(moved // 2, dtype=torch.int8)
    target = torch.ones(moved // 2, dtype=torch.int8)
    copy = (target.data_ptr(), source.data_ptr(), moved // 2)

    calls = {
        "memcpy": lambda: ctypes.memmove(*copy),
        "clone": lambda: source.clone(),
        "quantize": lambda: op.quantize(values, groups, bits, op.Symmetric),
        "dequantize": lambda: op.dequantize(packed, params, groups, bits, op.Symmetric),
        "torch quantize": lambda: torch_quantize(values, groups, bits),
        "torch dequantize": lambda: torch_dequantize(packed, params, groups, bits),
    }
    # The expressions of torch do what the op does.
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(calls["quantize"](), calls["torch quantize"]()))
    assert torch.equal(calls["dequantize"](), calls["torch dequantize"]())

    times = dict(zip(calls, best_times(list(calls.values()), seconds)))
    fields = [f"{elems:>10}", f"{bits:>4}", f"{torch.get_num_threads():>7}"]
    fields += [f"{moved / times[name] / 1e9:>6.1f}" for name in ("memcpy", "clone")]
    for name in ("quantize", "dequantize"):
        fields += [
            f"{moved / times[name] / 1e9:>10.1f}", f"{times['memcpy'] / times[name]:>8.2f}",
            f"{times[f'torch {name}'] / times[name]:>7.1f}"
        ]
    print("  ".join(fields), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=int, nargs="+", default=[80_000, 1_000_000, 32_000_000])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4], choices=[8, 4])
    parser.add_argument("--seconds", type=float, default=3, help="for each line (default: %(default)s)")
    options = parser.parse_args()
    op = get_accelerator().create_op_builder("QuantizerBuilder").load(verbose=False)

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
          f"groups of {GROUP_SIZE}, fp16, symmetric")
    print("memcpy (one thread, always) copies into memory that is there, clone and the op into new memory.")
    print("GB/s, and how many times as fast as memcpy and as torch:")
    print("     elems  bits  threads  memcpy  clone    quantize  /memcpy   /torch  dequantize  /memcpy   /torch")
    for count in dict.fromkeys([1, threads]):
        torch.set_num_threads(count)
        for elems in options.elems:
            for bits in options.bits:
                compare(op, elems, bits, options.seconds)


if __name__ == "__main__":
    main()
