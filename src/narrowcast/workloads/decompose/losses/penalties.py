"""Terms without a masked pass: faithfulness of weights, and minimality of importances.

An importance of exactly 0 has no slope under a power below 1. By the formula it would have
p · epsilon^(p − 1), 6e6 at p = 0.4. Products in bf16 on a GPU give 0 so often that, below p = 0.7,
all importances of a language model were pressed to nothing.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import FORMATS, has_kernels
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.terms import Loss, Step
from narrowcast.workloads.decompose.settings import (
    EPSILON,
    Annealed,
    MinimalityTerm,
    SmoothL0Term,
)


class Faithfulness(Loss):
    """The mean squared difference between the target's weights and the sums of components."""

    kind: ClassVar[str] = "faithfulness"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        return unfaithfulness(step.decomposition)


def unfaithfulness(decomposition: Decomposition) -> Tensor:
    """Return the mean square of the weight residuals of all sites, per seed.

    Of the difference itself: the square multiplied out would cancel where components are good.
    """
    deltas = decomposition.deltas()
    squares: Tensor = sum(each.square().sum((1, 2)) for each in deltas)  # type: ignore[assignment]
    return squares / sum(each[0].numel() for each in deltas)


class _Annealed(Loss, Annealed):
    def between(self, first: float, last: float, progress: Tensor) -> Tensor:
        """Interpolate from `first` to `last` by the progress of the run."""
        way = (progress - self.anneal_from) / (self.anneal_to - self.anneal_from)
        return first + (last - first) * way.clamp(0, 1)

    def summed(self, step: Step, means: Tensor) -> Tensor:
        """Return the sum of means over rows, (seeds, components), with their frequency term."""
        if self.beta:
            often = means * (self.reference_rows or step.rows)
            means = means + self.beta * means * torch.log2(1 + often)
        return means.sum(-1)


class Minimality(_Annealed, MinimalityTerm):
    """Importances to a power p: at 1 their sum, near 0 their number."""

    kind: ClassVar[str] = "minimality"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        power: float | Tensor = self.p
        if self.p_final is not None:
            power = self.between(self.p, self.p_final, step.progress)
        return self.summed(step, power_means(step.upper, power, self.epsilon))


class SmoothL0(_Annealed, SmoothL0Term):
    """u²/(u² + γ²) of an importance u: nearly 1 for those well above γ, nearly 0 below."""

    kind: ClassVar[str] = "smooth_l0"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        width = self.between(self.gamma, self.gamma_final, step.progress).square()
        squares = [wide(upper).square() for upper in step.upper]
        means = [(each / (each + width.to(each.dtype))).mean(1) for each in squares]
        return self.summed(step, torch.cat(means, -1))


def power_means(
    uppers: Sequence[Tensor], power: float | Tensor, epsilon: float = EPSILON
) -> Tensor:
    """Return row means of (max(u, 0) + epsilon)^power, (seeds, components of all sites)."""
    result: Tensor = _apply(power, epsilon, *uppers)
    return result


class _PowerMeans(torch.autograd.Function):
    # Autograd would launch a dozen operations per site, each over all rows.
    @staticmethod
    def forward(ctx: Any, power: float | Tensor, epsilon: float, *uppers: Tensor) -> Tensor:
        ctx.power, ctx.epsilon = power, epsilon
        if _has_kernel(uppers):
            from narrowcast.workloads.decompose.components.kernels import importance

            uppers = tuple(each.contiguous() for each in uppers)
            ctx.save_for_backward(*uppers)
            return importance.power_means(uppers, power, epsilon)
        ctx.save_for_backward(*uppers)
        return torch.cat([_raised(each, power, epsilon).mean(1) for each in uppers], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        uppers, power, epsilon = ctx.saved_tensors, ctx.power, ctx.epsilon
        if _has_kernel(uppers):
            from narrowcast.workloads.decompose.components.kernels import importance

            return None, None, *importance.power_means_back(grad, uppers, power, epsilon)
        lines = (grad / uppers[0].shape[1]).split([each.shape[-1] for each in uppers], -1)
        both = zip(uppers, lines, strict=True)
        slopes = [_slope(each, power, epsilon, line.unsqueeze(1)) for each, line in both]
        return None, None, *[s.to(each.dtype) for s, each in zip(slopes, uppers, strict=True)]


_apply: Any = _PowerMeans.apply


def _raised(upper: Tensor, power: float | Tensor, epsilon: float) -> Tensor:
    x = wide(upper).clamp(min=0).add_(epsilon)
    return x if isinstance(power, float) and power == 1 else x.pow_(power)


def _slope(upper: Tensor, power: float | Tensor, epsilon: float, grad: Tensor) -> Tensor:
    """Return the gradient of an importance from that of its power."""
    if isinstance(power, float) and power == 1:
        return torch.where(upper < 0, 0.0, grad)
    slope = _raised(upper, power - 1, epsilon).mul_(grad * power)
    if isinstance(power, Tensor):
        flat = torch.where(power < 1, upper <= 0, upper < 0)
    else:
        flat = upper <= 0 if power < 1 else upper < 0
    return slope.masked_fill_(flat, 0.0)


def _has_kernel(uppers: Sequence[Tensor]) -> bool:
    # torch.compile fuses the arithmetic itself.
    if torch.compiler.is_compiling() or any(each.dtype not in FORMATS for each in uppers):
        return False
    return uppers[0].numel() > 0 and has_kernels(uppers[0].device.type)
