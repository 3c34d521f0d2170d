"""A module that samples what passes through it.

Eager passes are sampled only if they are read; compiled and captured ones always are.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.statistics.sampling import take, tap
from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.swap import Probe

ATTRIBUTES = (
    "nc_switch",
    "nc_offsets",
    "nc_input",
    "nc_output",
    "nc_grad_output",
    "nc_unseen",
)


@dataclass
class Switch:
    """Whether samples are taken now, for all modules of a model."""

    on: bool = True


class MonitoredModules(Probe):
    """The mixin that makes a module such a one."""

    nc_switch: Switch
    nc_offsets: Tensor
    nc_input: Tensor | None
    nc_output: Tensor | None
    nc_grad_output: Tensor | None
    nc_unseen: tuple[str, ...]
    """Roles of which its last pass had nothing to look at."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does, and copy samples of the first tensors in and out."""
        if not self._nc_looks():
            return super().forward(*args, **kwargs)
        x = None if self.nc_input is None else _first((args, kwargs))
        if x is not None:
            self.nc_sees(x)
        output = super().forward(*args, **kwargs)
        return output if self.nc_output is None else self._nc_looked_at(output)

    def nc_sees(self, x: Tensor) -> None:
        """Copy a sample of the input."""
        if self.nc_input is not None and self._nc_looks():
            take(x, self.nc_input, self.nc_offsets)

    def _nc_looks(self) -> bool:
        # A compiler that asked the switch would compile again whenever it moves.
        on = torch.compiler.is_compiling() or self.nc_switch.on or is_capturing()
        return on and torch.is_grad_enabled()

    def _nc_looked_at(self, output: Any) -> Any:
        assert self.nc_output is not None
        assert self.nc_grad_output is not None
        first = _first(output)
        unseen = () if first is not None else ("output",)
        if first is not None:
            take(first, self.nc_output, self.nc_offsets)
        if first is None or not first.requires_grad:
            unseen = (*unseen, "grad_output")
        else:
            tapped = tap(first, self.nc_grad_output, self.nc_offsets)
            if tapped is not first:
                output = map_tensors(output, lambda each: tapped if each is first else each)
        if self.nc_unseen != unseen:  # a compiler need not know that it could have been
            self.nc_unseen = unseen
        return output


@contextlib.contextmanager
def probes_off(model: nn.Module) -> Iterator[None]:
    """Take no samples from eager passes inside the block."""
    switches = [each.nc_switch for each in model.modules() if isinstance(each, MonitoredModules)]
    before = [switch.on for switch in switches]
    for switch in switches:
        switch.on = False
    try:
        yield
    finally:
        for switch, on in zip(switches, before, strict=True):
            switch.on = on


def _first(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in what goes into a module or comes out of it."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, tuple | list):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    else:
        return None
    for item in items:
        result = _first(item)
        if result is not None:
            return result
    return None
