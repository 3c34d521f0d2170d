"""Sizes of a forecasting network that follow from its data and its head."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of a window, numbers per forecast row, and exogenous columns by kind."""

    lookback: int
    horizon: int
    outputs: int
    """Numbers of the head per row."""
    past: int = 0
    future: int = 0
    static: int = 0

    @property
    def forecast(self) -> int:
        """Numbers of a whole forecast."""
        return self.horizon * self.outputs
