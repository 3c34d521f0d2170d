"""Selectors: which channels of a component make its network."""

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from torch import Tensor

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.networks import check_number, check_type, check_whole


class Selector(Protocol):
    """Selects channels by their loadings on one component."""

    def __str__(self) -> str:
        """Return the text for provenance."""
        ...

    def select(self, loadings: Tensor) -> list[int]:
        """Return ascending channels; channels with zero loading are never selected."""
        ...


@final
@dataclass(frozen=True)
class Percentile:
    """Channels whose absolute loading is at or above a percentile: a fixed number of channels."""

    percentile: float = 98.0

    def __post_init__(self) -> None:
        if not 0 <= check_number("percentile", self.percentile, "a number from 0 to 100") < 100:
            raise ConfigError(
                f"percentile must be 0 or more and less than 100, got {self.percentile}. For "
                "example, 98 selects two in a hundred channels."
            )

    def __str__(self) -> str:
        return f"percentile={self.percentile:g}"

    def select(self, loadings: Tensor) -> list[int]:
        size = _array(loadings.abs())
        return _places((size >= np.percentile(size, self.percentile)) & (size > 0))


@final
@dataclass(frozen=True)
class ZScore:
    """Channels with a loading more than `threshold` standard deviations above the mean."""

    threshold: float = 1.96
    two_sided: bool = False
    """Also channels as far below the mean."""

    def __post_init__(self) -> None:
        check_type("two_sided", self.two_sided, bool, "True or False")
        if not 0 < check_number("z-score", self.threshold, "a number above 0") < np.inf:
            raise ConfigError(
                f"The z-score must be above 0, got {self.threshold}. Write a number such as 1.96."
            )

    def __str__(self) -> str:
        return f"{'|z|' if self.two_sided else 'z'}>{self.threshold:g}"

    def select(self, loadings: Tensor) -> list[int]:
        values = _array(loadings)
        spread = values.std()
        if spread == 0:
            return []
        score = (values - values.mean()) / spread
        beyond = np.abs(score) if self.two_sided else score
        return _places((beyond > self.threshold) & (values != 0))


@final
@dataclass(frozen=True)
class TopK:
    """The channels with the largest absolute loadings."""

    count: int

    def __post_init__(self) -> None:
        check_whole("top-k", self.count, least=1)

    def __str__(self) -> str:
        return f"top-k={self.count}"

    def select(self, loadings: Tensor) -> list[int]:
        """Return the channels; ties go to the first."""
        size = _array(loadings.abs())
        heaviest = np.argsort(-size, kind="stable")[: self.count]
        return sorted(int(i) for i in heaviest if size[i] > 0)


def selector_from(
    *,
    percentile: float | None = None,
    zscore: float | None = None,
    top_k: int | None = None,
    two_sided: bool = False,
) -> Selector:
    """Return the selector of settings, by percentile unless another is set."""
    if zscore is not None:
        return ZScore(zscore, two_sided=two_sided)
    if top_k is not None:
        return TopK(top_k)
    return Percentile() if percentile is None else Percentile(percentile)


def _array(loadings: Tensor) -> np.ndarray:
    array: np.ndarray = loadings.detach().double().cpu().numpy()
    return array


def _places(chosen: np.ndarray) -> list[int]:
    return [int(i) for i in np.nonzero(chosen)[0]]
