"""What a step costs the host, by the number of tensors: `run.step` against torch's own three calls.

python benchmarks/host_cost.py [--device cuda] [--tensors 50 150 500] [--json PATH]

A model of many small linear layers (16 × 16, so the device has next to nothing to do), AdamW,
clipping to 1. Before each timed call the device is waited for, so that its queue is short, and
nothing is waited for afterwards: on a GPU this is what the host takes to queue the step. The time
is that of the thread on a CPU, where other programs may be running, and of the clock on a GPU.
Torch's are `clip_grad_norm_`, `AdamW.step` (foreach, and fused) and `zero_grad`; for fp16 with a
GradScaler around them. Ours is given the fused AdamW; on a GPU the kernel stands in for it.
`graphed` is a whole step, passes included, by `run.graphed`.

On a GPU also the host's microseconds for forward and backward of a linear layer in fp8 above those
of one in bf16, by a model of twenty of them (1024 wide, 256 rows).
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.runs import describe_machine

WARM_UP, REPEATS, WIDTH = 10, 50, 16
SPLIT = "bf16, params=bf16, master=split"
POLICIES = ("bf16", SPLIT, "fp16")
FP8_POLICIES = ("fp8-tensor", "fp8-delayed")
LAYERS, FP8_WIDTH, ROWS = 20, 1024, 256


def model_of(tensors: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(tensors // 2))).to(device)


def loss_of(model: nn.Module, factor: Tensor) -> Tensor:
    """Return a loss whose passes are as cheap as they can be: every weight has a gradient."""
    return torch.stack([(p.float() * factor).sum() for p in model.parameters()]).sum()


@dataclass(frozen=True)
class Call:
    """What is timed, after something that is not."""

    before: Callable[[], object]
    timed: Callable[[], object]


def microseconds(calls: list[Call], device: str) -> list[float]:
    """Return the median of what each call takes. They take turns: hosts grow slow at times."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP + REPEATS):
        for call, each in zip(calls, took, strict=True):
            call.before()
            if device == "cuda":
                torch.cuda.synchronize()
            begin = clock()
            call.timed()
            each.append(clock() - begin)
    return [1e6 * sorted(each[WARM_UP:])[REPEATS // 2] for each in took]


def our_step(tensors: int, policy: str, device: str) -> Call:
    model = model_of(tensors, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)
    factor = torch.full((), 1e-3, device=device)
    return Call(lambda: run.backward(loss_of(model, factor)), run.step)


def graphed_step(tensors: int, policy: str, device: str) -> Call:
    model = model_of(tensors, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)
    fast = run.graphed(lambda factor: loss_of(model, factor))
    factor = torch.full((), 1e-3, device=device)
    for _ in range(WARM_UP):
        fast(factor)
    assert fast.captured, fast.why
    return Call(lambda: None, lambda: fast(factor))


def torch_step(tensors: int, kind: str, device: str, *, scaled: bool) -> Call:
    model = model_of(tensors, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **{kind: True})
    scaler = torch.amp.GradScaler(device, enabled=scaled, init_scale=256.0)
    factor = torch.full((), 1e-3, device=device)

    def backward() -> None:
        scaler.scale(loss_of(model, factor)).backward()

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Call(backward, step)


def steps_of(tensors: int, device: str) -> dict[str, Call]:
    """Return every way to take a step of so many tensors."""
    graphed = POLICIES if device == "cuda" else ()
    return {
        **{f"run.step, {policy}": our_step(tensors, policy, device) for policy in POLICIES},
        "torch, foreach": torch_step(tensors, "foreach", device, scaled=False),
        "torch, fused": torch_step(tensors, "fused", device, scaled=False),
        "torch, fused, GradScaler": torch_step(tensors, "fused", device, scaled=True),
        **{f"graphed, {policy}": graphed_step(tensors, policy, device) for policy in graphed},
    }


def step_rows(counts: list[int], device: str) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for count in counts:
        calls = steps_of(count, device)
        for way, took in zip(calls, microseconds(list(calls.values()), device), strict=True):
            rows.setdefault(way, {"way": way})[f"{count} tensors"] = round(took, 1)
    return list(rows.values())


def layer_rows() -> list[dict[str, Any]]:
    """Measure forward and backward of a layer, by those of a model of many."""
    rows: list[dict[str, Any]] = []
    calls: list[Call] = []
    for policy in ("bf16", *FP8_POLICIES):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(FP8_WIDTH, FP8_WIDTH) for _ in range(LAYERS))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        # A policy keeps layers in bf16 where fp8 would be slower, and its head: all are wanted.
        wanted = nc.plan(model, policy, hardware=nc.detect_hardware("cuda"), skip_slow_fp8=False)
        run = nc.prepare(model, optimizer, policy=wanted)
        native = sum(m.policy.forward == "e4m3" for m in wanted.modules if m.how == "native")
        x = torch.randn(ROWS, FP8_WIDTH, device="cuda")

        def passes(run: nc.Prepared = run, model: nn.Module = model, x: Tensor = x) -> None:
            with run.autocast():
                loss = model(x).float().square().mean()
            run.backward(loss)

        def step(run: nc.Prepared = run) -> None:
            if run.engine.weights.with_gradients():
                run.step()

        calls.append(Call(step, passes))
        rows.append({"policy": policy, "us a layer": 0.0, "in fp8": native})
    for row, took in zip(rows, microseconds(calls, "cuda"), strict=True):
        row["us a layer"] = round(took / LAYERS, 1)
    for row in rows:
        row["above bf16"] = round(row["us a layer"] - rows[0]["us a layer"], 1)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(each) for each in row.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tensors", nargs="+", type=int, default=[50, 150, 500])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"environment": describe_machine(), "device": options.device}
    figures["host_us_of_a_step"] = step_rows(options.tensors, options.device)
    show(figures["host_us_of_a_step"])
    if options.device == "cuda":
        figures["host_us_of_a_layer"] = layer_rows()
        print()
        show(figures["host_us_of_a_layer"])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
