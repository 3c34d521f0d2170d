"""Matrices and densities as small as a page can show them, made from tensors of any size."""

import math
from collections.abc import Sequence
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

LEVELS = 254
"""Steps from the lowest to the highest cell, two hexadecimal digits each; even: 0 can be amid."""
MOST_CELLS = 128
"""Along either side of a picture; a larger matrix is pooled."""
FEW_CELLS = 32
"""The same of one component's matrix, of which there are many on a page."""
DECADES = (-6, 0)
"""Range of a histogram of densities, as powers of ten."""
BINS = 24


class Picture(BaseModel):
    """A matrix of at most `MOST_CELLS` cells a side, each of 255 levels from `low` to `high`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float
    high: float
    rows: tuple[str, ...] = Field(min_length=1, max_length=MOST_CELLS)
    """A string a row, two hexadecimal digits a cell."""
    shape: tuple[int, int]
    """Rows and columns of the matrix itself; larger than the picture where cells were pooled."""

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        lengths = {len(row) for row in self.rows}
        if len(lengths) != 1 or not 2 <= (length := lengths.pop()) <= 2 * MOST_CELLS or length % 2:
            raise ValueError(
                "rows of a picture must have the same number of cells, two digits each"
            )
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError("the range of a picture must be finite")
        if any(level > LEVELS for row in self.rows for level in bytes.fromhex(row)):
            raise ValueError(f"a cell of a picture must be at most {LEVELS:02x}")
        return self

    def cells(self) -> list[list[float]]:
        """Return the matrix, as exactly as its levels allow."""
        step = (self.high - self.low) / LEVELS
        return [[self.low + step * level for level in bytes.fromhex(row)] for row in self.rows]

    @property
    def pooled(self) -> bool:
        """Whether several numbers of the matrix share a cell."""
        return self.shape != (len(self.rows), len(self.rows[0]) // 2)


def component_picture(matrix: Tensor) -> Picture:
    """Make a small picture of one matrix of many."""
    return picture(matrix, most_cells=FEW_CELLS)


def picture(
    matrix: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
    most_cells: int = MOST_CELLS,
) -> Picture:
    """Return a picture, pooled by magnitude; by default 0 is in the middle of the scale."""
    full = matrix.detach().float().cpu()
    shape = (full.shape[0], full.shape[1])
    most = float(full.nan_to_num(0, 0, 0).abs().max()) or 1.0
    plain = full.nan_to_num(0, most, -most)
    small = _pooled(_pooled(plain, most_cells).T, most_cells).T
    low, high = (-most if low is None else low), (most if high is None else high)
    levels = ((small - low) / ((high - low) or 1.0) * LEVELS).round().clamp(0, LEVELS)
    rows = tuple(bytes(row).hex() for row in levels.to(torch.uint8).tolist())
    return Picture(low=low, high=high, rows=rows, shape=shape)


def importance_picture(importance: Tensor, *, dense: bool = False) -> tuple[Picture, list[int]]:
    """Return a picture of (features, components) in `diagonal_order`, and its columns."""
    order = diagonal_order(importance, dense=dense)[:MOST_CELLS]
    return picture(importance.detach().cpu()[:, order], low=0.0, high=1.0), order


def diagonal_order(importance: Tensor, *, dense: bool = False) -> list[int]:
    """Return the columns by their most important feature, weak ones last; `dense`: by sum."""
    g = importance.detach().float().cpu().nan_to_num()
    if dense:
        return [int(at) for at in (-g.sum(0)).argsort(stable=True)]
    most, feature = g.max(0)
    weak = most < max(0.1, 0.1 * float(g.max()))
    keys = zip(weak.tolist(), feature.tolist(), (-most).tolist(), strict=True)
    return [at for at, _ in sorted(enumerate(keys), key=lambda pair: pair[1])]


class Histogram(BaseModel):
    """How many components are in use at what share of positions, by the logarithm of that."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    never: int = Field(ge=0)
    """Components in use nowhere."""
    edges: tuple[float, ...] = Field(min_length=2, max_length=1025)
    """Logarithms of base 10, one more than counts; the first bin has all that is below it too."""
    counts: tuple[int, ...]

    @model_validator(mode="after")
    def _one_edge_more(self) -> Self:
        if len(self.edges) != len(self.counts) + 1 or list(self.edges) != sorted(set(self.edges)):
            raise ValueError("a histogram must have rising edges, one more than counts")
        return self


def histogram(densities: Tensor | Sequence[float]) -> Histogram:
    """Count components (C,) by the share of positions at which they are in use."""
    shares = torch.as_tensor(densities, dtype=torch.float64).detach().cpu().flatten()
    used = shares[shares > 0].log10().clamp(*DECADES)
    edges = torch.linspace(*DECADES, BINS + 1, dtype=torch.float64)
    counts, _ = torch.histogram(used, edges)
    return Histogram(
        never=int((shares <= 0).sum()),
        edges=tuple(round(edge, 6) for edge in edges.tolist()),
        counts=tuple(int(count) for count in counts.tolist()),
    )


def _pooled(matrix: Tensor, most: int) -> Tensor:
    """Join rows to at most `most`, keeping the largest magnitude per column."""
    if len(matrix) <= most:
        return matrix
    parts = matrix.tensor_split(most)
    return torch.stack([part.gather(0, part.abs().argmax(0)[None])[0] for part in parts])
