"""How long does rounding to a format take, in units of a native fp16 cast of the same tensor?

Run: python benchmarks/rounding.py [--elements N] [--device cuda] [--json PATH]
The two are timed in turns, and the ratio is of medians, so that a busy machine slows both alike.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    MXFP8,
    NVFP4,
    TF32,
    cast,
    cast_counts,
    quantize,
    round_blocks,
    round_stochastic,
    round_to,
)


def cases(device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for target in (TF32, BF16, FP16, E4M3, E5M2, E2M1):
        found[f"round_to {target.name}"] = partial(round_to, target=target)
        found[f"round_to {target.name} saturating"] = partial(
            round_to, target=target, saturate=True
        )
    found["cast e4m3 saturating"] = partial(cast, target=E4M3, saturate=True)
    for per in ("tensor", "row", "column", "block"):
        found[f"quantize e4m3 per {per}"] = partial(quantize, target=E4M3, per=per)
    for blocks in (MXFP8, NVFP4):
        found[f"round_blocks {blocks.name}"] = partial(round_blocks, target=blocks)
    found["cast_counts e4m3"] = partial(cast_counts, target=E4M3)
    for target in (BF16, E4M3):
        found[f"round_stochastic {target.name}"] = partial(
            round_stochastic, target=target, generator=generator
        )
    return found


def seconds_of(work: Callable[[Tensor], Tensor], x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(work: Callable[[Tensor], Tensor], x: Tensor, *, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of `work` and of the native fp16 cast, taken in turns."""

    def native(x: Tensor) -> Tensor:
        return x.to(torch.float16)

    seconds_of(work, x), seconds_of(native, x)
    pairs = [(seconds_of(work, x), seconds_of(native, x)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = torch.Generator(options.device).manual_seed(0)
    x = torch.randn(options.elements // 4096, 4096, generator=generator, device=options.device)
    rows = []
    for name, work in cases(options.device).items():
        ours, native = measure(work, x, rounds=options.rounds)
        rows.append({"case": name, "ms": ours, "native_fp16_ms": native, "ratio": ours / native})
    print(f"{x.numel()} fp32 values on {options.device}, torch {torch.__version__}")
    print(f"{'':32} {'ms':>8} {'fp16 cast ms':>13} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['case']:32} {row['ms']:8.2f} {row['native_fp16_ms']:13.2f} {row['ratio']:6.2f}"
        )
    if options.json is not None:
        result = {
            "command": f"python benchmarks/rounding.py --elements {options.elements} "
            f"--rounds {options.rounds} --device {options.device}",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if x.is_cuda else "cpu",
            "threads": torch.get_num_threads(),
            "elements": x.numel(),
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
