"""Loops in whatever order: a prepared model beside a plain one, through any sequence of events.

Under the fp32 policy both stay the same to the last bit (weights, buffers, moments, rates, and
gradients with the loss scale divided out), or narrowcast refuses what was asked, and then nothing
of the prepared model has changed. `RULES` and `REFUSED` count what was tried.

The plain loop is that of somebody careful: a step with a gradient that is not finite is not taken,
and buffers then go back to what they were before that step's passes, but for what was written to
them by hand in between. A number in a buffer that is not finite goes back after a good step, too:
it came from a pass whose loss was dropped.
"""

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError

RULES: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()
MESSAGES: Counter[str] = Counter()
REFUSALS = (ConfigError, UnsupportedError, CheckpointError)

OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2)],
    "adamw fused": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)],
    "two": lambda m: [
        torch.optim.SGD(m.first.parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW([*m.norm.parameters(), *m.last.parameters()], lr=1e-2),
    ],
}
ELSEWHERE = (
    "bf16",
    "fp16",
    "fp8-delayed",
    "bf16, params=bf16, master=split",
    "bf16, params=bf16, master=fp32",
)
"""Policies to change to and back from: all keep every digit of a weight."""


class Net(nn.Module):
    """Two layers, a batch norm whose buffers every pass writes, and a buffer nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) / self.temperature


def batch(seed: int, *, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a small batch, with an infinity in it or not."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator)
    if bad:
        x[2, 3] = torch.inf
    return x, torch.randint(0, 3, (5,), generator=generator)


class Side:
    """A model with its optimizers and schedules."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step))
            for each in self.optimizers
        ]

    def tensors(self, *, scale: float = 1.0, gradients: bool = True) -> dict[str, Tensor]:
        """Return copies of all that a step depends on, by name."""
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            found[f"{name} is trained"] = torch.tensor(p.requires_grad)
            if gradients and p.grad is not None:
                found[f"{name} gradient"] = p.grad / scale
        for i, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            for key, moments in state["state"].items():
                for name, value in moments.items():
                    if value is not None:
                        found[f"optimizer {i}.{key}.{name}"] = torch.as_tensor(value).clone()
            rates = [float(group["lr"]) for group in state["param_groups"]]
            found[f"rates {i}"] = torch.tensor(rates, dtype=torch.float64)
        return found

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


class CarefulLoop(Side):
    """Plain torch: skips a bad step, and then gives back what its passes wrote to buffers."""

    def __init__(self, optimizer: str, seed: int, *, clip_norm: float | None) -> None:
        super().__init__(optimizer, seed)
        self._clip_norm = clip_norm
        self._before: dict[str, Tensor] = {}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self._before:
            self._before = self._buffers()
        return self.loss(x, y)

    def wrote_buffers(self, *names: str) -> None:
        """Keep what was written by hand in a step that is under way, whatever becomes of it."""
        now = self._buffers()
        if self._before:
            self._before |= {name: now[name] for name in names or now}

    def forget_passes(self) -> None:
        self._before = {}

    def step(self) -> None:
        present = [p for p in self.model.parameters() if p.grad is not None]
        finite = all(bool(p.grad.isfinite().all()) for p in present)
        if finite:
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(present, self._clip_norm)
            for each in (*self.optimizers, *self.schedulers):
                each.step()
        with torch.no_grad():
            for name, value in self._before.items():
                buffer = self.model.get_buffer(name)
                buffer.copy_(torch.where(buffer.isfinite() & finite, buffer, value))
        self.zero_grad()
        self.forget_passes()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def _buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_buffers()}


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return the names of all that differs in a bit; NaN is NaN."""
    return sorted(found.keys() ^ wanted.keys()) + [
        name for name in found if name in wanted and not _same(found[name], wanted[name])
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.equal(a.nan_to_num(0.123), b.nan_to_num(0.123))


SEEDS = st.integers(0, 9)


class LoopMachine(RuleBasedStateMachine):
    """Events of a loop, in any order, on a prepared model and on a plain one."""

    policies: tuple[str, ...] = ("fp32",)

    @initialize(
        data=st.data(),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        loss_scale=st.sampled_from([None, nc.LossScale(init_scale=1024.0)]),
        clip_norm=st.sampled_from([None, 0.3]),
        seed=SEEDS,
    )
    def begin(
        self,
        data: st.DataObject,
        optimizer: str,
        loss_scale: nc.LossScale | None,
        clip_norm: float | None,
        seed: int,
    ) -> None:
        self.policy = data.draw(st.sampled_from(self.policies), label="policy")
        self.mine = Side(optimizer, seed)
        self.plain = CarefulLoop(optimizer, seed, clip_norm=clip_norm)
        self.settings = {"policy": self.policy, "loss_scale": loss_scale, "clip_norm": clip_norm}
        self.saved: list[tuple[Any, Any]] = []
        self.spoiled = False  # gradients that hold no scale, or half of one: to be refused
        self.unscaled = False
        self._prepare()

    # One side that refuses, and then must not have changed.

    def attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Say whether narrowcast did as it was asked; where it did not, nothing has changed."""
        RULES[name] += 1
        before = self.mine.tensors()
        try:
            action()
        except REFUSALS as error:
            REFUSED[name] += 1
            MESSAGES[f"{name}: {str(error)[:90]}"] += 1
            assert differences(self.mine.tensors(), before) == [], f"{name} was refused"
            return False
        return True

    @property
    def exact(self) -> bool:
        return self.policy == "fp32"

    @property
    def scaled(self) -> bool:
        return self.run.loss_scale is not None

    @property
    def scale(self) -> float:
        value = self.run.engine.scales.value
        return 1.0 if value is None or self.unscaled else float(value)

    def _prepare(self) -> None:
        optimizers, schedulers = self.mine.optimizers, self.mine.schedulers
        one = len(optimizers) == 1
        self.run = nc.prepare(
            self.mine.model,
            optimizers[0] if one else optimizers,
            scheduler=schedulers[0] if one else schedulers,
            max_skipped_steps=10_000,
            **self.settings,
        )
        self.spoiled = self.unscaled = False

    # Passes and steps.

    @rule(seed=SEEDS, bad=st.sampled_from([False, False, False, True]), inside=st.booleans())
    def backward(self, seed: int, bad: bool, inside: bool = True) -> None:
        x, y = batch(seed, bad=bad)
        # A model called outside `autocast()` is in its policy, and its loss is yours.
        with self.run.autocast() if inside else nullcontext():
            loss = self.mine.loss(x, y)
        plain = self.plain.forward(x, y)
        assert not self.exact or _same(loss.detach(), plain.detach())
        if self.attempt("backward", lambda: self.run.backward(loss)):
            assert not self.spoiled
            plain.backward()

    @rule(seed=SEEDS)
    def raw_backward(self, seed: int) -> None:
        x, y = batch(seed)
        with self.run.autocast():
            loss = self.mine.loss(x, y)
        plain = self.plain.forward(x, y)
        RULES["raw backward"] += 1
        loss.backward()
        if self.scaled and not self.unscaled:
            self.spoiled = True
        else:
            plain.backward()

    @rule()
    def step(self) -> None:
        if self.attempt("step", self.run.step):
            assert not self.spoiled
            self.plain.step()
            self.unscaled = False

    @rule(seed=SEEDS, bad=st.sampled_from([False, False, True]))
    def whole_step(self, seed: int, bad: bool) -> None:
        x, y = batch(seed, bad=bad)
        with self.run.autocast():
            loss = self.mine.loss(x, y)
        plain = self.plain.forward(x, y)
        if self.attempt("step(loss)", lambda: self.run.step(loss)):
            assert not self.spoiled
            plain.backward()
            self.plain.step()
            self.unscaled = False

    @rule(
        seeds=st.lists(SEEDS, min_size=1, max_size=3),
        bad=st.sampled_from([False, False, False, True]),
        unscale=st.booleans(),
        clip=st.sampled_from([None, 0.01, 0.1]),
    )
    def step_by_the_book(
        self, seeds: list[int], bad: bool, unscale: bool, clip: float | None
    ) -> None:
        """A step as it should be written, after whatever came before."""
        self.zero_grad("run")
        for i, seed in enumerate(seeds):
            self.backward(seed, bad=bad and i == 0)
        if unscale or clip is not None:
            self.unscale()
        if clip is not None:
            self.clip(clip)
        before = self.run.steps_attempted
        self.step()
        assert self.run.steps_attempted == before + 1

    @rule(who=st.sampled_from(["run", "optimizer", "model"]))
    def zero_grad(self, who: str) -> None:
        RULES[f"zero_grad of {who}"] += 1
        if who == "optimizer":
            for optimizer in self.mine.optimizers:
                optimizer.zero_grad()
        else:
            (self.run if who == "run" else self.mine.model).zero_grad()
        self.plain.zero_grad()
        self.spoiled = self.unscaled = False

    # Gradients that the user looks at or changes.

    @rule()
    def unscale(self) -> None:
        if self.attempt_unscale():
            assert not self.spoiled

    def attempt_unscale(self) -> bool:
        """`unscale` is to change gradients, so only a refusal leaves them alone."""
        done = self.attempt("unscale", self.run.unscale)
        self.unscaled = self.unscaled or (done and self.scaled)
        return done

    @precondition(lambda self: any(p.grad is not None for p in self.mine.model.parameters()))
    @rule(value=st.sampled_from([0.01, 0.1]))
    def clip(self, value: float) -> None:
        RULES["clip by value"] += 1
        nn.utils.clip_grad_value_(self.mine.model.parameters(), value)
        if self.scaled and not self.unscaled:
            self.spoiled = True
        else:
            nn.utils.clip_grad_value_(self.plain.model.parameters(), value)

    # What users do to models between passes.

    @rule(train=st.booleans())
    def switch_mode(self, train: bool) -> None:
        RULES["train or eval"] += 1
        for side in (self.mine, self.plain):
            side.model.train(train)

    @rule(seed=SEEDS, inside=st.booleans())
    def evaluate(self, seed: int, inside: bool) -> None:
        RULES["evaluate"] += 1
        x, _ = batch(seed)
        mode = self.mine.model.training
        answers = []
        for side in (self.mine, self.plain):
            side.model.eval()
            with torch.no_grad():
                if inside and side is self.mine:
                    with self.run.autocast():
                        answers.append(side.model(x))
                else:
                    answers.append(side.model(x))
            side.model.train(mode)
        assert not self.exact or _same(*answers)

    @rule(part=st.sampled_from(["first", "last", "norm"]), trained=st.booleans())
    def freeze(self, part: str, trained: bool) -> None:
        RULES["unfreeze" if trained else "freeze"] += 1
        for side in (self.mine, self.plain):
            side.model.get_submodule(part).requires_grad_(trained)
        if not any(p.requires_grad for p in self.mine.model.parameters()):
            self.freeze(part, True)  # nothing could be trained any more

    @rule(how=st.sampled_from(["counted", "data", "copied"]))
    def edit_weights(self, how: str) -> None:
        RULES["edit weights"] += 1
        for side in (self.mine, self.plain):
            weight = side.model.last.weight
            with torch.no_grad():
                if how == "counted":
                    weight.clamp_(-0.2, 0.2)
                elif how == "data":
                    weight.data.mul_(0.75)
                else:
                    weight.copy_(weight.flip(0))

    @rule(name=st.sampled_from(["norm.running_mean", "temperature"]))
    def edit_buffer(self, name: str) -> None:
        RULES["edit buffer"] += 1
        for side in (self.mine, self.plain):
            with torch.no_grad():
                side.model.get_buffer(name).fill_(0.5)
        self.plain.wrote_buffers(name)

    @rule(seed=SEEDS)
    def load_model(self, seed: int) -> None:
        torch.manual_seed(100 + seed)
        state = Net().state_dict()

        def load() -> None:
            self.mine.model.load_state_dict(state)

        if self.attempt("load_state_dict of the model", load):
            self.plain.model.load_state_dict(state)
            self.plain.wrote_buffers()

    # Runs that are saved, copied, changed and given back.

    @rule()
    def save(self) -> None:
        RULES["state_dict"] += 1
        file = io.BytesIO()
        torch.save(self.run.state_dict(), file)
        side = self.plain
        theirs = [side.model, *side.optimizers, *side.schedulers]
        kept = [copy.deepcopy(each.state_dict()) for each in theirs]
        self.saved.append((file.getvalue(), kept))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        mine, theirs = data.draw(st.sampled_from(self.saved), label="which")
        state = torch.load(io.BytesIO(mine), weights_only=False)
        if self.attempt("load_state_dict of the run", lambda: self.run.load_state_dict(state)):
            side = self.plain
            held = [side.model, *side.optimizers, *side.schedulers]
            for each, kept in zip(held, theirs, strict=True):
                each.load_state_dict(copy.deepcopy(kept))
            side.forget_passes()

    @rule()
    def copy_model(self) -> None:
        RULES["deepcopy"] += 1
        made = copy.deepcopy(self.mine.model)
        assert type(made) is Net
        wanted = self.plain.model.state_dict() if self.exact else self.run.fp32_state_dict()
        assert differences(dict(made.state_dict()), dict(wanted)) == []

    @rule(policy=st.sampled_from(ELSEWHERE))
    def change_and_back(self, policy: str) -> None:
        if self.attempt("change", lambda: self.run.set_policy(policy)):
            self.run.set_policy(self.policy)

    @rule(steps=st.integers(0, 1), seed=SEEDS)
    def release_and_prepare(self, steps: int, seed: int) -> None:
        full = {name: value.clone() for name, value in self.run.fp32_state_dict().items()}
        if not self.attempt("release", self.run.release):
            return
        assert differences(dict(self.mine.model.state_dict()), full) == []
        for side in (self.mine, self.plain):
            side.model.zero_grad()
        self.plain.forget_passes()
        self.both_are_the_same()
        for _ in range(steps):
            for side in (self.mine, self.plain):
                side.loss(*batch(seed)).backward()
                for each in (*side.optimizers, *side.schedulers):
                    each.step()
                side.model.zero_grad()
        self._prepare()

    @invariant()
    def both_are_the_same(self) -> None:
        if not hasattr(self, "run"):
            return
        if not self.exact:
            kept = self.mine.tensors(gradients=False)
            bad = [name for name in kept if "optimizer" in name and not kept[name].isfinite().all()]
            assert bad == []
            assert all(p.isfinite().all() for p in self.mine.model.parameters())
            return
        mine = self.mine.tensors(scale=self.scale, gradients=not self.spoiled)
        plain = self.plain.tensors(gradients=not self.spoiled)
        assert differences(mine, plain) == []


class NarrowMachine(LoopMachine):
    """The same events under narrow policies: what is not refused works, and all stays finite.

    The plain loop goes along and is compared with nothing.
    """

    policies = (
        "bf16",
        "fp16",
        "fp8-delayed",
        "bf16, params=bf16, master=split",
        "bf16, params=bf16, master=fp32",
        "bf16-pure",
        "fp16, params=fp16, master=kahan, grads=fp32",
    )


def counts() -> Iterator[tuple[str, int, int]]:
    """Return every event, how often it was tried and how often refused."""
    for name in sorted(RULES):
        yield name, RULES[name], REFUSED[name]
