"""Weights with several uses, apart: each use has the weight to itself, and a gradient of its own.

A weight that modules share, a module that is called twice, a table that a model's own code
multiplies with once more: torch adds up what each use makes before a hook on the weight sees it, so
nobody can tell from the sum who made it, nor when. An alias of the weight for each call can.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CAST = "ToCopyBackward0"
"""What stands between a weight and its uses where they share one cast of it."""

See = Callable[[str, Tensor], None]
"""Gets the module that made a gradient of a weight, and that gradient."""


def weights_of_several_uses(model: nn.Module, loss: Tensor) -> set[nn.Parameter]:
    """Return the weights whose gradients more than one use makes, on the way to a loss."""
    slots = Counter(p for module in model.modules() for p in module._parameters.values())
    matches = {p for p, times in slots.items() if p is not None and times > 1}
    uses: Counter[Any] = Counter()
    made_for: dict[Any, Any] = {}
    waiting = [loss.grad_fn] if loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            uses[child] += 1
            if uses[child] == 1:
                made_for[child] = node
                waiting.append(child)
    for node in uses:
        weight = getattr(node, "variable", None)
        while uses[node] == 1 and made_for[node].name() == CAST and made_for[node] in uses:
            node = made_for[node]
        if isinstance(weight, nn.Parameter) and uses[node] > 1:
            matches.add(weight)
    return {weight for weight in matches if weight.requires_grad and _fits_itself(weight)}


@contextlib.contextmanager
def per_use_aliases(
    model: nn.Module, weights: Collection[nn.Parameter], see: See
) -> Iterator[None]:
    """Give the calls inside the block aliases of `weights`, and `see` the gradient of each.

    A use belongs to the innermost module that is running and has the weight somewhere in it. A
    module that is never called itself, as the last layer of torch's attention, is used on its
    behalf.
    """
    wanted = set(weights)
    slots = {
        name: [
            _Slot(inner, key, weight, f"{name}.{below}".strip("."))
            for below, inner in module.named_modules()
            for key, weight in inner._parameters.items()
            if weight in wanted
        ]
        for name, module in model.named_modules()
    }
    everywhere = slots[""]
    called: set[str] = set()
    running: list[str] = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        called.add(name)
        running.append(name)
        give(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        # Once more for those around it: torch goes back through what was made last first, and an
        # alias older than what it is multiplied with would be heard of too late.
        give(next((name for name in reversed(running) if slots[name]), None))

    def give(name: str | None) -> None:
        if name is None:
            for slot in everywhere:
                slot.put(slot.weight)
            return
        if not torch.is_grad_enabled():
            return  # what is used in there makes no gradient
        for weight in dict.fromkeys(slot.weight for slot in slots[name]):
            mine = [slot for slot in slots[name] if slot.weight is weight]
            alias = _alias(weight)
            alias.register_hook(partial(made, name, {slot.holder for slot in mine}))
            for slot in mine:
                slot.put(alias)

    def made(name: str, holders: set[str], gradient: Tensor) -> None:
        uncalled = holders - called
        on_behalf = name not in holders and len(uncalled) == 1
        see(uncalled.pop() if on_behalf else name, gradient)

    handles: list[Any] = []
    for name, module in model.named_modules() if wanted else ():
        # First of all hooks, so that weights made of weights are made of these.
        hook = partial(enter, name)
        handles.append(module.register_forward_pre_hook(hook, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for slot in everywhere:
            slot.put(slot.weight)


class _Slot:
    """A place where a module keeps a weight."""

    def __init__(
        self, module: nn.Module, key: str, weight: nn.Parameter | None, holder: str
    ) -> None:
        assert weight is not None
        self.module, self.key, self.weight, self.holder = module, key, weight, holder

    def put(self, value: Tensor | None) -> None:
        """Let the module use another tensor."""
        # Past torch's own door, which takes nothing but parameters.
        slots: dict[str, Any] = self.module._parameters
        slots[self.key] = value


def _alias(weight: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunction():  # regions would look at every call
        return weight.view_as(weight)


def _fits_itself(weight: nn.Parameter) -> bool:
    """Say whether a gradient fits the weight's own format, which that of an alias has."""
    return weight.dtype != torch.float16 or weight.grad_dtype in (None, torch.float16)
