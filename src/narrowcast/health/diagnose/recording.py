"""A recording of passes: the largest magnitude at every place, in the order of execution.

torch sums the gradients of all uses of a shared weight before a hook sees them. An alias of the
weight per call shows which use went wrong.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.diagnose.inputs import Call, Formats, Location
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.nested import tensors_in
from narrowcast.precision.plan.module_plan import Role

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

    A use belongs to the innermost running module that has the weight: torch's attention never calls
    its last layer.
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
        # Past torch's own door, which takes nothing but parameters.
        slots: dict[str, Any] = self.module._parameters
        slots[self.key] = value


def _alias(weight: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunction():  # regions would look at every call
        return weight.view_as(weight)


def _fits_itself(weight: nn.Parameter) -> bool:
    """Return whether a gradient fits the weight's own format, which that of an alias has."""
    return weight.dtype != torch.float16 or weight.grad_dtype in (None, torch.float16)


@dataclass(frozen=True)
class Seen:
    """What was seen at a place."""

    location: Location
    amax: float
    """The largest magnitude; NaN where any number was NaN."""
    judged: float
    """The largest number where only that counts, because infinities below may be a mask's."""
    flows: bool = True
    """Whether it comes from a weight: a gradient flows back through it."""
    summed: bool = False
    """Whether it is the gradient of a weight whose uses were each looked at before."""

    @property
    def is_bad(self) -> bool:
        """Whether something was not finite, or so large that it soon will not be."""
        return not self.judged <= self.location.limit


class Recorder:
    """Records the passes of a model between `watching()` and its end."""

    def __init__(self, model: nn.Module, formats: Formats) -> None:
        self._model, self._formats = model, formats
        self._seen: list[tuple[Location, Tensor, bool, bool]] = []
        self._in_forward, self._depth = False, 0
        self.calls: list[Call] = []
        """Calls of modules from outside the model, in these passes."""
        self._versions: dict[int, int] = {}
        self._handles: list[Any] = []

    @contextlib.contextmanager
    def watching(self, several: Collection[nn.Parameter] = ()) -> Iterator[None]:
        """Watch passes, after existing hooks; weights with `several` uses are seen per use."""
        holders = self._formats.holders(self._model)
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._see_inputs, name), with_kwargs=True),
                module.register_forward_hook(partial(self._see_outputs, name)),
            ]
        for parameter, name in holders.items():
            if parameter.requires_grad:
                see = partial(self._see, self._formats.location(name, "grad_weight"))
                hook = partial(see, summed=parameter in several)
                self._handles.append(parameter.register_hook(hook))
        self._depth, self.calls = 0, []
        try:
            with per_use_aliases(self._model, several, self._see_use):
                yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Hold this over a forward pass: one that activation checkpointing makes later is known."""
        self._see_weights()
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def see_loss(self, loss: Tensor) -> None:
        self._see(Location("", "loss"), loss)

    def read(self) -> list[Seen]:
        """Return what was seen since the last call. Synchronises with the device."""
        seen, self._seen = self._seen, []
        if not seen:
            return []
        numbers = torch.stack([number for _, number, *_ in seen]).tolist()
        pairs = zip(seen, numbers, strict=True)
        return [Seen(position, *both, *lines) for (position, _, *lines), both in pairs]

    def _see_weights(self) -> None:
        """Look at the weights that have changed since they were last looked at."""
        for parameter, name in self._formats.holders(self._model).items():
            if self._versions.get(id(parameter)) != parameter._version:
                self._versions[id(parameter)] = parameter._version
                self._see(self._formats.location(name, "weight"), parameter)

    def _see_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._in_forward:
            if self._depth == 1:
                self.calls.append((module, name, args, kwargs))
            for tensor in tensors_in((args, kwargs)):
                self._see_forward(name, "input", tensor)

    def _see_outputs(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        location = self._formats.location(name, "grad_output")
        for tensor in tensors_in(output):
            if self._in_forward:
                self._see_forward(name, "output", tensor)
            if tensor.requires_grad:
                # A module that is not planned may return the product of its own code.
                in_fp16 = not location.format and tensor.dtype == torch.float16
                seen_at = replace(location, format="fp16") if in_fp16 else location
                self._handles.append(tensor.register_hook(partial(self._see, seen_at)))

    def _see_use(self, name: str, gradient: Tensor) -> None:
        self._see(self._formats.use_location(name), gradient)

    def _see_forward(self, name: str, role: Role, tensor: Tensor) -> None:
        location = self._formats.location(name, role)
        # What no gradient flows through may be a mask, which holds infinities of its own, below;
        # and a module that makes no product may be what masks, or the softmax after it.
        flows = tensor.requires_grad or not torch.is_grad_enabled()
        self._see(location, tensor, from_above=not flows or not location.format, flows=flows)

    def _see(
        self,
        location: Location,
        tensor: Tensor,
        *,
        from_above: bool = False,
        flows: bool = True,
        summed: bool = False,
    ) -> None:
        values = local_part(tensor)
        if values.is_sparse:
            values = values._values()
        if values.numel() == 0 or not values.is_floating_point():
            return
        if values.dtype.itemsize == 1:
            values = values.float()  # torch finds no maximum in 8 bits
        # Regions would look at every call.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            low, high = (value.float() for value in torch.aminmax(values))
            amax = torch.maximum(-low, high)
            both = torch.stack([amax, high if from_above else amax])
            self._seen.append((location, both, flows, summed))
