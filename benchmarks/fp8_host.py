"""What an fp8 linear layer costs the host, eager and compiled, and its casts the device.

Run on a GPU: python benchmarks/fp8_host.py [--json PATH] [--profile] [--only SECTION ...]

A layer, forward and backward, of widths 1024, 2048 and 4096 with 16,384 rows: microseconds that the
host takes to queue the work, in bf16 and by each scaling of fp8, and how many more those are than
bf16's; the milliseconds of the device for the whole, and for the casts in it. Then two blocks of a
Llama of transformers (seven linear layers each, width 1024 and 2048, 16 × 1024 tokens), prepared:
host and wall clock of a forward and a backward pass, launches, device time by kind of kernel, and
how many casts there were. `--profile` adds the functions in which the host spends its time.
Then, of a chain of twelve linear layers with GELUs between them and few rows, what the host takes
over a layer of it, both passes, eager and compiled: of a compiled one what is left are the casts,
which are operators in Python to the compiler. Last, single calls of which those layers are made:
products, casts and launches, with so few rows that the device never keeps the host waiting.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import narrowcast as nc
from host_functions import hottest
from narrowcast.kernels.fp8 import DECIDED, Quantized, quantize, quantize_into
from narrowcast.precision.fp8.delayed import AmaxHistories
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp
from narrowcast.precision.plan.policy import PRESETS
from narrowcast.precision.products.operands import ProductFormats
from narrowcast.precision.swap import swap
from narrowcast.runs import describe_machine

ROWS, WIDTHS = 16384, (1024, 2048, 4096)
KINDS = ("bf16", "tensor", "delayed", "row", "block")
WARM_UP, CALLS, ROUNDS = 5, 10, 7
CHAIN = 12
"""Layers of a chain."""
CASTS = ("quantize", "largest_magnitude", "largest_of_both", "back_tile", "lines", "blocks")
"""In the names of the kernels that scale and cast."""
PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "xmma")


def microseconds(step: Callable[[], Any], *, calls: int = CALLS) -> float:
    """Return what the host takes to queue a step: the median of rounds, each begun with nothing."""
    for _ in range(WARM_UP):
        step()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        rounds.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def on_device(step: Callable[[], Any]) -> dict[str, float]:
    """Return milliseconds of the device in a step by kind of kernel, and how many kernels."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    found = {"casts": 0.0, "products": 0.0, "other": 0.0}
    launches = casts = 0
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        kind = "products" if any(word in name for word in PRODUCTS) else "other"
        kind = "casts" if any(word in name for word in CASTS) else kind
        found[kind] += event.self_device_time_total / 1e3
        launches, casts = launches + 1, casts + (kind == "casts")
    return {**{kind: round(ms, 3) for kind, ms in found.items()}, "kernels": launches} | {
        "cast_kernels": casts
    }


def layer_step(kind: str, width: int) -> Callable[[], Any]:
    """Return a forward and a backward pass of one layer whose weight stays as it is."""
    layer = nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16)
    if kind != "bf16":
        formats = ProductFormats.of(PRESETS[f"fp8-{kind}"])
        whole = AmaxHistories([formats], torch.device("cuda"))
        history = whole.of(0) if kind == "delayed" else None
        swap(layer, Fp8Linear, nc_formats=formats, nc_history=history)
    x = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(layer(x), (x, layer.weight), grad)


def measure_layers() -> list[dict[str, Any]]:
    rows = []
    for width in WIDTHS:
        plain = 0.0
        for kind in KINDS:
            step = layer_step(kind, width)
            host = microseconds(step)
            plain = host if kind == "bf16" else plain
            told = {"width": width, "kind": kind, "host_us": round(host, 1)}
            rows.append(told | {"above_bf16_us": round(host - plain, 1), **on_device(step)})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def blocks(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=2,
        intermediate_size=width * 11 // 4,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=1024,
        use_cache=False,
    )
    return LlamaModel(config).cuda().train()


def measure_blocks(policy: str, width: int, *, profiled: bool) -> dict[str, Any]:
    model = blocks(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # Whatever gains: what is asked here is what each costs.
    plan = nc.plan(model, policy, hardware=nc.detect_hardware("cuda"), skip_slow_fp8=False)
    run = nc.prepare(model, optimizer, policy=plan)
    ids = torch.randint(0, 1024, (16, 1024), device="cuda")

    def passes() -> None:
        with run.autocast():
            loss = model(input_ids=ids).last_hidden_state.float().square().mean()
        run.backward(loss)

    for _ in range(2):  # scales are decided by a step
        with run.autocast():
            loss = model(input_ids=ids).last_hidden_state.float().square().mean()
        run.step(loss)
    host = microseconds(passes)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        passes()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / CALLS * 1e3
    chains = sum(isinstance(module, Fp8GatedMlp) for module in model.modules())
    told = {"policy": policy, "width": width, "host_ms": round(host / 1e3, 3)}
    told |= {"wall_ms": round(wall, 3), "chains": chains, **on_device(passes)}
    if profiled:
        told["host_functions"] = hottest(passes, calls=CALLS, count=15)
    run.release()
    return told


def chain_step(policy: str, *, compiled: bool) -> Callable[[], Any]:
    """Return both passes of a chain of layers, through the drop-in; the device has little to do."""
    torch.manual_seed(0)
    pairs = [(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(CHAIN // 2)]
    model = nn.Sequential(*[layer for pair in pairs for layer in pair]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # Captured, so that no layer is left out for the host whose time is asked here.
    run = nc.prepare(model, optimizer, policy=policy, execution="graphed")
    forward = torch.compile(model) if compiled else model
    x = torch.randn(256, 1024, device="cuda")

    def passes() -> None:
        with run.autocast():
            loss = forward(x).float().square().mean()
        run.backward(loss)

    for _ in range(2):  # scales are decided by a step
        with run.autocast():
            loss = forward(x).float().square().mean()
        run.step(loss)
    return passes


def measure_chains(*, profiled: bool) -> list[dict[str, Any]]:
    rows = []
    for compiled in (False, True):
        plain = 0.0
        for policy in ("bf16, params=bf16, master=split", "fp8-delayed, params=bf16, master=split"):
            passes = chain_step(policy, compiled=compiled)
            host = microseconds(passes) / CHAIN
            plain = plain or host
            told: dict[str, Any] = {"mode": "compiled" if compiled else "eager", "policy": policy}
            if profiled:
                told["host_functions"] = hottest(passes, calls=CALLS, count=30)
            rows.append(told | {"layer_us": round(host, 1), "above_us": round(host - plain, 1)})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def measure_parts() -> list[dict[str, Any]]:
    """Return what single calls take the host."""
    wide = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(1, device="cuda")
    noted = torch.zeros(4, dtype=torch.int32, device="cuda")
    narrow, fp8 = wide.to(torch.float8_e4m3fn), torch.float8_e4m3fn
    narrow_weight = weight.to(fp8)
    out, transposed = narrow.clone(), torch.empty(1024, 256, device="cuda", dtype=fp8)
    made = Quantized(out, transposed, scale, scale)
    DECIDED.add(scale)
    operator = torch.ops.narrowcast.quantize_fp8_by.default
    by_torch = functools.partial(torch._scaled_mm, scale_a=scale, scale_b=scale)
    in_bf16 = functools.partial(by_torch, narrow, narrow_weight.t(), out_dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "torch.empty": lambda: torch.empty(256, 1024, device="cuda", dtype=fp8),
        "one elementwise kernel of torch": bias.neg_,
        "bf16 product": lambda: torch.mm(wide, weight),
        "bf16 product and bias": lambda: torch.addmm(bias, wide, weight),
        "fp8 product": in_bf16,
        "fp8 product, fast accumulation": lambda: in_bf16(use_fast_accum=True),
        "fp8 product and bias": lambda: in_bf16(bias=bias),
        "cast, as a function": lambda: quantize(wide, fp8, scale_inv=scale, cast_stats=noted),
        "cast, as an operator": lambda: operator(wide, fp8, scale, noted, True, True, "", None),
        "cast, into memory that exists": lambda: quantize_into(
            made, wide, cast_stats=noted, by_itself=False
        ),
    }
    with torch.no_grad():
        rows = [{"call": name, "us": round(microseconds(call, calls=100), 1)} for name, call in
                calls.items()]  # fmt: skip
    for row in rows:
        print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--profile", action="store_true", help="say where the host is")
    sections = ("layers", "blocks", "chains", "parts")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    options = parser.parse_args()
    figures: dict[str, Any] = {"environment": describe_machine()}
    if "chains" in options.only:
        figures["chains"] = measure_chains(profiled=options.profile)
    if "parts" in options.only:
        figures["parts"] = measure_parts()
    if "layers" in options.only:
        figures["layers"] = measure_layers()
    if "blocks" in options.only:
        figures["blocks"] = []
        policies = ("bf16", "fp8-tensor", "fp8-delayed", "fp8-row")
        for width, policy in itertools.product((1024, 2048), policies):
            figures["blocks"].append(measure_blocks(policy, width, profiled=options.profile))
            print(figures["blocks"][-1], file=sys.stderr, flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
