"""Does a loss scale that grows by measured head-room help fp16 training?

Run on a CPU, fp16 emulated: python benchmarks/adaptive_growth.py [--json PATH] [--steps N]

A small language model on Python's help text trains in fp16 with several controllers of the loss
scale. `fixed` doubles it after a number of finite steps, as `LossScale` does. `head-room` doubles
it when the largest scaled gradient stayed so many powers of two below fp16's largest number for so
many steps in a row, by the measured exponents of all gradients of weights and of the inputs and
outputs of linear layers. It is the best case: in a run, reading the latter has a cost.

Two cases start at 65536 and at 1. In `burst`, three batches in a row, twice in the run, have a loss
2^20 times as large: the scale falls, and has to climb back. A step counts as low below 2^14. The
last rows keep a static scale for the whole run, which shows what a low scale costs.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import narrowcast as nc
from narrowcast.runs import describe_machine
from narrowcast.training.data import batch_order, make_batches
from narrowcast.training.optimizers import build_optimizer, get_groups
from narrowcast.workloads import build_task

LARGEST = 65504.0
BURSTS = (0.25, 0.6)
"""Where in a run bad batches come, as shares of it."""
BURST_STEPS, BURST_FACTOR = 3, 2.0**20
SMALL = (
    "model.layers=2", "model.width=64", "model.heads=2", "data.length=32", "batch_size=8",
    "health.every=0",
)  # fmt: skip


@dataclass
class Peak:
    """The largest scaled gradient of a step, of weights and of the outputs of linear layers."""

    model: nn.Module
    value: float = 0.0
    handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                self.handles.append(module.register_full_backward_hook(self._seen))

    def _seen(self, module: nn.Module, grads_in: Any, grads_out: Any) -> None:
        for grad in (*grads_in, *grads_out):
            if grad is not None:
                self.value = max(self.value, float(grad.abs().max()))

    def take(self) -> float:
        """Return the peak of the step, weights included, and begin a new one."""
        peaks = [float(p.grad.abs().max()) for p in self.model.parameters() if p.grad is not None]
        result, self.value = max([self.value, *peaks]), 0.0
        return result


Controller = Callable[[float, float, bool], float]
"""From the scale, the peak and whether the step was finite to the next scale."""


def fixed(interval: int) -> Controller:
    """Return the controller of `LossScale`."""
    calm = 0

    def move(scale: float, peak: float, finite: bool) -> float:
        nonlocal calm
        calm = calm + 1 if finite else 0
        if not finite:
            return max(scale / 2, 1.0)
        if calm >= interval:
            calm = 0
            return min(scale * 2, 2.0**18)
        return scale

    return move


def head_room(powers: int, interval: int) -> Controller:
    """Return a controller that also doubles the scale after a few steps with room above it."""
    whole, roomy = fixed(2000), 0

    def move(scale: float, peak: float, finite: bool) -> float:
        nonlocal roomy
        room = finite and peak * 2.0**powers < LARGEST
        roomy = roomy + 1 if room else 0
        if roomy >= interval:
            roomy = 0
            return min(scale * 2, 2.0**18)
        return whole(scale, peak, finite)

    return move


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "fixed, 2000 steps": lambda: fixed(2000),
    "fixed, 200 steps": lambda: fixed(200),
    "fixed, 20 steps": lambda: fixed(20),
    "head-room of 2 powers, 20 steps": lambda: head_room(2, 20),
    "head-room of 4 powers, 5 steps": lambda: head_room(4, 5),
}


def train(
    *, seed: int, steps: int, scale: float, controller: Controller | None, burst: bool
) -> dict[str, Any]:
    """Train once; without a controller the scale is static."""
    recipe = nc.load_recipe("quickstart", [*SMALL, f"seed={seed}", f"steps={steps}"]).recipe
    device = torch.device("cpu")
    task = build_task(recipe, device=device)
    optimizer = build_optimizer(
        recipe.optimizer, task.model, device=device, groups=get_groups(task)
    )
    run = nc.prepare(
        task.model,
        optimizer,
        policy="fp16",
        clip_norm=1.0,
        emulate=True,
        loss_scale=nc.LossScale(init_scale=scale, dynamic=False, max_scale=2.0**60),
        max_skipped_steps=steps,
    )
    running = run.engine.scales.value
    assert running is not None
    peak = Peak(task.model)
    bad = (
        {round(share * steps) + i for share in BURSTS for i in range(BURST_STEPS)} if burst else ()
    )
    scales, skipped, zeros, losses = [], 0, [], []
    order = batch_order(len(task.train_data), recipe)
    with make_batches(task, recipe, order, start=0, device=device) as batches:
        for step, batch in zip(range(steps), batches, strict=False):
            with run.autocast():
                loss = task.loss(task.model, batch)
            losses.append(float(loss.detach()))
            run.backward(loss * BURST_FACTOR if step in bad else loss)
            top = peak.take()
            weights = [
                p.grad for p in task.model.parameters() if p.grad is not None and p.dim() > 1
            ]
            zeros.append(
                sum(int((g == 0).sum()) for g in weights) / sum(g.numel() for g in weights)
            )
            outcome = run.step()
            scales.append(float(running))
            skipped += not outcome.applied
            if controller is not None:
                running.fill_(controller(scales[-1], top, outcome.applied))
    return {
        "skipped": skipped,
        "skipped_outside_bursts": skipped - sum(step in bad for step in range(steps)),
        "scales": scales,
        "zero_gradients": sum(zeros) / len(zeros),
        "loss": sum(losses[-20:]) / 20,
        "evaluated": task.evaluate(task.model)["loss"],
    }


def study(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row per case and controller, with means over seeds."""
    rows = []
    for case, scale, burst in (
        ("start at 65536", 2.0**16, False),
        ("start at 1", 1.0, False),
        ("burst", 2.0**16, True),
    ):
        for name, make in CONTROLLERS.items():
            runs = [
                train(seed=seed, steps=steps, scale=scale, controller=make(), burst=burst)
                for seed in range(seeds)
            ]
            rows.append(_row(case, name, runs))
    for power in (0, 8, 16):
        runs = [
            train(seed=seed, steps=steps, scale=2.0**power, controller=None, burst=False)
            for seed in range(seeds)
        ]
        rows.append(_row("static", f"2^{power}", runs))
    return rows


def _row(case: str, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    count = len(runs)
    row = {
        "case": case,
        "controller": name,
        "skipped": sum(run["skipped"] for run in runs) / count,
        "skipped_outside_bursts": sum(run["skipped_outside_bursts"] for run in runs) / count,
        "steps_below_2^14": sum(sum(s < 2.0**14 for s in run["scales"]) for run in runs) / count,
        "last_scale": [math.log2(run["scales"][-1]) for run in runs],
        "zero_gradients": sum(run["zero_gradients"] for run in runs) / count,
        "loss": [run["loss"] for run in runs],
        "evaluated": [run["evaluated"] for run in runs],
    }
    print(
        f"{case:15} {name:32} skipped {row['skipped']:5.1f} low {row['steps_below_2^14']:6.1f} "
        f"zeros {row['zero_gradients']:.4f} loss {sum(row['evaluated']) / count:.4f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rows = study(options.steps, options.seeds)
    result = {
        "environment": describe_machine(),
        "steps": options.steps,
        "seeds": options.seeds,
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
