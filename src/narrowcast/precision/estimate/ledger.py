"""What a step allocates and frees: counted by storage, and played to a model of the allocator."""

import bisect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALLEST = 512
"""Bytes to whose multiples torch's allocator rounds on a GPU."""
_SMALL, _SMALL_SEGMENT = 2**20, 2**21
_LARGE_FROM, _LARGE_SEGMENT, _LARGE_ROUND = 10 * 2**20, 20 * 2**20, 2**21


@dataclass
class Block:
    """One storage: its bytes, when it was made and by whom."""

    size: int
    phase: str
    module: str
    role: str = ""


@dataclass(frozen=True)
class Op:
    """One operation of the device: what bounds its time."""

    name: str
    phase: str
    flops: int
    bytes: int
    dtype: torch.dtype | None
    module: str


@dataclass(frozen=True)
class Call:
    """One operation: the storages that it reads and makes, by their place."""

    name: str
    phase: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    changes: tuple[int, ...]
    """Storages that it writes to."""
    pointwise: bool
    end: int
    """Place of the first event after it."""
    op: int | None = None
    """Place of its entry among the operations, for their time."""
    padded: tuple[tuple[int, int], ...] = ()
    """Operands of odd sizes, and their bytes with the sizes that tensor cores take."""


@final
class Ledger(TorchDispatchMode):
    """Sees every operation on stand-ins, and notes what it allocates."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "begin"
        self.blocks: list[Block] = []
        self.events: list[int] = []
        """Place of a block that is made, or minus that less one when it is freed."""
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self._live: dict[int, tuple[Any, int]] = {}
        self._module = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note the storages that are new."""
        with torch._C.DisableTorchFunction():
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device is not None and torch.device(device).type not in ("meta", "cpu"):
                kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
            held = self._temporaries(func, args, kwargs)
            result = _laid_out(func, args, func(*args, **kwargs))
            first = len(self.blocks)
            self._note(func, args, kwargs, result)
            self._call(func, args, kwargs, range(first, len(self.blocks)))
            self.events += [-1 - index for index in held]
            return result

    def hold(self, tensor: Tensor, role: str) -> None:
        """Count a tensor that was there before, or name the role of a known one."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            index = self._index(storage)
            if index is None:
                index = self._enter(storage)
            self.blocks[index].role = role

    def _index(self, storage: Any) -> int | None:
        known = self._live.get(storage._cdata)
        return None if known is None else known[1]

    def _enter(self, storage: Any) -> int:
        index, key = len(self.blocks), storage._cdata
        self.blocks.append(Block(storage.nbytes(), self.phase, self._module()))
        self.events.append(index)
        events, live = self.events, self._live

        def gone(reference: Any) -> None:
            if live.get(key, (None, -1))[0] is reference:
                del live[key]
            events.append(-1 - index)

        live[key] = weakref.ref(storage, gone), index
        return index

    def _temporaries(self, func: Any, args: Any, kwargs: Any) -> list[int]:
        """Enter what an operation allocates beside its results; return the places."""
        declared = TEMPORARIES.get(func._schema.name)
        if declared is None:
            return []
        first = len(self.blocks)
        for size in declared(*args, **kwargs):
            self.blocks.append(Block(size, self.phase, self._module(), "temporaries"))
        held = list(range(first, len(self.blocks)))
        self.events += held
        return held

    def launched(self, tensors: Sequence[Any]) -> None:
        """Note a kernel of our own that is not an operator: it may write to any of its tensors."""
        with torch._C.DisableTorchFunction():
            places = self._places(tensors)
            if self.phase in ("forward", "backward"):
                self.calls.append(
                    Call("launch", self.phase, places, (), places, False, len(self.events))
                )

    def _places(self, values: Any) -> tuple[int, ...]:
        storages = (t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor))
        places = dict.fromkeys(self._index(each) for each in storages)
        return tuple(each for each in places if each is not None)

    def _call(self, func: Any, args: Any, kwargs: Any, outputs: range) -> None:
        schema = func._schema
        if self.phase not in ("forward", "backward") or not (outputs or schema.is_mutable):
            return
        written = [
            args[i] if i < len(args) else kwargs.get(each.name)
            for i, each in enumerate(schema.arguments if schema.is_mutable else ())
            if each.alias_info is not None and each.alias_info.is_write
        ]
        self.calls.append(
            Call(
                name=schema.name,
                phase=self.phase,
                inputs=self._places((args, kwargs)),
                outputs=tuple(outputs),
                changes=self._places(written),
                pointwise=torch.Tag.pointwise in func.tags,
                end=len(self.events),
                op=len(self.ops) - 1,
                padded=tuple(self._padded(schema.name, args)),
            )
        )

    def _padded(self, name: str, args: Any) -> Iterator[tuple[int, int]]:
        for each in {"aten::mm": args[:2], "aten::addmm": args[1:3]}.get(name, ()):
            even = 16 // each.itemsize
            shape = [-(-size // even) * even for size in each.shape]
            place = self._index(each.untyped_storage())
            if shape != list(each.shape) and place is not None:
                yield place, math.prod(shape) * each.itemsize

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_meta]
        new = False
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live and storage.nbytes():
                self._enter(storage)
                new = True
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if new or func._schema.is_mutable:
            flops = FLOPS.get(func.overloadpacket, lambda *_, **__: 0)
            try:
                count = int(flops(*args, **kwargs, out_val=result))
            except Exception:  # noqa: BLE001  # torch's table has formulas for a few signatures only
                count = 0
            moved = sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
            dtype = next((t.dtype for t in inputs if t.is_floating_point()), None)
            if func._schema.name == "narrowcast::linear_cross_entropy":
                count, dtype = _loss_flops(*args), args[5]
            self.ops.append(Op(func._schema.name, self.phase, count, moved, dtype, self._module()))


def _laid_out(func: Any, args: Any, result: Any) -> Any:
    """Return results in the layout of a device: the meta device overlooks that of the weight."""
    if func._schema.name == "aten::convolution":
        return _like_weight(result, args[1])
    if func._schema.name == "aten::convolution_backward":
        grad_x, *rest = result
        return (_like_weight(grad_x, args[2]), *rest)
    return result


def _like_weight(result: Any, weight: Tensor) -> Any:
    last = torch.channels_last
    if result is None or not _is_last(weight) or result.is_contiguous(memory_format=last):
        return result
    return torch.empty_like(result, memory_format=last)


def _is_last(weight: Tensor) -> bool:
    """Return whether a weight has channels last, by its strides where its shape allows both."""
    from torch._prims_common import suggest_memory_format

    return weight.dim() == 4 and suggest_memory_format(weight) == torch.channels_last


def _flops() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    return flop_registry


FLOPS = _flops()


def _loss_flops(hidden: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return the operations of the fused loss: logits, and the gradients that are wanted."""
    needs = rest[4]
    count: int = 2 * hidden.numel() * weight.shape[0] * (1 + needs[0] + needs[1])
    return count


def _chunked_loss(hidden: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> Iterator[int]:
    """Return what the fused loss holds for a moment: the logits of one chunk, and a cast weight."""
    from narrowcast.precision.fused.chunked_pass import even_chunks, filled_columns

    dtype, chunk, (rows, columns) = rest[2], rest[7], (hidden.shape[0], weight.shape[0])
    filled = filled_columns(columns)
    yield min(chunk or even_chunks(rows, filled, dtype), rows) * filled * dtype.itemsize
    if weight.dtype != dtype or filled != columns:
        yield filled * weight.shape[1] * dtype.itemsize


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> Iterator[int]:
    """Return the fp32 sums of the gradient of queries."""
    batch, heads, length, width = query.shape
    padded = -(-length // 128) * 128
    yield batch * heads * padded * (-(-width // 32) * 32) * 4 + batch * heads * padded * 4


def _convolution(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Iterator[int]:
    """Return the copies that cuDNN takes of images whose layout is not that of the weight."""
    yield from _relaid(x, like=weight)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any
) -> Iterator[int]:
    yield from _relaid(grad, x, like=weight)


def _relaid(*tensors: Tensor, like: Tensor) -> Iterator[int]:
    if _is_last(like):
        for each in tensors:
            if not each.is_contiguous(memory_format=torch.channels_last):
                yield each.numel() * each.itemsize


TEMPORARIES: dict[str, Callable[..., Iterator[int]]] = {
    "narrowcast::linear_cross_entropy": _chunked_loss,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}
"""Bytes that an operation allocates beside its results, by its name."""


@dataclass(frozen=True)
class Peak:
    """The largest amount of memory at once."""

    allocated: int
    reserved: int
    roles: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)


def rounded(size: int, *, gpu: bool) -> int:
    """Return what an allocation takes."""
    return -(-size // SMALLEST) * SMALLEST if gpu else size


def find_peak(blocks: Sequence[Block], events: Sequence[int], *, gpu: bool, after: int = 0) -> Peak:
    """Play allocations to the allocator of a device; return the peak from event `after` on."""
    allocator = Caching() if gpu else None
    now = most = at = reserved = 0
    places: dict[int, tuple[int, int]] = {}
    for number, event in enumerate(events):
        if event >= 0:
            size = blocks[event].size
            if allocator is None:
                taken = size
            else:
                places[event] = allocator.take(size)
                taken = places[event][1]
            now += taken
        else:
            index = -1 - event
            if allocator is None:
                now -= blocks[index].size
            elif index in places:
                now -= places[index][1]
                allocator.give(*places.pop(index))
        if number >= after and now > most:
            most, at = now, number
        if allocator is not None:
            reserved = max(reserved, allocator.reserved)
    roles: dict[str, int] = {}
    modules: dict[str, int] = {}
    held: set[int] = set()
    for event in events[: at + 1]:
        if event >= 0:
            held.add(event)
        else:
            held.discard(-1 - event)
    for index in held:
        block = blocks[index]
        size = rounded(block.size, gpu=gpu)
        roles[block.role] = roles.get(block.role, 0) + size
        if block.role == "activations":
            modules[block.module] = modules.get(block.module, 0) + size
    return Peak(most, max(reserved, most), roles, modules)


@final
class Caching:
    """torch's caching allocator on one stream: segments, best fit, splits and merges."""

    def __init__(self) -> None:
        self.reserved = 0
        self._next = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks of the small and the large pool: size and address, sorted."""
        self._ends: dict[int, tuple[int, bool]] = {}
        """Where a free block ends: its address and pool."""
        self._begins: dict[int, tuple[int, bool]] = {}
        self._edges: set[int] = set()
        """Where segments begin, over which nothing is merged."""
        self._pool: dict[int, bool] = {}

    def take(self, size: int) -> tuple[int, int]:
        """Return an address and the bytes that a block of a size takes."""
        size = max(-(-size // SMALLEST) * SMALLEST, SMALLEST)
        small = size <= _SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1))
        if at < len(free):
            taken, address = free.pop(at)
            self._forget(address, taken)
        else:
            taken = (
                _SMALL_SEGMENT
                if small
                else _LARGE_SEGMENT
                if size < _LARGE_FROM
                else -(-size // _LARGE_ROUND) * _LARGE_ROUND
            )
            address = self._next
            self._next += taken
            self._edges |= {address, self._next}
            self.reserved += taken
        left = taken - size
        if left >= SMALLEST if small else left > _SMALL:
            self._keep(address + size, left, small)
            taken = size
        self._pool[address] = small
        return address, taken

    def give(self, address: int, size: int) -> None:
        """Free a block, and merge it with free neighbours of its segment."""
        small, end = self._pool.pop(address), address + size
        if end not in self._edges and end in self._begins:
            more, _ = self._begins[end]
            self._free[small].remove((more, end))
            self._forget(end, more)
            size += more
        if address not in self._edges and address in self._ends:
            before, _ = self._ends[address]
            length = address - before
            self._free[small].remove((length, before))
            self._forget(before, length)
            address, size = before, size + length
        self._keep(address, size, small)

    def _keep(self, address: int, size: int, small: bool) -> None:
        bisect.insort(self._free[small], (size, address))
        self._begins[address] = size, small
        self._ends[address + size] = address, small

    def _forget(self, address: int, size: int) -> None:
        del self._begins[address], self._ends[address + size]
