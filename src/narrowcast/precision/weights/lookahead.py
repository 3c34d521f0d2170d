"""The lookahead point: gradients are taken ahead of an average of the weights, on the way to them.

There are three points. The optimizer moves z; x, the answer, is an average of z; and y, which the
model has while it trains, lies between them. With an interpolation of b and a rate of c, a step is

    z' = what the optimizer makes of z, with the gradient taken at y
    x' = x + c (z' - x)
    y' = b x' + (1 - b) z'

Kept are y, which the weights and their masters are, and one lead e = z - y for each weight. As
e = b (z - x), the others follow from these two: z = y + e, and x = y - e (1 - b) / b. After the
optimizer, with r = z' - x, the new lead is e' = b (1 - c) r, and y' = z' - e'. The same is in the
fused optimizer, in one pass with the rest (`kernels.adamw`).

It is primal averaging (with a rate of 1/t, and z moved by plain SGD, schedule-free learning).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.adamw.twin import Ahead
from narrowcast.precision.dtensor import local_part, placed_like
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.weights.multi_optimizer import member_optimizers

Storage = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Lookahead:
    """Settings of the lookahead point: gradients are computed ahead of an average of the weights.

    Evaluate with the average: `Prepared.use_eval_weights`. A rate of 1 is plain training. With a
    smaller interpolation, gradients are computed closer to the optimizer's point. At 0 the averaged
    weights would not affect training; use `ema_decay` for that.
    """

    interpolation: float = 0.9
    """Where gradients are computed between the optimizer's point (0) and the average (1): above
    0, up to 1."""
    rate: float = 0.05
    """Fraction of the distance to the optimizer's point that the average moves per step."""
    storage: Storage = "fp32"
    """Format of the stored difference between the points. `bf16` takes 2 bytes per weight
    instead of 4 and adds a relative error of at most 2**-9 to the average. The optimizer's
    point has full precision."""
    momentum: float | None = 0.0
    """Replaces the first of the optimizer's `betas`. Following an average already acts as
    momentum, and a second one makes training oscillate. None keeps the optimizer's value."""
    begins_after: int = 0
    """Steps of plain training before the lookahead begins."""

    def __post_init__(self) -> None:
        """Raise if a setting is out of range."""
        if not 0 < self.interpolation <= 1:
            raise ConfigError(
                "Lookahead(interpolation) must be above 0 and up to 1, got "
                f"{self.interpolation:g}. Write 0.9, or use ema_decay=0.95 in place of lookahead "
                "for an average that does not affect training."
            )
        if not 0 < self.rate <= 1:
            raise ConfigError(
                f"Lookahead(rate) must be above 0 and up to 1, got {self.rate:g}. A common value "
                "is 0.05."
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(
                "Lookahead(momentum) must be at least 0 and below 1, or None to keep the "
                f"optimizer's momentum, got {self.momentum:g}."
            )
        if self.begins_after < 0:
            raise ConfigError(
                "Lookahead(begins_after) must be a number of steps, 0 or more, got "
                f"{self.begins_after}."
            )
        if self.storage not in get_args(Storage):
            raise ConfigError(f"Lookahead(storage) must be fp32 or bf16, got {self.storage!r}.")

    @property
    def ahead(self) -> Ahead:
        """How weights and leads follow the optimizer: the factors of a step."""
        return Ahead(
            back=(1 - self.interpolation) / self.interpolation,
            left=self.interpolation * (1 - self.rate),
        )


@final
class LookaheadPoint:
    """The leads, in the order of the weights; they begin at zero.

    Tensors stay the same: captured steps know their addresses. A weight without gradients has none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Lookahead) -> None:
        self.settings = settings
        self.has_begun = settings.begins_after == 0
        """Whether leads are kept by now; before that they are zero, and training is plain."""
        self._had: dict[int, float] = {}
        """The momentum that each group of the optimizer had."""
        self._parameters = list(parameters)
        self._places = {p: i for i, p in enumerate(parameters)}
        self._leads: list[Tensor | None] = [
            self._zeros(p) if p.requires_grad else None for p in parameters
        ]

    def before_step(self, steps: int, optimizer: torch.optim.Optimizer) -> None:
        """Begin when it is time to; read the momentum, which a schedule may have changed."""
        self.has_begun = steps >= self.settings.begins_after
        if self.has_begun and self.settings.momentum is not None:
            for group in optimizer.param_groups:
                if had := set_momentum(group, self.settings.momentum):
                    self._had.setdefault(id(group), had)

    def give_back_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the momentum of the optimizer."""
        for group in optimizer.param_groups:
            if id(group) in self._had:
                set_momentum(group, self._had[id(group)])

    @property
    def ahead(self) -> Ahead:
        """How weights and leads follow the optimizer now."""
        settled = self.settings.ahead
        return settled if self.has_begun else replace(settled, left=0.0)

    def lead(self, i: int) -> Tensor:
        """Return the lead of weight `i`, which begins here if it has had none."""
        lead = self._leads[i]
        if lead is None:
            lead = self._leads[i] = self._zeros(self._parameters[i])
        return lead

    def of(self, weight: nn.Parameter) -> Tensor | None:
        """Return the lead of a weight; None of one that has none."""
        index = self._places.get(weight)
        return None if index is None else self._leads[index]

    def answer(self, weight: nn.Parameter, full: Tensor) -> Tensor:
        """Return where the answer is, given a weight with every digit that is kept of it."""
        lead = self.of(weight)
        if lead is None:
            return full
        local = local_part(full)
        result = local - self.settings.ahead.back * local_part(lead).to(local.dtype)
        return placed_like(result, weight.detach())

    def bytes(self) -> int:
        """Return the size of the leads."""
        return sum(lead.numel() * lead.element_size() for lead in self._leads if lead is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the leads, and the settings without which they mean nothing."""
        settings = self.settings
        return {
            "interpolation": settings.interpolation,
            "rate": settings.rate,
            "storage": settings.storage,
            "momentum": settings.momentum,
            "leads": list(self._leads),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the leads of a run with the same settings; none is one of zero."""
        for i, saved in enumerate(state["leads"]):
            if saved is not None:
                self.lead(i).copy_(saved)
            elif (mine := self._leads[i]) is not None:
                mine.zero_()

    def _zeros(self, weight: nn.Parameter) -> Tensor:
        # In memory as the weight lies, so that one pass can go over both.
        return torch.zeros_like(weight.detach(), dtype=_DTYPES[self.settings.storage])


def set_momentum(group: dict[str, Any], momentum: float) -> float:
    """Give a group of an optimizer another first beta; return the one it had, or 0."""
    if "betas" not in group:
        return 0.0
    first, *others = group["betas"]
    if first != momentum:
        group["betas"] = (momentum, *others)
    return float(first)


def check_lookahead(optimizer: torch.optim.Optimizer, plan: Plan, settings: Lookahead) -> None:
    """Raise if the lookahead point would not be the requested one."""
    narrow = next((m for m in plan.modules if m.policy.params != "fp32"), None)
    master = plan.policy.master or "none"
    if narrow is not None and master not in ("fp32", "split"):
        raise UnsupportedError(
            f"lookahead needs weights stored with all digits, got params={narrow.policy.params} "
            f"with master={master}. Write master=split in the policy (for fp16 weights "
            "master=fp32), or params=fp32."
        )
    for part in member_optimizers(optimizer):
        kind, inside = type(part), _optimizer_in(part)
        if inside is not None:
            raise UnsupportedError(
                f"lookahead does not work with {kind.__name__}, which wraps another optimizer and "
                f"may also change its weights. Pass the {type(inside).__name__} inside it to "
                "prepare(), or leave lookahead out."
            )
        if all(callable(getattr(kind, name, None)) for name in ("train", "eval")):
            raise UnsupportedError(
                f"lookahead does not work with {kind.__name__}, which swaps its own weights in "
                "train() and eval(). Pass a plain optimizer such as torch.optim.AdamW to "
                "prepare(), or leave lookahead out."
            )
    for group in optimizer.param_groups:
        own = group.get("momentum", 0.0)
        if own and settings.momentum is not None:
            # Unlike betas it multiplies the step by 1 / (1 - momentum), and only the user knows
            # what the learning rate was meant with.
            raise UnsupportedError(
                "lookahead already acts as momentum and oscillates with a second one, got "
                f"momentum={own:g}. Write momentum=0 and {1 / (1 - own):g} times the learning "
                "rate, or Lookahead(momentum=None) to use both."
            )


def _optimizer_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    values = vars(optimizer).values()
    return next((v for v in values if isinstance(v, torch.optim.Optimizer)), None)
