"""Activation checkpointing: blocks that a backward pass computes again from their inputs.

Uses `torch.utils.checkpoint` without reentrance. The second pass drops its writes to buffers, so a
running mean moves once.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.fp8.delayed import AmaxHistories, AmaxHistory
from narrowcast.precision.nested import tensors_in
from narrowcast.precision.plan.memory import MemoryPlan
from narrowcast.precision.swap import Transparent, swap

_Place = tuple[dict[str, Tensor | None], str]
"""Where a buffer lives: a module may put a new tensor in its place."""


@final
class Once:
    """Knows which buffers a block's passes write, and keeps what they held before one."""

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self._places: list[_Place] = [(m._buffers, name) for m in modules for name in m._buffers]
        self._norms = [
            (i, module)
            for module in modules
            if isinstance(module, _NormBase)
            for i, (holder, _) in enumerate(self._places)
            if holder is module._buffers
        ]
        self._written: set[int] | None = None
        """Those that any pass has written; None before the first."""
        result = (module.__dict__.get("nc_history") for module in modules)
        self._histories = next((h.whole for h in result if isinstance(h, AmaxHistory)), None)

    def before(self) -> "Again":
        """Store the buffers before a pass: all of them at first, then what is written."""
        places = range(len(self._places)) if self._written is None else sorted(self._written)
        held = {i: b.detach().clone() for i in places if (b := self._held(i)) is not None}
        return Again(self._places, held, self._marks(), self._histories)

    def after(self, again: "Again") -> None:
        """Take note of what a pass has written."""
        # torch does not count what a batch norm writes.
        written = {i for i, norm in self._norms if norm.training}
        marks = zip(self._marks(), again.marks, strict=True)
        written |= {i for i, (now, then) in enumerate(marks) if now != then}
        self._written = (self._written or set()) | written
        again.keep_only(self._written)

    def _held(self, i: int) -> Tensor | None:
        holder, name = self._places[i]
        return holder.get(name)

    def _marks(self) -> list[tuple[int, int]]:
        held = [self._held(i) for i in range(len(self._places))]
        return [(id(b), 0 if b is None or b.is_inference() else b._version) for b in held]


@final
class Again:
    """Holds over a pass that is made again: buffers as before the first, and nothing noted."""

    def __init__(
        self,
        places: list[_Place],
        held: dict[int, Tensor],
        marks: list[tuple[int, int]],
        histories: AmaxHistories | None,
    ) -> None:
        self._places, self._before, self.marks = places, held, marks
        self._histories = histories
        self._now: list[tuple[_Place, Tensor | None]] = []
        self._noted: Tensor | None = None

    def keep_only(self, written: set[int]) -> None:
        """Drop saved values of buffers that no pass writes."""
        self._before = {i: value for i, value in self._before.items() if i in written}

    def __enter__(self) -> None:
        """Put copies of what buffers held in their place."""
        for i, value in self._before.items():
            holder, name = self._places[i]
            self._now.append((self._places[i], holder.get(name)))
            holder[name] = value.clone()
        if self._histories is not None:
            # As `.data`: autograd may be keeping it for a backward pass.
            self._noted = self._histories.cast_stats.data.clone()

    def __exit__(self, *_: Any) -> None:
        """Put the buffers themselves back, untouched."""
        while self._now:
            (holder, name), buffer = self._now.pop()
            holder[name] = buffer
        if self._histories is not None and self._noted is not None:
            with torch.no_grad():
                self._histories.cast_stats.data.copy_(self._noted)
            self._noted = None


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What blocks of transformers are given to keep keys in, which a second pass would add to again."""
PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "narrowcast::packed_attention",
    }
)
"""What `selective` keeps the results of: all that takes longer the wider a model is, squared."""


class Recomputed(Transparent):
    """A block whose backward pass begins by computing it again."""

    nc_once: Once
    nc_selective: bool = False
    nc_draws: bool = False
    """Whether a pass of it has drawn random numbers on its GPU."""

    # Not `forward`: a block that is compiled by itself is computed again as it is compiled.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and keep of it what the second pass needs."""
        stored = _without_cache(self, kwargs) if torch.is_grad_enabled() else None
        if stored is None:
            return super().__call__(*args, **kwargs)
        return _recomputed(self, super().__call__, args, stored)


def recompute_blocks(model: nn.Module, plan: MemoryPlan) -> None:
    """Checkpoint the blocks of a plan if it requests it."""
    if plan.requested.activation_checkpointing != "none":
        selective = plan.requested.activation_checkpointing == "selective"
        for name in plan.blocks:
            block = model.get_submodule(name)
            swap(block, Recomputed, nc_once=Once(block), nc_selective=selective, nc_draws=False)


def _without_cache(block: Recomputed, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return keyword arguments without empty transformers caches; None if a cache is used."""
    caches = [name for name in CACHES if kwargs.get(name) is not None]
    if caches and not block.training:
        return None
    switched = {"use_cache": False} if kwargs.get("use_cache") else {}
    return {**kwargs, **dict.fromkeys(caches), **switched} if caches or switched else kwargs


@_disable_dynamo
def _recomputed(
    block: Recomputed, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    again = block.nc_once.before()
    device = _first_gpu(args, kwargs)
    captured = device is not None and is_capturing(device)
    if captured and block.nc_draws:
        raise UnsupportedError(
            "cuda_graph=true does not work with recomputed blocks that use random numbers "
            "(dropout), because a CUDA graph cannot reproduce them. Write cuda_graph=false, a "
            "dropout of 0, or memory.activation_checkpointing=none."
        )
    drawn = None if device is None or captured else _drawn(device)
    # A second pass ends where all that is needed is there, by an exception: a compiled block would
    # then not leave the autocast regions that its graph has entered, for the rest of the process.
    with set_checkpoint_early_stop(block._compiled_call_impl is None):
        result = checkpoint(
            call,
            *args,
            use_reentrant=False,
            preserve_rng_state=not captured,
            context_fn=lambda: _contexts(again, selective=block.nc_selective),
            **kwargs,
        )
    if device is not None and drawn is not None and _drawn(device) != drawn:
        block.nc_draws = True
    block.nc_once.after(again)
    return result


def _contexts(again: Again, *, selective: bool) -> tuple[Any, Any]:
    """Return what holds over the first pass of a block, and over the second."""
    if not selective:
        return contextlib.nullcontext(), again
    first, second = create_selective_checkpoint_contexts(_save_policy)
    return first, _Both(again, second)


def _save_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is slow to compute; but what draws random numbers must draw them again."""
    name = op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else ""
    if name not in PRODUCTS or _dropout(op, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _dropout(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            inputs = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(inputs or 0.0)
    return 0.0


@final
class _Both:
    """Two contexts as one that can be entered more than once."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        try:
            self._inner.__exit__(*raised)
        finally:
            self._outer.__exit__(*raised)


def _first_gpu(args: Any, kwargs: Any) -> torch.device | None:
    matched = (t.device for t in tensors_in((args, kwargs)) if t.is_cuda)
    return next(matched, None)


def _drawn(device: torch.device) -> int:
    """Return how many random numbers a GPU's generator has given, as the host knows."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch.cuda.default_generators[index].get_offset())
