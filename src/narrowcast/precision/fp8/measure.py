"""Measure how fast linear layers are in bf16 and in fp8 on a GPU, for plans to look up.

Device time is that of a replayed CUDA graph of both passes. Host time is that of a small layer in
eager mode, as one of many: a layer with its own backward pass takes the host twice as long.
"""

import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from narrowcast.errors import UnsupportedError
from narrowcast.hardware import Speeds
from narrowcast.hardware.replay import captured
from narrowcast.hardware.speeds import FROZEN, KINDS, TOKENS, WIDTHS
from narrowcast.numerics import plain_format
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fp8.quantized_frozen_products import QuantizedFrozenProducts
from narrowcast.precision.plan.module_plan import BLOCKS_AT
from narrowcast.precision.plan.policy import FP8_FORMATS, PRESETS, Policy
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.quantized_frozen import keep_layer
from narrowcast.precision.swap import swap

REPEATS = 7
HOST_CALLS, HOST_LAYERS = 4, 16
SMALL = (256, 256, 256)
"""Tokens, inputs and outputs of a layer with which the device is done before the host is."""


def measure_speeds(device: torch.device, tell: Callable[[str], None]) -> Speeds:
    """Return the seconds of every kind and shape of the table; takes some seconds on an H200."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UnsupportedError(
            f"Measuring fp8 needs a GPU of compute capability 8.9 or more, got {device}. Leave "
            "--measure out."
        )
    shapes = list(itertools.product(TOKENS, WIDTHS, WIDTHS))
    seconds: dict[str, tuple[float, ...]] = {}
    kinds = _kinds(torch.cuda.get_device_capability(device))
    for kind in kinds:
        tell(f"linear layers: {_WORDS.get(kind, f'fp8, scaled by {kind}')}")
        seconds[kind] = tuple(_seconds(kind, *shape, device=device) for shape in shapes)
    tell("linear layers: host time")
    host_seconds = _host_seconds([kind for kind in kinds if kind not in FROZEN], device=device)
    return Speeds(
        gpu=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        tokens=TOKENS,
        inputs=WIDTHS,
        outputs=WIDTHS,
        seconds=seconds,
        host_seconds=host_seconds,
    )


_WORDS = {
    "bf16": "bf16",
    "frozen-bf16": "a frozen weight in bf16",
    "frozen-wide": "a frozen weight in e4m3, multiplied in 16 bits",
    "frozen-row": "a frozen weight in e4m3, multiplied in fp8",
}


def _kinds(capability: tuple[int, int]) -> list[str]:
    """Return what a GPU has products for."""
    return [kind for kind in KINDS if kind != "block" or capability == BLOCKS_AT]


def policy_layer_seconds(
    policy: Policy, tokens: int, inputs: int, outputs: int, *, device: torch.device
) -> float:
    """Return the device time of both passes of a linear layer under a policy. Synchronises."""
    wide = policy.functional
    tf32 = torch.backends.cuda.matmul.allow_tf32
    dtype = torch.float32 if wide in ("fp32", "tf32") else plain_format(wide).dtype
    assert dtype is not None
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
    if policy.forward in FP8_FORMATS:
        formats = ProductFormats.of(policy)
        history = AmaxHistories([formats], device).of(0) if policy.scaling == "delayed" else None
        swap(layer, Fp8Linear, nc_formats=formats, nc_history=history)
    try:
        torch.backends.cuda.matmul.allow_tf32 = policy.forward == "tf32"
        step = _passes(layer, (tokens, inputs, outputs), dtype=dtype, device=device)
        return _replayed_seconds(step, device=device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _seconds(kind: str, tokens: int, inputs: int, outputs: int, *, device: torch.device) -> float:
    step = _step(kind, tokens, inputs, outputs, device=device)
    return _replayed_seconds(step, device=device)


def _replayed_seconds(step: Callable[[], None], *, device: torch.device) -> float:
    """Return the median time of a step that is replayed as a CUDA graph. Synchronises."""
    replay = captured(step, device=device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    replay()
    for event in events:
        event.record()
        replay()
    torch.cuda.synchronize(device)
    milliseconds: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(milliseconds) / 1e3


def _host_seconds(kinds: Sequence[str], *, device: torch.device) -> dict[str, float]:
    """Return the host time to queue both passes of a layer; kinds take turns. Synchronises."""
    steps = {kind: _step(kind, *SMALL, device=device, layers=HOST_LAYERS) for kind in kinds}
    best = dict.fromkeys(kinds, math.inf)
    for _ in range(REPEATS + 1):  # the first compiles
        for kind, step in steps.items():
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                step()
            best[kind] = min(best[kind], time.perf_counter() - begin)
    torch.cuda.synchronize(device)
    return {kind: took / HOST_CALLS / HOST_LAYERS for kind, took in best.items()}


def _step(
    kind: str, tokens: int, inputs: int, outputs: int, *, device: torch.device, layers: int = 1
) -> Callable[[], None]:
    """Return a forward and a backward pass of a layer, or of several, one after the other."""
    model = nn.Sequential(*(_layer(kind, inputs, outputs, device=device) for _ in range(layers)))
    return _passes(model, (tokens, inputs, outputs), dtype=torch.bfloat16, device=device)


def _passes(
    model: nn.Module, shape: tuple[int, int, int], *, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a forward and a backward pass of layers on an input of some dtype."""
    tokens, inputs, outputs = shape
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, outputs, device=device, dtype=dtype)

    def step() -> None:
        if weights:
            torch.autograd.graph.increment_version(weights)  # as an update would
        torch.autograd.grad(model(x), (x, *weights), grad)

    return step


def _layer(kind: str, inputs: int, outputs: int, *, device: torch.device) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    if kind in FROZEN:
        _freeze(layer, kind)
    elif kind != "bf16":
        formats = ProductFormats.of(PRESETS[f"fp8-{kind}"])
        history = AmaxHistories([formats], device).of(0) if kind == "delayed" else None
        swap(layer, Fp8Linear, nc_formats=formats, nc_history=history)
    return layer


def _freeze(layer: nn.Linear, kind: str) -> None:
    layer.weight.requires_grad_(False)
    if kind != "frozen-bf16":
        keep_layer(layer)
    if kind == "frozen-row":
        formats = ProductFormats.of(PRESETS["fp8-row"])
        swap(layer, QuantizedFrozenProducts, nc_formats=formats, nc_native=True)
