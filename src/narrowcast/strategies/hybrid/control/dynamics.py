"""Where the loss is going: an ensemble of small GRUs that learn a run as it goes.

Each member reads the features of a step and says how far the next loss will be from its
average; its forecast feeds itself those. Members differ in their first weights and in how much each
observation counts for them, so that where they agree, it is because the run said so. Everything is
on the CPU, a few milliseconds an observation.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.strategies.hybrid.control.averages import ALPHAS
from narrowcast.strategies.hybrid.control.features import LOSS, LOSS_AVERAGES, NAMES
from narrowcast.strategies.hybrid.control.gru import (
    as_cells,
    gru_cell,
    head,
    initial_weights,
    shapes,
)
from narrowcast.strategies.hybrid.control.plain import usable

BASE = LOSS_AVERAGES[1]
"""What a prediction is told as a change of: the medium average, a fifth as noisy as a batch.

On the fast one, a forecast adds up what its members mistake for a trend, four times as quickly.
"""


@dataclass(frozen=True, kw_only=True)
class DynamicsSettings:
    """How large the ensemble is and how it learns."""

    members: int = 5
    hidden: int = 32
    lr: float = 1e-3
    max_grad_norm: float = 5.0
    """The longest gradient of one member."""
    bptt_steps: int = 4
    """Observations that a step of learning goes back."""
    bptt_decay: float = 0.7
    """How much less each of them counts than the one after it."""
    averaging: float = 0.98
    """How slowly the weights that forecast follow those that learn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.members < 2:
            raise RecipeError(
                f"members={self.members}: one member agrees with itself; write at least 2"
            )
        for name in ("hidden", "bptt_steps", "lr", "max_grad_norm", "bptt_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise RecipeError(f"{name}={value:g} learns nothing; write a positive number")


@dataclass(frozen=True, kw_only=True)
class LossForecast:
    """The losses of the coming steps, and how far to believe them."""

    trajectory: tuple[float, ...]
    """The mean of all members, step by step."""
    spread: tuple[float, ...]
    """The deviation between members, relative to one plus the loss."""
    aleatoric: float
    """What members err by at the next step: the noise of batches, in the same unit."""

    @property
    def final_loss(self) -> float:
        """The loss at the horizon."""
        return self.trajectory[-1]

    @property
    def epistemic(self) -> float:
        """How much members disagree at the horizon."""
        return self.spread[-1]

    @property
    def total(self) -> float:
        """Both kinds of doubt at the horizon."""
        return math.hypot(self.epistemic, self.aleatoric)

    @property
    def bounds(self) -> tuple[float, float]:
        """The final loss, less and more two deviations."""
        centre = _symlog(self.final_loss)
        return _symexp(centre - 2 * self.total), _symexp(centre + 2 * self.total)


@final
class LossDynamics:
    """An ensemble that is told of a run and asked where its loss will be."""

    def __init__(self, settings: DynamicsSettings | None = None) -> None:
        """Begin with members that know nothing: they predict that the loss stays as it is."""
        self.settings = settings or DynamicsSettings()
        members, hidden, width = self.settings.members, self.settings.hidden, len(NAMES)
        self._generator = torch.Generator("cpu").manual_seed(self.settings.seed)
        self._like = shapes(members, width, hidden=hidden)
        flat = initial_weights(members, width, hidden=hidden, generator=self._generator)
        self._weights = flat.requires_grad_()
        self._optimizer = torch.optim.Adam([self._weights], lr=self.settings.lr, foreach=False)
        self._average = self._weights.detach().clone()
        """Weights that forecast: the mean of those that learned, without their last noise."""
        self._start = torch.zeros(members, hidden, dtype=torch.float32, device="cpu")
        """Hidden states before the oldest of the inputs."""
        self._inputs = torch.zeros(0, width, dtype=torch.float32, device="cpu")
        """Features of the last observations, the newest last; its loss is yet to come."""
        self._targets = torch.zeros(0, dtype=torch.float32, device="cpu")
        """What the next loss turned out to be, for all inputs but the newest."""
        self._squared_error = 0.0
        self.observations = 0

    def observe(self, features: Tensor, loss: float) -> None:
        """Learn that `loss` came after the features told last, and take those of now.

        A loss that is not finite teaches nothing.
        """
        if not (usable(loss) and bool(features.isfinite().all())):
            return
        if len(self._inputs):
            base = float(self._inputs[-1, BASE])
            target = _symlog(loss) - _symlog(base)
            told = torch.tensor([target], dtype=torch.float32, device="cpu")
            self._targets = torch.cat([self._targets, told])
            self._learn()
        row = features.detach().to("cpu", torch.float32).reshape(1, -1)
        self._inputs = torch.cat([self._inputs, row])
        if len(self._inputs) > self.settings.bptt_steps:
            with torch.no_grad():
                self._start = self._next(self._start, _squashed(self._inputs[0]))
            self._inputs, self._targets = self._inputs[1:], self._targets[1:]
        self.observations += 1

    def forecast(self, steps: int) -> LossForecast:
        """Return the losses of the next steps; refuse before anything was observed."""
        if steps < 1 or not len(self._inputs):
            raise RecipeError(
                f"a forecast of {steps} steps after {self.observations} observations was asked "
                "for; tell `observe` of one first, and ask for at least one step"
            )
        with torch.no_grad():
            hidden, weights = self._start, as_cells(self._average, self._like)
            for row in self._inputs[:-1]:
                inputs = _squashed(row).expand(self.settings.members, -1)
                hidden = gru_cell(inputs, hidden, weights=weights)
            rows = self._inputs[-1].expand(self.settings.members, -1).clone()
            path = []
            for _ in range(steps):
                hidden = gru_cell(_squashed(rows), hidden, weights=weights)
                change = head(hidden, weights=weights).clamp(-10, 10)
                # Not beyond e to the 80th, which fp32 still has.
                logged = (_symlogs(rows[:, BASE]) + change).clamp(-80, 80)
                loss = logged.sign() * logged.abs().expm1()
                for column, alpha in zip(LOSS_AVERAGES, ALPHAS, strict=True):
                    rows[:, column] += alpha * (loss - rows[:, column])
                rows[:, LOSS] = loss
                path.append(logged)
            logged = torch.stack(path).double()  # (steps, members)
        return LossForecast(
            trajectory=tuple(_symexp(each) for each in logged.mean(1).tolist()),
            spread=tuple(logged.std(1, correction=0).tolist()),
            aleatoric=math.sqrt(self._squared_error),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what decides everything from now on."""
        moments = self._optimizer.state.get(self._weights, {})
        nothing = torch.zeros_like(self._weights)
        return {
            "settings": asdict(self.settings),
            "weights": self._weights.detach().clone(),
            "average": self._average.clone(),
            "exp_avg": moments.get("exp_avg", nothing).clone(),
            "exp_avg_sq": moments.get("exp_avg_sq", nothing).clone(),
            "updates": int(moments.get("step", 0)),
            "generator": self._generator.get_state(),
            "start": self._start.clone(),
            "inputs": self._inputs.clone(),
            "targets": self._targets.clone(),
            "squared_error": self._squared_error,
            "observations": self.observations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the ensemble whose state this is would have."""
        if dict(state["settings"]) != asdict(self.settings):
            raise CheckpointError(
                f"the saved dynamics were made with {dict(state['settings'])}, these with "
                f"{asdict(self.settings)}; write the settings they were saved with"
            )
        with torch.no_grad():
            self._weights.copy_(state["weights"])
        self._weights.grad = None
        self._average = state["average"].clone()
        self._optimizer.state.clear()
        if state["updates"]:
            self._optimizer.state[self._weights] = {
                "step": torch.tensor(float(state["updates"]), dtype=torch.float32, device="cpu"),
                "exp_avg": state["exp_avg"].clone(),
                "exp_avg_sq": state["exp_avg_sq"].clone(),
            }
        self._generator.set_state(state["generator"])
        self._start = state["start"].clone()
        self._inputs, self._targets = state["inputs"].clone(), state["targets"].clone()
        self._squared_error = float(state["squared_error"])
        self.observations = int(state["observations"])

    def _next(self, hidden: Tensor, row: Tensor) -> Tensor:
        inputs = row.expand(self.settings.members, -1)
        return gru_cell(inputs, hidden, weights=as_cells(self._weights, self._like))

    def _learn(self) -> None:
        """Take one step on the last few errors, with a bootstrap's weight for each member."""
        steps = len(self._targets)
        with torch.enable_grad():
            weights = as_cells(self._weights, self._like)
            hidden, said = self._start, []
            for row in self._inputs[:steps]:
                hidden = gru_cell(
                    _squashed(row).expand(self.settings.members, -1), hidden, weights=weights
                )
                said.append(head(hidden, weights=weights))
            errors = torch.stack(said) - self._targets.unsqueeze(1)  # (steps, members)
            # Exponential weights: the Bayesian bootstrap.
            uniform = torch.rand(
                errors.shape, generator=self._generator, dtype=torch.float32, device="cpu"
            )
            counts = -torch.log1p(-uniform)
            decay = self.settings.bptt_decay ** torch.arange(
                steps - 1, -1, -1, dtype=torch.float32, device="cpu"
            )
            loss = (decay.unsqueeze(1) * counts * errors**2).sum() / 2
            (gradient,) = torch.autograd.grad(loss, self._weights)
        norms = gradient.norm(dim=1, keepdim=True)
        self._weights.grad = gradient * (self.settings.max_grad_norm / norms).clamp(max=1.0)
        self._optimizer.step()
        slow = min(self.settings.averaging, 1 - 1 / (self.observations + 1))
        self._average.lerp_(self._weights.detach(), 1 - slow)
        newest = float(errors[-1].detach().mean()) ** 2
        share = max(0.02, 1 / self.observations)  # the last fifty
        self._squared_error += share * (newest - self._squared_error)


def _squashed(features: Tensor) -> Tensor:
    """Return features in a range that gates can tell apart, whatever their unit."""
    return _symlogs(features)


def _symlogs(values: Tensor) -> Tensor:
    return values.sign() * values.abs().log1p()


def _symlog(value: float) -> float:
    """Return the logarithm of one plus a loss; of a negative one, mirrored."""
    return math.copysign(math.log1p(abs(value)), value)


def _symexp(value: float) -> float:
    return math.copysign(math.expm1(min(abs(value), 700.0)), value)
