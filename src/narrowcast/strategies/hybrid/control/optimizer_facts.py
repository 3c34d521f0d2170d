"""What an optimizer's moments look like, in eight numbers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.strategies.hybrid.control.plain import restored


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Moments and rates of an optimizer; zeros where it keeps none."""

    lr: float
    momentum_mean: float = 0.0
    momentum_std: float = 0.0
    variance_mean: float = 0.0
    variance_std: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 1e-8

    @property
    def effective_lr(self) -> float:
        """How far a weight moves for a gradient of one, on average."""
        if self.variance_mean <= 0:
            return self.lr
        return self.lr / (math.sqrt(self.variance_mean) + self.eps)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "OptimizerFacts":
        """Return the facts that `to_json` returned."""
        return restored(cls, data)


def optimizer_facts(optimizer: torch.optim.Optimizer) -> OptimizerFacts:
    """Return the facts of an optimizer of the Adam family, or of SGD. Waits for the device.

    Reads all moments once: ask for it now and then, not in every step.
    """
    group = optimizer.param_groups[0]
    beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), 0.0))
    states = list(optimizer.state.values())
    first = [s["exp_avg"] if "exp_avg" in s else s.get("momentum_buffer") for s in states]
    second = [state.get("exp_avg_sq") for state in states]
    momentum_mean, momentum_std = _mean_and_deviation(first)
    variance_mean, variance_std = _mean_and_deviation(second)
    return OptimizerFacts(
        lr=float(group["lr"]),
        momentum_mean=momentum_mean,
        momentum_std=momentum_std,
        variance_mean=variance_mean,
        variance_std=variance_std,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group.get("eps", 1e-8)),
    )


def _mean_and_deviation(moments: Iterable[Tensor | None]) -> tuple[float, float]:
    """Return both over all elements of all tensors: each tensor's in fp32, all together in fp64."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for moment in moments:
        if moment is not None and moment.numel() > 0:
            by_device.setdefault(moment.device, []).append(moment.detach())
    counts, variances, means = [], [], []
    for found in by_device.values():
        # One copy to the host for each device, however many weights it holds.
        pairs = [torch.stack(torch.var_mean(each.float(), correction=0)) for each in found]
        counts += [each.numel() for each in found]
        for variance, mean in torch.stack(pairs).tolist():
            variances.append(variance)
            means.append(mean)
    whole = sum(counts)
    if whole == 0:
        return 0.0, 0.0
    mean = math.fsum(n * m for n, m in zip(counts, means, strict=True)) / whole
    # Sums of squares would cancel where the mean is large; variances within tensors do not.
    rows = zip(counts, means, variances, strict=True)
    variance = math.fsum(n * (v + (m - mean) ** 2) for n, m, v in rows) / whole
    return mean, math.sqrt(variance)
