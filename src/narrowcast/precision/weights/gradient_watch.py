"""Whose the gradients of the weights are: made by backward passes of the run, or by others.

A pass of another run's loss that goes through the model leaves gradients in it, and so does a
`loss.backward()`. With a loss scale they are not scaled as the run's are, and without one the run
would add them to its own though nobody asked for it. A look costs the host some fifty nanoseconds
for each weight.
"""

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from types import NoneType
from typing import final

from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.gradients.check import Unscaled

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")  # mapped over all weights
_Marks = tuple[list[Tensor | None], list[int]]


@final
class GradientWatch:
    """Knows the gradients that backward passes of the run have made since its last step."""

    def __init__(self, weights: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._weights, self._names = weights, names
        self._are_ours = False
        self._cleared = False
        """Whether somebody has called `zero_grad` since the last step."""
        self._cleared_weights: set[nn.Parameter] = set()
        """The weights of the optimizers of which that is so."""
        self._marks = self._none
        """Gradients as they were last made or cleared; with a loss scale only."""
        self.unscaled: Unscaled | None = None
        """What was found when the scale was divided out of them before the step."""

    def before_backward(self, *, scaled: bool) -> None:
        """Refuse to add to gradients that this run did not make, unless they are wanted there."""
        if self._are_ours and not scaled:
            return
        gradients = list(map(_GRAD, self._weights))
        if not any(g is not None for g in gradients):
            self._are_ours, self.unscaled = False, None
            return
        if self.unscaled is not None:
            raise ConfigError(
                "backward() was called after unscale(), which would add scaled gradients to "
                "unscaled ones. Call every backward() of a step first, then unscale(), then "
                "step()."
            )
        if not scaled and self._cleared:
            return
        name = self._first_foreign()
        if name and self._are_ours:
            raise ConfigError(_changed(name, before="this backward()"))
        if name and self._cleared:
            raise ConfigError(_unscaled(name))
        if name:
            raise ConfigError(
                f"{name} has a gradient that was not made by backward() of this run, but by "
                "another run's loss or by loss.backward(). Call run.zero_grad() (or "
                "optimizer.zero_grad()) at the start of the step to drop it."
            )

    def after_backward(self, *, scaled: bool) -> None:
        """Take the gradients that are there for the run's own."""
        self._are_ours = True
        self._cleared_weights.clear()
        self._marks = self._now() if scaled else self._none

    def before_step(self, *, scaled: bool, doing: str = "step()") -> None:
        """Refuse to divide a loss scale out of gradients that it is not in, or no longer."""
        if scaled and self.unscaled is None:
            if not self._are_ours:
                raise ConfigError(_unscaled(""))
            if name := self._first_foreign():
                raise ConfigError(_changed(name, before=doing))
        self._marks = self._none  # or they would outlive the update

    @property
    def are_scaled(self) -> bool:
        """Whether gradients have the loss scale of the run, all of them. Asked where there is one.

        May wait for the device.
        """
        return self._are_ours and self.unscaled is None and not self._first_foreign()

    def clear(self, weights: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
        """Clear the gradients of weights, as torch does: all, or those of one optimizer of some."""
        for p in weights:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()
        self._cleared_weights.update(weights)
        none_left = all(g is None for g in map(_GRAD, self._weights))
        if none_left or len(self._cleared_weights) == len(self._weights):
            self._are_ours, self._cleared, self.unscaled = False, True, None
            self._marks = self._none if set_to_none else self._now()
        else:
            (known, counts), (gradients, versions), cleared = self._marks, self._now(), set(weights)
            places = [i for i, p in enumerate(self._weights) if p in cleared]
            for i in places:
                known[i], counts[i] = gradients[i], versions[i]

    def end_step(self) -> None:
        """Forget the gradients of a step that has ended."""
        self._are_ours, self._cleared = False, False
        self.unscaled, self._marks = None, self._none
        self._cleared_weights.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Begin the block as if no gradients had been made; know afterwards what was known."""
        known, cleared = (
            (self._are_ours, self._cleared, self.unscaled, self._marks),
            set(self._cleared_weights),
        )
        self.end_step()
        try:
            yield
        finally:
            self._are_ours, self._cleared, self.unscaled, self._marks = known
            self._cleared_weights = cleared

    def _first_foreign(self) -> str:
        """Return the name of a weight whose gradient is not the one that is known; none of zeros.

        Waits for the device only where there is one: `model.zero_grad(set_to_none=False)`, of which
        nobody tells, leaves zeros.
        """
        (gradients, versions), (known, counts) = self._now(), self._marks
        if versions == counts and all(map(is_, gradients, known)):
            return ""
        pairs = zip(gradients, versions, strict=True), zip(known, counts, strict=True)
        for name, (now, version), (then, count) in zip(self._names, *pairs, strict=True):
            is_known = now is then and version == count
            if now is not None and not is_known and bool(now.any()):
                return name
        return ""

    def _now(self) -> _Marks:
        gradients = list(map(_GRAD, self._weights))
        if NoneType not in map(type, gradients):
            return gradients, list(map(_VERSION, gradients))
        return gradients, [0 if g is None else g._version for g in gradients]

    @property
    def _none(self) -> _Marks:
        count = len(self._weights)
        return [None] * count, [0] * count


def _changed(name: str, *, before: str) -> str:
    return (
        f"The gradient of {name} was changed between backward() and {before}, while it still has "
        "the loss scale. Call run.unscale() after the last backward(), then clip, edit or add to "
        "gradients."
    )


def _unscaled(name: str) -> str:
    where = f" (for example {name})" if name else ""
    return (
        f"Some gradients{where} were not made by backward() of the prepared model, so they do not "
        "have the loss scale that step() would divide out. Write step(loss) or backward(loss) "
        "instead of loss.backward(). Prepare models that share a loss as one: "
        "prepare(nn.ModuleList([…]), [optimizer, …])."
    )
