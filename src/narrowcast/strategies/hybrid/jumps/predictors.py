"""Predictors by the names that settings have for them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from narrowcast.errors import RecipeError
from narrowcast.strategies.hybrid.jumps.dmd import Modes
from narrowcast.strategies.hybrid.jumps.ensemble import Ensemble
from narrowcast.strategies.hybrid.jumps.line import FittedCurve
from narrowcast.strategies.hybrid.jumps.network import NetworkSettings, WeightNetwork
from narrowcast.strategies.hybrid.jumps.predictor import Predictor

Make = Callable[[torch.device, int], Predictor]
"""Makes a predictor for weights on a device, with a seed."""


def predictor_named(name: str, *, device: torch.device, seed: int = 0) -> Predictor:
    """Return a new predictor with its own defaults; an unknown name is refused."""
    if name not in PREDICTORS:
        raise RecipeError(
            f"the predictor {name!r} was asked for, and there are {', '.join(PREDICTORS)}; write "
            "one of these"
        )
    return PREDICTORS[name](device, seed)


def _network(device: torch.device, seed: int) -> Predictor:
    return WeightNetwork(NetworkSettings(seed=seed), device=device)


def _ensemble(device: torch.device, seed: int) -> Predictor:
    members: list[Predictor] = [FittedCurve(1), FittedCurve(2), Modes(), _network(device, seed)]
    return Ensemble(members, device=device)


PREDICTORS: Mapping[str, Make] = MappingProxyType(
    {
        "line": lambda device, seed: FittedCurve(1),
        "quadratic": lambda device, seed: FittedCurve(2),
        "dmd": lambda device, seed: Modes(),
        "network": _network,
        "ensemble": _ensemble,
    }
)
"""How each is made; the ensemble has all others as members."""
