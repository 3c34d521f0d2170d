"""Past weights, and the line through them that predicts the next ones.

Before the newest snapshot only movements are stored, in bf16. They are right to one part in 256,
where the difference of two bf16 weights may have no correct digit at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError

SNAPSHOTS = 7
FEWEST_SNAPSHOTS = 3
"""Snapshots that a prediction needs: two for a line, and one to compare it with."""


@final
class WeightHistory:
    """Snapshots of the weights, evenly spaced. Nothing here waits for the device.

    After a gap, or a step back, it starts over: a line through uneven snapshots is wrong.
    """

    def __init__(self, *, every: int) -> None:
        """Keep one snapshot every so many steps."""
        self.every = every
        self._steps: list[int] = []
        self._newest: list[Tensor] = []
        self._moves: list[list[Tensor]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def bytes(self) -> int:
        return sum(t.nbytes for tensors in (self._newest, *self._moves) for t in tensors)

    def due(self, step: int) -> bool:
        return not self._steps or not 0 <= step - self._steps[-1] < self.every

    @torch.no_grad()
    def take(self, step: int, weights: Sequence[Tensor]) -> None:
        """Take a snapshot of the fp32 weights after a step."""
        if self._steps and step - self._steps[-1] != self.every:
            self.clear()
        if self._newest:
            moves = torch._foreach_sub([w.detach() for w in weights], self._newest)
            self._moves.append([move.to(torch.bfloat16) for move in moves])
            torch._foreach_copy_(self._newest, [w.detach() for w in weights])
        else:
            self._newest = [w.detach().clone() for w in weights]
        self._steps.append(step)
        if len(self._steps) > SNAPSHOTS:
            del self._steps[0], self._moves[0]

    def clear(self) -> None:
        """Forget every snapshot. What was before a jump is on another line."""
        self._steps, self._newest, self._moves = [], [], []

    @torch.no_grad()
    def predict(self, ahead_steps: int) -> list[Tensor]:
        """Return the movement of each weight over so many steps from the last snapshot, in fp32.

        A tensor follows a least-squares line by the share of its last movement that a line through
        the snapshots before would have predicted.
        """
        if ahead_steps < 1:
            raise ConfigError(f"ahead_steps must be 1 or more, got {ahead_steps}.")
        if len(self) < FEWEST_SNAPSHOTS:
            raise ConfigError(
                f"A jump needs {FEWEST_SNAPSHOTS} snapshots of the weights, {self.every} steps "
                f"apart, got {len(self)}. Take {self.every * FEWEST_SNAPSHOTS} steps between jumps."
            )
        moves = len(self._moves)
        deltas = self._combine(slope(moves, ahead=ahead_steps / self.every))
        expected = self._combine(slope(moves - 1, ahead=1.0))
        torch._foreach_mul_(
            deltas, [_share(*p) for p in zip(expected, self._moves[-1], strict=True)]
        )
        return deltas

    def state_dict(self) -> dict[str, Any]:
        """Return every snapshot; the tensors are those held."""
        return {
            "every": self.every,
            "steps": list(self._steps),
            "newest": list(self._newest),
            "moves": [list(move) for move in self._moves],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Restore a `state_dict()`. Raises for snapshots that are spaced differently."""
        if int(state["every"]) != self.every:
            raise CheckpointError(
                f"The checkpoint has weights of every {state['every']} steps, and this run needs "
                f"those of every {self.every}. Write the strategy.phases of the checkpoint."
            )
        self._steps = [int(step) for step in state["steps"]]
        self._newest = [t.to(device, copy=True) for t in state["newest"]]
        self._moves = [[t.to(device, copy=True) for t in move] for move in state["moves"]]

    def _combine(self, coefficients: Sequence[float]) -> list[Tensor]:
        """Return the sum of the first movements times coefficients, in fp32."""
        total = [torch.zeros_like(t) for t in self._newest]
        for coefficient, move in zip(coefficients, self._moves, strict=False):
            torch._foreach_add_(total, [t.float() for t in move], alpha=coefficient)
        return total


def slope(moves: int, *, ahead: float) -> list[float]:
    """Return the factors that turn `moves` movements into a least-squares line's next `ahead`."""
    scale = 6 * ahead / (moves * (moves + 1) * (moves + 2))
    return [scale * k * (moves + 1 - k) for k in range(1, moves + 1)]


def _share(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the factor from 0 to 1 that brings a prediction closest to what happened."""
    predicted, happened = expected.flatten(), actual.flatten().float()
    square = torch.dot(predicted, predicted)
    share = (torch.dot(predicted, happened) / square).clamp(0, 1)
    return torch.where(square > 0, share, torch.zeros_like(share))
