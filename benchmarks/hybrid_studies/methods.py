"""Methods: how weights move from step to step, and which weights answer.

A method is a `Way` (a value: a name, a schedule, a kind and its constants) and the class of its
kind, which has three functions: `step(gradient, lr)`, `answers()` (the weights that may be read
out, by name; the first is the method's own), and `spent` (step-equivalents so far). Weights are
one flat vector, so that a method is a few lines of vector arithmetic around torch's own optimizer.

Methods that go through narrowcast's own interface are in `hybrid_studies.library`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hybrid_studies.data import Pair
from hybrid_studies.tasks import Task

WARM = 0.02
"""The share of the planned steps over which every schedule rises from zero."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method with its constants."""

    name: str
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    stretch: float = 1.0
    """Times N that the schedule is drawn over; the run stops at N all the same."""
    floor: float = 0.0
    """Of a cosine: the share of the peak that it ends at."""
    kind: str = "plain"
    constants: dict[str, Any] = field(default_factory=dict)

    def factor(self, step: int, plan: int) -> float:
        """Return the share of the peak learning rate at a step."""
        length = self.stretch * plan
        rise = min(1.0, (step + 1) / (WARM * plan))
        done = min(1.0, step / length)
        match self.schedule:
            case "cosine":
                falling = 0.5 * (1 + math.cos(math.pi * done))
                return rise * (self.floor + (1 - self.floor) * falling)
            case "linear":
                return rise * (1 - done)
            case "wsd":
                return rise * min(1.0, (1 - done) / 0.2)
            case "constant":
                return rise


class Flat:
    """A model whose parameters, and their gradients, are views of one vector each."""

    def __init__(self, task: Task, *, seed: int) -> None:
        self.task, self.seed = task, seed
        self.model = self.fresh()
        parameters = list(self.model.parameters())
        self.weights = nn.Parameter(torch.cat([each.detach().flatten() for each in parameters]))
        self.weights.grad = torch.zeros_like(self.weights)
        first = 0
        for each in parameters:
            until = first + each.numel()
            each.data = self.weights.data[first:until].view_as(each)
            each.grad = self.weights.grad[first:until].view_as(each)
            first = until

    def fresh(self) -> nn.Module:
        """Return the task's model as this seed begins with it; torch draws on from there."""
        torch.manual_seed(self.seed)
        return self.task.make().to(self.task.device)

    def gradient(self, batch: Pair) -> None:
        """Fill the gradient of the weights that the model holds now."""
        gradient = self.weights.grad
        assert gradient is not None
        gradient.zero_()
        with self.task.computing():
            loss = self.task.loss(self.model(batch[0]), batch[1])
        loss.backward()
        if self.task.clip is not None:  # as torch's clip_grad_norm_ does it
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((self.task.clip / (norm + 1e-6)).clamp(max=1.0))

    def put(self, vector: Tensor) -> None:
        """Make the model hold these weights."""
        self.weights.data.copy_(vector)

    def loss(self, part: Pair, vector: Tensor) -> float:
        """Return the loss with other weights; the model's own are back afterwards."""
        kept = self.weights.data.clone()
        self.put(vector)
        with self.task.computing():
            found = self.task.evaluate(self.model, part)
        self.put(kept)
        return found

    def optimizer(self, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer that a user of this task would take."""
        return optimizer_for(self.task, [self.weights], lr=lr)


def optimizer_for(
    task: Task, weights: Iterable[nn.Parameter], *, lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer that a user of a task would take."""
    decay = task.weight_decay
    if task.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=lr, momentum=0.9, weight_decay=decay)
    betas = (0.9, 0.99) if decay else (0.9, 0.999)
    fused = True if task.device == "cuda" else None
    return torch.optim.AdamW(weights, lr=lr, betas=betas, weight_decay=decay, fused=fused)


class Plain:
    """The optimizer alone."""

    can_be_followed: ClassVar[bool] = True
    """Whether its answer is at hand after every step, for averages of it."""

    def __init__(self, flat: Flat, way: Way, *, lr: float, plan: int) -> None:
        self.flat, self.way, self.plan, self.lr = flat, way, plan, lr
        self.taken, self.spent = 0, 0.0
        self.start(**way.constants)

    def start(self) -> None:
        self.inner = self.flat.optimizer(self.lr)

    def step(self, batch: Pair) -> None:
        """Take one step, at the learning rate of the schedule."""
        rate = self.lr * self.way.factor(self.taken, self.plan)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.flat.gradient(batch)
        self.move(rate)
        self.taken += 1
        self.spent += 1

    def move(self, rate: float) -> None:
        self.inner.step()

    def answers(self) -> dict[str, Tensor]:
        """Return the weights that may be read out; do not change them."""
        return {"now": self.flat.weights.data}


class Primal(Plain):
    """Primal averaging: the optimizer moves z, gradients are taken at y, the answer is x.

    x is an average of z with weight `share` for the newest, y lies `pull` of the way from z to x.
    That is a momentum already: unless `momentum` says so, the optimizer's own is switched off.
    """

    def start(
        self, share: float = 0.05, pull: float = 0.9, *, momentum: float = 0.0,
        warm: bool = False, decay: Literal["z", "y"] = "z",
    ) -> None:  # fmt: skip
        self.share, self.pull, self.warm, self.decay = share, pull, warm, decay
        self.inner = self.flat.optimizer(self.lr)
        for group in self.inner.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum
            if decay == "y":
                group["weight_decay"] = 0.0
        self.z, self.x = self.flat.weights.data.clone(), self.flat.weights.data.clone()
        self.y = self.flat.weights.data

    def move(self, rate: float) -> None:
        if self.decay == "y":
            self.z.add_(self.y, alpha=-rate * self.flat.task.weight_decay)
        self.flat.put(self.z)
        self.inner.step()
        self.z.copy_(self.flat.weights.data)
        share = max(self.share, 1 / (self.taken + 1)) if self.warm else self.share
        self.x.lerp_(self.z, share)
        torch.lerp(self.z, self.x, self.pull, out=self.y)

    def answers(self) -> dict[str, Tensor]:
        return {"now": self.x, "y": self.y}


class SlowWeights(Plain):
    """Lookahead (Zhang et al. 2019): every k steps, fast weights return part of the way."""

    def start(self, every: int = 5, share: float = 0.5) -> None:
        self.every, self.share = every, share
        self.inner = self.flat.optimizer(self.lr)
        self.slow = self.flat.weights.data.clone()

    def move(self, rate: float) -> None:
        self.inner.step()
        if (self.taken + 1) % self.every == 0:
            self.slow.lerp_(self.flat.weights.data, self.share)
            self.flat.put(self.slow)

    def answers(self) -> dict[str, Tensor]:
        return {"now": self.slow if self.taken >= self.every else self.flat.weights.data}


class ScheduleFree(Plain):
    """Schedule-free AdamW or SGD (Defazio et al. 2024), from its authors' package."""

    can_be_followed: ClassVar[bool] = False  # its answer needs a pass over the weights

    def start(self) -> None:
        import schedulefree

        task = self.flat.task
        more = {"weight_decay": task.weight_decay}  # it rises as every schedule here does
        kind = schedulefree.SGDScheduleFree if task.optimizer == "sgd" else (
            schedulefree.AdamWScheduleFree
        )  # fmt: skip
        self.inner = kind([self.flat.weights], lr=self.lr, foreach=False, **more)
        self.inner.train()

    def answers(self) -> dict[str, Tensor]:
        self.inner.eval()
        found = self.flat.weights.data.clone()
        self.inner.train()
        return {"now": found}


class Jumps(Plain):
    """Line-fit jumps: accepted where a held-out batch gets better, else taken back exactly.

    Every eighth of the plan a line is fitted to the last five states, a fortieth of the plan apart,
    and followed for 1, 1/2 or 1/4 of a fortieth. Each look at the held-out batch is a third of a
    step.
    """

    def start(self) -> None:
        self.inner = self.flat.optimizer(self.lr)
        self.states: list[Tensor] = []
        self.offered = self.accepted = 0
        self.held = iter(range(10**9))

    def move(self, rate: float) -> None:
        self.inner.step()
        every = max(1, self.plan // 40)
        if (self.taken + 1) % every == 0:
            self.states = [*self.states[-4:], self.flat.weights.data.clone()]
            if len(self.states) == 5 and (self.taken + 1) % (5 * every) == 0:
                self.offer()

    def offer(self) -> None:
        times = torch.arange(5.0) - 2
        slope = torch.einsum("t,tn->n", times, torch.stack(self.states)) / 10
        inputs, targets = self.flat.task.selection
        size = min(self.flat.task.batch, len(inputs))
        first = next(self.held) * size % (len(inputs) - size + 1)
        part = inputs[first : first + size], targets[first : first + size]
        here = self.flat.weights.data.clone()
        best, at = self.flat.loss(part, here), here
        for share in (1.0, 0.5, 0.25):
            found = self.flat.loss(part, here + share * slope)
            if found < best:
                best, at = found, here + share * slope
        self.spent += 4 / 3
        self.offered += 1
        if at is not here:
            self.accepted += 1
            self.flat.put(at)
            self.states = []
