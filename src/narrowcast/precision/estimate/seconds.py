"""The time of a step before it runs: each operation takes what its products or its bytes take.

Rates are those of data sheets times the share that steps of this library reached on an H200.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from narrowcast.hardware.catalog import Gpu
from narrowcast.precision.estimate.ledger import Op

REACHED = {"products": 0.72, "fp8": 0.60, "attention": 0.42, "convolution": 0.30, "bytes": 0.60}
"""Share of the data sheet's rates that steps reached on an H200, rounded, from the rows of
`benchmarks/results/models-h200.json` at commit 5a1e2258: 16-bit products, products in fp8, fused
attention, convolutions, and passes over memory."""
LAUNCH = 2.0e-6
"""Seconds of a kernel beside its work: its start and end."""
HOST = 7.0e-6
"""Seconds of the host per operation in eager mode."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Bound = Literal["tensor cores", "memory", "host"]


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The predicted time of a step."""

    seconds: float
    bound: Bound
    """What most of the time is spent on."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Seconds by bound."""
    rates: str = ""
    """Where the rates come from."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "seconds": self.seconds,
            "bound": self.bound,
            "shares": dict(self.shares),
            "rates": self.rates,
        }


def step_seconds(
    ops: Sequence[Op],
    gpu: Gpu,
    *,
    state_bytes: int,
    captured: bool,
    micro_batches: int = 1,
    simulated: int = 1,
) -> StepSeconds:
    """Return how long operations take on a GPU.

    `simulated` micro-batches were run for `micro_batches`. `state_bytes` are read and written by
    the optimizer's kernel once per step.
    """
    spent = {"tensor cores": 0.0, "memory": 0.0}
    bandwidth = gpu.bandwidth * 1e9 * REACHED["bytes"]
    count = 0
    repeats = micro_batches / simulated
    for op in ops:
        times = 1.0 if op.phase == "update" else repeats
        by_bytes = op.bytes / bandwidth
        by_flops = op.flops / (_rate(op.dtype, gpu) * 1e12 * REACHED[_kind(op)])
        bound = "tensor cores" if by_flops > by_bytes else "memory"
        spent[bound] += times * (max(by_bytes, by_flops) + LAUNCH)
        count += round(times)
    spent["memory"] += state_bytes / bandwidth
    device, host = sum(spent.values()), 0.0 if captured else count * HOST
    largest: Bound = "tensor cores" if spent["tensor cores"] > spent["memory"] else "memory"
    reached = "the shares that an H200 reached"
    return StepSeconds(
        seconds=max(device, host),
        bound="host" if host > device else largest,
        shares={**spent, "host": host},
        rates=f"data sheet of the {gpu.name} times {reached}",
    )


def _kind(op: Op) -> str:
    if "attention" in op.name:
        return "attention"
    if "convolution" in op.name:
        return "convolution"
    return "fp8" if op.dtype in _FP8 else "products"


def _rate(dtype: torch.dtype | None, gpu: Gpu) -> float:
    """Return the products of a format per second, in 10¹² operations."""
    plain = gpu.tflops["fp32"]
    if dtype in _FP8:
        return gpu.tflops.get("fp8", gpu.tflops.get("bf16", plain))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32") if dtype else "fp32"
    return gpu.tflops.get(name, plain)
