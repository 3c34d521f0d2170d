"""Where the weights have been: snapshots every few steps, in a ring of so many bytes.

The newest snapshot is whole, in fp32; of those before it the movement to the next is kept. That is
what predictors use, so its digits are worth more than those of the weights: a bf16 movement is
right to one part in 256, where the difference of two bf16 weights may have no digit at all. The
ring drops its oldest movement and nothing has to be written again.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, RecipeError
from narrowcast.hardware.lane import on_host
from narrowcast.strategies.hybrid.jumps.stored import Keep, MoveCode


@dataclass(frozen=True, kw_only=True)
class HistorySettings:
    """How often, how, where and how much is kept."""

    every: int = 100
    """Steps between two snapshots."""
    most: int = 8
    """Snapshots at most, if the budget holds them."""
    budget_bytes: int = 2**30
    """What all of it may take."""
    keep: Keep = "bf16"
    """The format of movements."""
    rank: int = 4
    """Of each matrix, where movements are kept in low rank."""
    place: Literal["device", "cpu"] = "device"
    """Where snapshots lie; the host's memory is pinned if there is a GPU."""
    seed: int = 0
    """Of the random columns that low rank needs."""

    def __post_init__(self) -> None:
        if min(self.every, self.most, self.rank) < 1:
            raise RecipeError(
                f"a history of every={self.every}, most={self.most}, rank={self.rank} keeps "
                "nothing; write 1 or more for each"
            )


@final
class WeightHistory:
    """Snapshots of weights, evenly spaced.

    Nothing waits for the device but `state_dict`, and `take` where movements are kept by svd: on
    CUDA torch looks whether a decomposition has converged.
    After a gap, or a step back, it begins anew: predictors rely on even spacing.
    """

    def __init__(
        self, weights: Sequence[Tensor], settings: HistorySettings, *, needs: int = 2
    ) -> None:
        """Make room for weights like these; refuse a budget for fewer than `needs` snapshots."""
        self.settings = settings
        self.shapes = [w.shape for w in weights]
        self.device = weights[0].device
        self._code = MoveCode(
            self.shapes,
            settings.keep,
            rank=settings.rank,
            seed=settings.seed,
            device=self.device,
        )
        self._capacity = self._fitting(needs)
        self._steps: list[int] = []
        self._newest: list[Tensor] | None = None
        self._moves: list[list[tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        """Return how many snapshots there are."""
        return len(self._steps)

    @property
    def steps(self) -> tuple[int, ...]:
        """The step of each snapshot, the oldest first."""
        return tuple(self._steps)

    @property
    def capacity(self) -> int:
        """How many snapshots there can be."""
        return self._capacity

    def bytes_for(self, snapshots: int) -> int:
        """Return what so many snapshots take."""
        whole = 4 * sum(shape.numel() for shape in self.shapes)
        return whole + self._code.fixed_bytes() + (snapshots - 1) * self._code.bytes_each()

    def bytes(self) -> int:
        """Return what is held now."""
        held = [] if self._newest is None else self._newest
        moves = (part for move in self._moves for parts in move for part in parts)
        return sum(t.nbytes for t in (*held, *moves)) + self._code.fixed_bytes()

    def due(self, step: int) -> bool:
        """Say whether a snapshot is to be taken after this step."""
        return not self._steps or step < self._steps[-1] or step - self._steps[-1] >= self._every

    @torch.no_grad()
    def take(self, step: int, weights: Sequence[Tensor]) -> None:
        """Take a snapshot of the full fp32 weights after a step."""
        if self._steps and step - self._steps[-1] != self._every:
            self.clear()
        if self._newest is None:
            assert not self._steps  # a view is not taken further
            self._newest = [self._put(w.detach().float(), copied=True) for w in weights]
        else:
            before = [t.to(self.device, non_blocking=True) for t in self._newest]
            moved = torch._foreach_sub([w.detach().float() for w in weights], before)
            stored = self._code.encode(moved)
            self._moves.append([tuple(self._put(part) for part in parts) for parts in stored])
            for mine, value in zip(self._newest, weights, strict=True):
                mine.copy_(value.detach(), non_blocking=True)
        self._steps.append(step)
        if len(self._steps) > self._capacity:
            del self._steps[0], self._moves[0]

    def clear(self) -> None:
        """Forget every snapshot: after a jump, what was before says nothing of a straight way."""
        self._steps, self._newest, self._moves = [], None, []

    def newest(self) -> list[Tensor]:
        """Return the last snapshot, exactly, on the device."""
        assert self._newest is not None
        return [t.to(self.device, non_blocking=True, copy=True) for t in self._newest]

    def move(self, j: int) -> list[Tensor]:
        """Return the movement from snapshot `j` to the next, in fp32; it may be written to."""
        return self._code.decode(self._moves[j])

    def moves_of(self, i: int) -> Tensor:
        """Return all movements of weight `i`, flat: (movements, elements), in fp32."""
        flat = [self._code.decode_one(i, move[i]).flatten() for move in self._moves]
        return torch.stack(flat)

    @torch.no_grad()
    def combine(self, coefficients: Sequence[float]) -> list[Tensor]:
        """Return the sum of movements times these, in fp32, one move in memory at a time."""
        total = [torch.zeros(shape, device=self.device) for shape in self.shapes]
        for j, coefficient in enumerate(coefficients):
            if coefficient:
                torch._foreach_add_(total, self.move(j), alpha=float(coefficient))
        return total

    def without_last(self, snapshots: int = 1) -> "WeightHistory":
        """Return the movements as they were known so many snapshots ago; nothing is copied.

        Whoever predicts from it can be compared with what happened. It is not taken further.
        """
        view = copy.copy(self)
        kept = len(self._steps) - snapshots
        view._steps, view._moves = self._steps[:kept], self._moves[: max(kept - 1, 0)]
        view._newest = None
        return view

    def state_dict(self) -> dict[str, Any]:
        """Return every snapshot as it is stored. Waits for the device where they are on the host.

        The tensors are those held: whoever goes on before they are written copies them.
        """
        if self.settings.place == "cpu" and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return {
            "settings": asdict(self.settings),
            "steps": list(self._steps),
            "newest": [] if self._newest is None else list(self._newest),
            "moves": [[list(parts) for parts in move] for move in self._moves],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a saved history stood; one with other settings is refused."""
        mine = asdict(self.settings)
        if dict(state["settings"]) != mine:
            raise CheckpointError(
                f"the checkpoint has a history of {dict(state['settings'])}, this run one of "
                f"{mine}; write the settings of the checkpoint, or begin without its history"
            )
        self._steps = [int(step) for step in state["steps"]]
        newest = [self._put(t, copied=True) for t in state["newest"]]
        if [t.shape for t in newest] not in ([], self.shapes):
            raise CheckpointError(
                "the checkpoint's history is of weights of other shapes; load it into the model "
                "that it was saved with"
            )
        self._newest = newest or None
        self._moves = [
            [tuple(self._put(part, copied=True) for part in parts) for parts in move]
            for move in state["moves"]
        ]

    @property
    def _every(self) -> int:
        return self.settings.every

    def _fitting(self, needs: int) -> int:
        """Return how many snapshots the budget holds, or refuse it."""
        least, budget = self.bytes_for(needs), self.settings.budget_bytes
        if self.settings.most < needs or least > budget:
            raise RecipeError(
                f"a history of at most {self.settings.most} snapshots in {budget:,} bytes was "
                f"asked for, and the predictor needs {needs}, which take {least:,} bytes; write "
                f"most={max(needs, self.settings.most)} and budget_bytes={max(least, budget)}, "
                "keep=svd or random for fewer bytes, or a predictor that needs less"
            )
        each = max(self._code.bytes_each(), 1)
        return min(self.settings.most, needs + (budget - least) // each)

    def _put(self, tensor: Tensor, *, copied: bool = False) -> Tensor:
        """Return a tensor where snapshots lie, as memory of its own if it is to be copied."""
        if self.settings.place == "cpu":
            return on_host(tensor).copy_(tensor, non_blocking=True)
        return tensor.to(self.device, copy=copied)
