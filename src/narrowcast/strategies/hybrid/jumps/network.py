"""A small network, shared by all weights, that corrects the last movement of each from its past.

As WNN (Jang et al., 2023): the past movements of one weight, in units of what its tensor moves, go
in, the next movement comes out. It begins as "the last movement again", so it is exact on straight
lines untrained, and learns online what the run's own snapshots show it.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.strategies.hybrid.jumps.history import WeightHistory
from narrowcast.strategies.hybrid.jumps.predictor import intervals, require

CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Elements that pass through the network at once: what a cache holds, what fills a GPU."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """What the network is and how it learns."""

    context: int = 3
    """Past movements of a weight that it sees."""
    width: int = 16
    updates: int = 8
    """Steps of Adam at every new snapshot."""
    sample: int = 1024
    """Weights that each of them sees."""
    lr: float = 1e-3
    seed: int = 0


@final
class WeightNetwork:
    """A network of two layers, trained by Adam on random weights. Never waits for the device."""

    learns, cost = True, 8.0  # two intervals ahead, measured on a CPU; a lesson is 2
    name = "network"

    def __init__(self, settings: NetworkSettings | None = None, *, device: torch.device) -> None:
        self.settings = NetworkSettings() if settings is None else settings
        self.needs = self.settings.context + 1
        self._generator = torch.Generator(device).manual_seed(self.settings.seed)
        context, width = self.settings.context, self.settings.width
        drawn = torch.randn(width, context, generator=self._generator, device=device)
        first, bias = drawn / math.sqrt(context), torch.zeros(width, 1, device=device)
        # Nothing comes out of it at first, so that the last movement stands as it is.
        second = torch.zeros(1, width, device=device)
        self._parameters = [t.requires_grad_() for t in (first, bias, second)]
        self._adam = torch.optim.Adam(self._parameters, lr=self.settings.lr)
        self._seen_step = -1

    @torch.no_grad()
    def predict(self, history: WeightHistory, *, ahead_steps: int) -> list[Tensor]:
        """Return the movement, of which each interval is predicted from those before it."""
        require(self, history, ahead_steps=ahead_steps)
        ahead, context = intervals(history, ahead_steps), self.settings.context
        deltas = []
        for i, shape in enumerate(history.shapes):
            past = history.moves_of(i)[-context:]
            scale = _scale(past)
            chunk = CHUNK.get(past.device.type, CHUNK["cuda"])
            chunks = [self._rolled(each / scale, ahead) for each in past.split(chunk, dim=1)]
            deltas.append((torch.cat(chunks) * scale).view(shape))
        return deltas

    def observe(self, history: WeightHistory) -> None:
        """Learn to tell the last movement from those before it, at every snapshot once."""
        context = self.settings.context
        if len(history) < context + 2 or history.steps[-1] == self._seen_step:
            return
        self._seen_step = history.steps[-1]
        past, following = self._examples(history)
        per_update = self.settings.sample
        for update in range(self.settings.updates):
            some = slice(update * per_update, (update + 1) * per_update)
            with torch.enable_grad():
                error = self._next(past[:, some]) - following[some]
                # Moves of a tensor have tails; a few of them must not decide a step.
                loss = torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error))
            gradients = torch.autograd.grad(loss, self._parameters)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._adam.step()
            self._adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, the state of Adam and of the random generator."""
        moments = [self._adam.state.get(p, {}) for p in self._parameters]
        return {
            "parameters": [p.detach().clone() for p in self._parameters],
            "adam": [{key: value.clone() for key, value in each.items()} for each in moments],
            "random": self._generator.get_state(),
            "seen_step": self._seen_step,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what a saved network had learnt."""
        saved = state["parameters"]
        if [t.shape for t in saved] != [p.shape for p in self._parameters]:
            raise CheckpointError(
                "the checkpoint's network has another context or width than "
                f"{self.settings.context} and {self.settings.width}; write those it was saved with"
            )
        for parameter, value in zip(self._parameters, saved, strict=True):
            parameter.copy_(value)
        for parameter, each in zip(self._parameters, state["adam"], strict=True):
            # As torch keeps them: the count of steps on the host, moments with their parameter.
            self._adam.state[parameter] = {
                key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, value in each.items()
            }
        self._generator.set_state(state["random"].cpu())
        self._seen_step = int(state["seen_step"])

    def _next(self, past: Tensor) -> Tensor:
        """Return the next movement of weights, given (context, weights) in their tensor's units."""
        first, bias, second = self._parameters
        hidden = torch.addmm(bias, first, past).relu()  # (width, weights)
        # Less what it says of no movement: a weight that rests is left to rest.
        return past[-1] + (second @ (hidden - bias.relu()))[0]

    def _rolled(self, past: Tensor, ahead: float) -> Tensor:
        total = torch.zeros_like(past[-1])
        for left in itertools.takewhile(lambda left: left > 0, itertools.count(ahead, -1.0)):
            following = self._next(past)
            total.add_(following, alpha=min(left, 1.0))
            past = torch.cat([past[1:], following[None]])
        return total

    def _examples(self, history: WeightHistory) -> tuple[Tensor, Tensor]:
        """Return random weights' movements, in their tensor's units, and those that followed."""
        wanted = self.settings.sample * self.settings.updates
        all_weights = sum(shape.numel() for shape in history.shapes)
        pasts, nexts = [], []
        for i, shape in enumerate(history.shapes):
            share = max(1, round(wanted * shape.numel() / all_weights))
            drawn = torch.randint(
                shape.numel(), (share,), generator=self._generator, device=history.device
            )
            moves = history.moves_of(i)[-self.settings.context - 1 :]
            scale = _scale(moves[:-1])
            pasts.append(moves[:-1, drawn] / scale)
            nexts.append(moves[-1, drawn] / scale)
        past, following = torch.cat(pasts, dim=1), torch.cat(nexts)
        # Every update is to see every tensor.
        order = torch.randperm(following.numel(), generator=self._generator, device=history.device)[
            :wanted
        ]
        return past[:, order], following[order]


def _scale(moves: Tensor) -> Tensor:
    """Return the root mean square of a tensor's movements; of one that rests, one."""
    rms = moves.square().mean().sqrt()
    return torch.where(rms > 0, rms, torch.ones_like(rms))
