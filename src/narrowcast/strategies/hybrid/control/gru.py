"""Several GRU cells at once: an ensemble whose members see the same input and share no weight."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class CellWeights(NamedTuple):
    """The weights of all members; gates in torch's order: reset, update, new."""

    input_weight: Tensor  # (members, 3 * hidden, width)
    hidden_weight: Tensor  # (members, 3 * hidden, hidden)
    input_bias: Tensor  # (members, 3 * hidden)
    hidden_bias: Tensor  # (members, 3 * hidden)
    head_weight: Tensor  # (members, hidden)
    head_bias: Tensor  # (members,)


def gru_cell(inputs: Tensor, hidden: Tensor, *, weights: CellWeights) -> Tensor:
    """Return the members' next hidden states, each computed as `torch.nn.GRUCell` does.

    `inputs` is (members, width), `hidden` (members, hidden).
    """
    from_input = _product(weights.input_weight, inputs) + weights.input_bias
    from_hidden = _product(weights.hidden_weight, hidden) + weights.hidden_bias
    reset_i, update_i, new_i = from_input.chunk(3, dim=-1)
    reset_h, update_h, new_h = from_hidden.chunk(3, dim=-1)
    reset, update = (reset_i + reset_h).sigmoid(), (update_i + update_h).sigmoid()
    new = (new_i + reset * new_h).tanh()
    return (1 - update) * new + update * hidden


def head(hidden: Tensor, *, weights: CellWeights) -> Tensor:
    """Return one number of each member."""
    return (hidden * weights.head_weight).sum(-1) + weights.head_bias


def shapes(members: int, width: int, *, hidden: int) -> CellWeights:
    """Return weights without memory behind them, for their shapes."""
    sizes = ((3 * hidden, width), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,), (hidden,), ())
    return CellWeights(*(torch.empty((members, *size), device="meta") for size in sizes))


def initial_weights(members: int, width: int, *, hidden: int, generator: torch.Generator) -> Tensor:
    """Return all weights, a row a member: Xavier's matrices, and a head that predicts no change."""
    parts = []
    for name, shape in shapes(members, width, hidden=hidden)._asdict().items():
        bound = 0.0
        if name in ("input_weight", "hidden_weight"):
            bound = math.sqrt(6 / (shape.shape[1] / 3 + shape.shape[2]))
        uniform = torch.rand(shape.shape, generator=generator, dtype=torch.float32, device="cpu")
        parts.append((bound * (2 * uniform - 1)).reshape(members, -1))
    return torch.cat(parts, dim=1)


def as_cells(flat: Tensor, like: CellWeights) -> CellWeights:
    """Return the views of a (members, numbers) tensor that are each kind of weight."""
    sizes = [each[0].numel() for each in like]
    parts = flat.split(sizes, dim=1)
    return CellWeights(*(p.reshape(each.shape) for p, each in zip(parts, like, strict=True)))


def _product(matrices: Tensor, vectors: Tensor) -> Tensor:
    return torch.bmm(matrices, vectors.unsqueeze(-1)).squeeze(-1)
