"""One linear layer, forward and backward, over a sweep of shapes: ours, torch and torchao.

Run: python benchmarks/layers.py [--shapes MxKxN ...] [--policies 'P | Q'] [--rounds N]
                                 [--json PATH]

A shape is tokens x inputs x outputs. The three matrix products take 6 * M * K * N operations. On a
GPU every step is captured as a CUDA graph and replayed, so the device is timed and not the host.
Contenders take turns, each turn lasts at least 20 ms, and a figure is the median of all steps.
`raw` multiplies operands that are in e4m3 already: a ceiling, not a layer.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.bench.peers import convert_to_torchao
from narrowcast.bench.timing import step_seconds
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.replay import captured
from narrowcast.precision.plan.plan import make_plan
from narrowcast.runs import describe_machine

Shape = tuple[int, int, int]
Step = Callable[[], object]

SHAPES_CUDA = (
    "1024x1024x1024 1024x4096x14336 4096x1024x4096 4096x4096x4096 4096x14336x4096 "
    "16384x1024x1024 16384x1024x4096 16384x4096x1024 16384x2048x8192 16384x4096x4096 "
    "16384x4096x14336 16384x14336x4096 65536x1024x1024 65536x1024x4096 65536x4096x14336"
)
SHAPES_CPU = "256x128x512 256x512x128"
SPLIT = "params=bf16, master=split"
POLICIES_CUDA = " | ".join(
    f"{preset}, {SPLIT}" for preset in ("bf16", "fp8-tensor", "fp8-row", "fp8-delayed", "fp8-block")
)
POLICIES_CPU = "fp32 | bf16"
TURN_SECONDS = 0.02
LARGEST_E4M3 = 448.0


def layer(shape: Shape, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(shape[1], shape[2], bias=False, device=device))


def operands(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an input that needs a gradient, and the gradient of the output."""
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(tokens, outputs, device=device, dtype=dtype)


def clear_gradients(model: nn.Module, x: Tensor) -> None:
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None


def plain_step(model: nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    x, grad_output = operands(shape, device, dtype)

    def step() -> None:
        model(x).backward(grad_output)
        clear_gradients(model, x)

    return step


def torch_step(shape: Shape, device: torch.device, *, dtype: torch.dtype) -> Step:
    return plain_step(layer(shape, device).to(dtype), shape, device, dtype)


def torchao_step(shape: Shape, device: torch.device, *, recipe: str) -> Step:
    model = layer(shape, device).to(torch.bfloat16)
    convert_to_torchao(model, recipe)
    return plain_step(torch.compile(model, dynamic=False), shape, device, torch.bfloat16)


def our_step(shape: Shape, device: torch.device, *, policy: str, compiled: bool) -> Step:
    model = layer(shape, device)
    plan = make_plan(
        layer(shape, torch.device("meta")),
        policy,
        hardware=detect_hardware(str(device)),
        gemm_rows=shape[0],
        execution="graphed",
    )
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy=plan)
    forward = torch.compile(model, dynamic=False) if compiled else model
    x, _ = operands(shape, device, torch.float32)
    with torch.no_grad(), run.autocast():
        dtype = model(x.detach()).dtype
    x, grad_output = operands(shape, device, dtype)

    def step() -> None:
        # As an optimizer step does: an fp8 copy of the weight is then made in every step.
        torch.autograd.graph.increment_version(list(model.parameters()))
        with run.autocast():
            out = forward(x)
        out.backward(grad_output)
        clear_gradients(model, x)

    return step


def raw_step(shape: Shape, device: torch.device, *, by_row: bool) -> Step:
    """Return the three products alone. `_scaled_mm` needs the second operand column-major."""

    def operand(rows: int, inner: int) -> Tensor:
        drawn = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        return drawn.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)

    def product(rows: int, inner: int, columns: int) -> tuple[Tensor, ...]:
        one = torch.ones((), device=device)
        scale_a = torch.ones(rows, 1, device=device) if by_row else one
        scale_b = torch.ones(1, columns, device=device) if by_row else one
        return operand(rows, inner), operand(columns, inner).t(), scale_a, scale_b

    tokens, inputs, outputs = shape
    products = [
        product(tokens, inputs, outputs),
        product(tokens, outputs, inputs),
        product(outputs, tokens, inputs),
    ]

    def step() -> None:
        for a, b, scale_a, scale_b in products:
            torch._scaled_mm(
                a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip

    return step


def contenders(
    policies: list[str], device: torch.device
) -> dict[str, Callable[[Shape, torch.device], Step]]:
    """Return what builds each contender's step."""
    found: dict[str, Callable[[Shape, torch.device], Step]] = {}
    if device.type == "cuda":
        found["torch bf16"] = lambda s, d: torch_step(s, d, dtype=torch.bfloat16)
        found["torchao tensorwise"] = lambda s, d: torchao_step(s, d, recipe="tensorwise")
        found["torchao rowwise"] = lambda s, d: torchao_step(s, d, recipe="rowwise")
        found["raw, one scale"] = lambda s, d: raw_step(s, d, by_row=False)
        found["raw, row scales"] = lambda s, d: raw_step(s, d, by_row=True)
    else:
        found["torch fp32"] = lambda s, d: torch_step(s, d, dtype=torch.float32)
    for policy in policies:
        found[policy] = lambda s, d, p=policy: our_step(s, d, policy=p, compiled=False)
        if device.type == "cuda":
            found[f"{policy}, compiled"] = lambda s, d, p=policy: our_step(
                s, d, policy=p, compiled=True
            )
    return found


def measure(
    shape: Shape, builders: Mapping[str, Any], device: torch.device, *, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per contender."""
    steps: dict[str, Step] = {}
    failures: dict[str, str] = {}
    for name, build in builders.items():
        try:
            step = build(shape, device)
            steps[name] = captured(step, device=device) if device.type == "cuda" else step
        except (ImportError, RuntimeError, ValueError) as error:
            failures[name] = f"{type(error).__name__}: {error}"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            one = statistics.median(step_seconds(step, 5, device=device))
            count = max(10, math.ceil(TURN_SECONDS / one))
            times[name] += step_seconds(step, count, device=device)
    operations = 6.0 * math.prod(shape)
    rows: list[dict[str, Any]] = []
    for name in builders:
        row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "name": name}
        if name in failures:
            rows.append(row | {"failure": failures[name]})
            continue
        seconds = statistics.median(times[name])
        rows.append(row | {"ms": 1000 * seconds, "tflops": operations / seconds / 1e12})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", metavar="MxKxN")
    parser.add_argument("--policies", help="policies, with | between them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    torch._dynamo.config.recompile_limit = 1000  # one function, compiled for every shape
    words = options.shapes or (SHAPES_CUDA if on_gpu else SHAPES_CPU).split()
    text = options.policies or (POLICIES_CUDA if on_gpu else POLICIES_CPU)
    builders = contenders([policy.strip() for policy in text.split("|")], device)
    rows: list[dict[str, Any]] = []
    print("| tokens x in x out | contender | ms | TFLOP/s |\n|---|---|---|---|")
    for word in words:
        tokens, inputs, outputs = map(int, word.split("x"))
        for row in measure((tokens, inputs, outputs), builders, device, rounds=options.rounds):
            rows.append(row)
            figures = row.get("failure") or f"{row['ms']:.4f} | {row['tflops']:.1f}"
            print(f"| {row['shape']} | {row['name']} | {figures} |", flush=True)
    if options.json:
        found = {"environment": describe_machine(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
