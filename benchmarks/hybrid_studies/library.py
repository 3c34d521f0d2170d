"""Methods that train through narrowcast's own interface: `nc.hybrid` by preset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

import narrowcast as nc
from hybrid_studies.data import Pair
from hybrid_studies.methods import (
    Jumps,
    Plain,
    Primal,
    ScheduleFree,
    SlowWeights,
    optimizer_for,
)
from narrowcast.runs import StrategyRecord


class Library(Plain):
    """`nc.hybrid` with a preset, as its docs have it: the read-out is the library's own choice.

    It trains a model of its own, because it keeps weights as it sees fit and would not have them
    be views of a vector; the flat model only judges. `more` goes to `nc.hybrid`.

    It chooses by batches of the selection part, as large as those it trains on, and every example
    that was passed is counted, once for each read-out: `chosen_for`, in steps.
    """

    can_be_followed: ClassVar[bool] = False  # its averages are its own

    def start(self, preset: str, **more: Any) -> None:
        task, way, plan = self.flat.task, self.way, self.plan
        self.chosen, self.chosen_for = "", 0.0
        self.offered = self.accepted = 0
        model = self.flat.fresh().train()
        optimizer = optimizer_for(task, model.parameters(), lr=self.lr)
        for group in optimizer.param_groups:
            if "momentum" in group and preset != "conservative":
                group["momentum"] = 0.0  # as the library asks for; the learning rate is tuned

        def schedule(inner: torch.optim.Optimizer, length: int) -> Any:
            assert length == round(way.stretch * plan)
            return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: way.factor(step, plan))

        self.run = nc.hybrid(
            model, optimizer, steps=plan, preset=preset, scheduler=schedule, lr_horizon=way.stretch,
            policy=task.compute, clip_norm=task.clip, **more,
        )  # fmt: skip

    def step(self, batch: Pair) -> None:
        """Take one step, as a user of the library writes it."""
        task, run = self.flat.task, self.run
        outcome = run.step(lambda: task.loss(run.model(batch[0]), batch[1]))
        self.taken += 1
        # A step without a backward pass has two forward passes.
        self.spent += 2 / 3 if outcome.forward_only else 1
        jumps = [r for r in run.records if isinstance(r, StrategyRecord) and r.event == "jump"]
        self.offered, self.accepted = len(jumps), int(sum(r.values["accepted"] for r in jumps))

    def answers(self) -> dict[str, Tensor]:
        """Return the read-out that the library chooses on the selection part.

        A mark before the end is a run that was stopped there, and leaves the rest of this one's
        budget for choosing untouched.
        """
        task, readouts = self.flat.task, self.run.readouts
        passed = 0

        def measure(batch: Pair) -> Tensor:
            nonlocal passed
            passed += len(batch[0])
            with self.run.autocast():
                return task.loss(self.run.model(batch[0]), batch[1])

        before = readouts.budget
        self.chosen = self.run.select_weights(measure, batches=task.selection_batches()).name
        readouts.budget = before
        self.chosen_for = passed / task.batch / 3
        found = self.run.eval_state_dict()
        # By parameters: a state has a shared weight twice, and buffers besides.
        names = [name for name, _ in self.run.model.named_parameters()]
        return {"now": torch.cat([found[name].flatten() for name in names])}


KINDS: dict[str, Callable[..., Plain]] = {
    "plain": Plain,
    "primal": Primal,
    "lookahead": SlowWeights,
    "schedule-free": ScheduleFree,
    "jumps": Jumps,
    "library": Library,
}
