"""Regions: the format in which products run that no module of ours makes.

Attention, `@`, einsum, convolutions and recurrent layers are reached through a region around the
forward pass, entered for the whole model and again, with another format, by modules that are an
exception. A native region is torch's autocast; an emulated one a function mode inside it, which
`torch.compile` traces through like the code it covers, and which heeds what `torch.autocast` a user
nests in it: switched off, that is an island of plain torch.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.numerics import plain_format
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.emulated import TRACED_RIGHTLY
from narrowcast.precision.products.modes import EmulatedProducts, RoundedReductions


@dataclass(frozen=True)
class Region:
    """A format for functional products, and whether the device multiplies it or we emulate it."""

    format_name: str
    emulated: bool
    device_type: str
    reduce: str = "fp32"
    """The format of sums, softmax and losses."""

    @classmethod
    def of(cls, plan: Plan) -> "Region":
        """Return the region of a whole planned model."""
        device_type = torch.device(plan.hardware.device).type
        return cls(plan.policy.functional, plan.emulated, device_type, plan.policy.reduce)

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the region, in place of any around it: hold it over a forward pass and its loss."""
        more = self.emulated or self.reduce != "fp32" or self.format_name == "tf32"
        return _entered(self) if more else self.autocast()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Enter torch's autocast of this region, which is none where it is not of 16 bits."""
        dtype = plain_format(self.format_name).dtype if self.is_of_16_bits else None
        return torch.autocast(self.device_type, dtype=dtype, enabled=self.is_of_16_bits)

    def products(self) -> contextlib.AbstractContextManager[Any]:
        """Enter what is left of the region once its autocast is entered, or not to be.

        A backward pass has no autocast but what is entered in it: by activation checkpointing, and
        by `torch.amp.custom_bwd`.
        """
        heeded = self.device_type if self.is_of_16_bits else None
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.emulated:
            context = EmulatedProducts(plain_format(self.format_name), autocast=heeded)
        elif self.format_name == "tf32":
            context = tf32_products()
        if self.reduce == "fp32":
            return context
        stack = contextlib.ExitStack()
        stack.enter_context(context)
        stack.enter_context(RoundedReductions(plain_format(self.reduce), autocast=heeded))
        return stack

    @property
    def is_plain(self) -> bool:
        """True where nothing is done to products: those of fp32, by the device."""
        return self.format_name == "fp32" and not self.emulated

    @property
    def is_of_16_bits(self) -> bool:
        """Whether torch's autocast is on inside, and off only on an island."""
        return self.format_name in ("bf16", "fp16")

    @property
    def is_native_16_bits(self) -> bool:
        """Whether what leaves its products is of 16 bits, and not of fp32 with as few digits."""
        return self.is_of_16_bits and not self.emulated


@contextlib.contextmanager
def _entered(region: Region) -> Iterator[None]:
    with region.autocast(), region.products():
        if torch.compiler.is_compiling() or not TRACED_RIGHTLY:
            yield
            return
        with _backward_without_autocast():
            yield


@contextlib.contextmanager
def _backward_without_autocast() -> Iterator[None]:
    """Let the compiler make backward passes of what it finds inside the block without autocast.

    By default they have that of the forward pass, in which gradients of emulated products, that
    torch computes, would be native ones.
    """
    config = torch._functorch.config
    before = config.backward_pass_autocast
    config.backward_pass_autocast = "off"
    try:
        yield
    finally:
        config.backward_pass_autocast = before


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Let fp32 products on NVIDIA GPUs run in tf32 inside the block."""
    switches: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    ]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
