"""Launch Triton kernels: on CUDA devices, or as numpy code with TRITON_INTERPRET=1.

One launch covers many tensors, with one program per chunk. The chunk table says which part of which
tensor a program has, the address table where the tensors are.
"""

import functools
import importlib.util
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.cuda_driver import driver_launch, is_set

_ALIGNED = 16
"""Bytes; Triton compiles another kernel for an address, or a size, that is no multiple of it."""
_INT32 = 2**31
PLAIN = frozenset({Tensor, nn.Parameter})
"""Types of tensors that are one piece of memory; any other may be several, or stand for one."""
NO_MEMORY = -2
"""Number of the device of tensors that have no memory, in a dry run: nothing is launched."""
_INTERPRETING = threading.Lock()
"""Triton's interpreter replaces functions and notes its program for the whole process."""
_KEPT = 1024
"""Launches of one kernel that are known by their very sizes; more are found by what they share."""


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_reason(device: torch.device) -> str:
    """Return why kernels cannot run on a device; empty if they can."""
    if not _triton_is_installed():
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton has no kernels for {device.type}"
    return ""


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_capturing(device: torch.device | None = None) -> bool:
    """Return whether a CUDA graph is being captured, on `device` if that is known."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    # Not of `torch.cuda` itself, which answers a rehearsal of a capture as if it were one.
    return on_gpu and torch.cuda.graphs.is_current_stream_capturing()


def is_traced(*tensors: Tensor) -> bool:
    """Return whether a compiler, dispatch mode or tensor subclass has to see the operators.

    Calling an operator takes the host as long as a launch.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton's where its first argument is; Triton itself asks no tensor."""
    device = args[0].get_device()
    if device == NO_MEMORY:
        return
    if device < 0:
        with _INTERPRETING:
            kernel[grid](*args, **options)
        return
    if device == torch._C._cuda_getDevice():
        kernel[grid](*args, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


@final
class Launcher:
    """Launches one Triton kernel without the 40 to 60 µs that Triton takes on the host per launch.

    Arguments are tensors, then sizes, then constants. Triton's debug switches count as at the first
    launch.
    """

    def __init__(self, kernel: Any, *, views: Mapping[int, torch.dtype] | None = None) -> None:
        """Take a kernel, and as what it reads tensors in fp8 by their place among its arguments."""
        self._kernel = kernel
        self._views = views or {}
        self._interpreted = interpreted()  # as the kernel is, since it was defined
        self._by_sizes: dict[Any, _KernelLaunch] = {}
        self._compiled: dict[Any, _KernelLaunch] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch it where its tensors are; `options` are Triton's, such as the number of warps."""
        if self._interpreted:
            with _INTERPRETING:
                self._kernel[grid](*self._viewed(tensors), *sizes, *constants, **options)
            return
        device = tensors[0].get_device()
        if device != torch._C._cuda_getDevice():
            _check_devices(device, tensors)
            with torch.cuda.device(device):
                self(grid, tensors, sizes, constants, **options)
            return
        addresses = [each.data_ptr() for each in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        aligned: bool | tuple[bool, ...] = bits % _ALIGNED == 0
        if not aligned or not all(addresses):
            _check_devices(device, tensors)
            self._viewed(tensors)  # which no address will do for
            aligned = tuple([each % _ALIGNED == 0 for each in addresses])
        dtypes = tuple([each.dtype for each in tensors])
        key = device, constants, sizes, dtypes, aligned, *options.items()
        known = self._by_sizes.get(key)
        if known is None:
            _check_devices(device, tensors)
            known = self._for_new_sizes(key, grid, tensors, sizes, constants, options)
        if known is not None:
            known(grid, addresses, sizes, constants)

    def _for_new_sizes(
        self,
        key: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> "_KernelLaunch | None":
        """Return the launch for new sizes, or None if Triton compiled and launched it."""
        alike = key[0], constants, *options.items(), *specialised(tensors, sizes)
        known = self._compiled.get(alike)
        if known is not None:
            if len(self._by_sizes) >= _KEPT:  # each sequence may have a length of its own
                self._by_sizes.clear()
            self._by_sizes[key] = known
            return known
        from triton.compiler import CompiledKernel

        inputs = *self._viewed(tensors), *sizes, *constants
        result = self._kernel.run(*inputs, grid=grid, warmup=True, **options)  # compiles it
        if isinstance(result, CompiledKernel):
            launch = self._compiled[alike] = self._by_sizes[key] = _KernelLaunch(result)
            return launch
        self._kernel[grid](*inputs, **options)  # a hook of Triton's has it in hand
        return None

    def _viewed(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._views:
            return tensors
        seen = [
            each.view(self._views[i]) if i in self._views and each.dtype in _FP8 else each
            for i, each in enumerate(tensors)
        ]
        return tuple(seen)


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@final
class _KernelLaunch:
    """Launches compiled Triton kernels with CUDA's launch call, or with Triton's if needed."""

    def __init__(self, compiled: Any) -> None:
        from triton import knobs

        self._compiled, self._hooks = compiled, knobs.runtime
        self._direct = driver_launch(compiled)

    def __call__(
        self,
        grid: tuple[int, int, int],
        addresses: list[int],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        hooks = self._hooks
        message = is_set(hooks.launch_enter_hook) or is_set(hooks.launch_exit_hook)
        if message or self._direct is None:  # a profiler, say
            self._compiled[grid](*addresses, *sizes, *constants, stream=stream)
            return
        self._direct(grid, stream, [*addresses, *sizes])


def _check_devices(device: int, tensors: tuple[Tensor, ...]) -> None:
    """Raise if a tensor is on another device or has no memory."""
    for each in tensors:
        if device < 0 or each.get_device() != device or (each.numel() and not each.data_ptr()):
            raise UnsupportedError(
                f"Kernel inputs must be on {tensors[0].device}, got a {type(each).__name__} on "
                f"{each.device}. Move the whole layer to one GPU."
            )


def specialised(tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a key that differs whenever Triton would compile another kernel."""
    aligned = [each.data_ptr() % _ALIGNED == 0 for each in tensors]
    kinds = [(n % _ALIGNED == 0, n == 1, -_INT32 <= n < _INT32) for n in sizes]
    return *[each.dtype for each in tensors], *aligned, *kinds


ALIGNMENT = 16
"""Bytes of the widest load, which needs a tensor with address and length in multiples of it."""
_CODES = {torch.int64: "q", torch.float64: "d"}


def chunk_table(sizes: Sequence[int], tensors: Sequence[int], *, chunk: int) -> Tensor:
    """Return one row per chunk of the chosen tensors: tensor, number of the chunk, elements left.

    The table is int32 of shape (chunks, 4), on the host.
    """
    rows = [_rows(t, sizes[t], chunk) for t in tensors]
    return torch.cat([torch.zeros((0, 4), dtype=torch.int32), *rows])


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a table of the host's on the device, without waiting for the copy."""
    if device.type != "cuda":
        return table.to(device)
    # torch gives pinned memory to nobody else before the copy from it is done.
    return table.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class TensorAddresses:
    """Where tensors are and what: looked up once for all launches of a step that walk over them."""

    tensors: Sequence[Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]
    table: Tensor | None = None
    """The addresses on the device, in memory that each replay of a captured step rewrites."""

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        return are_same(tensors, self.tensors)


class HostTable:
    """Numbers that the host knows and kernels read; written without waiting, where they changed."""

    def __init__(self, length: int, device: torch.device, *, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(length, dtype=dtype, device=device)
        self._written: list[float] = [0] * length
        self._stored: list[tuple[list[float], Tensor]] = []
        # Two graphs are captured of a step, and a gradient that has to be copied lies elsewhere in
        # each: they must not read one another's addresses.
        self._spares = [self._pinned(), self._pinned()]

    def write(self, numbers: Sequence[float], *, replayed: bool = True) -> None:
        """Write numbers to the table if they changed. A captured graph writes them in every replay.

        With `replayed=False` a capture does not write, so they must be in the table before it.
        """
        capturing = is_capturing(self.tensor.device)
        if numbers == self._written and not (capturing and replayed):
            return
        if capturing and not replayed:
            raise UnsupportedError(
                "Optimizer settings changed during a CUDA graph capture, which would fix them. "
                "Set them before the capture begins."
            )
        self._written = list(numbers)
        host = self._as_tensor(numbers)
        if capturing:
            host = self.stored_for_replays(numbers)
        elif self.tensor.is_cuda:
            # torch gives pinned memory to nobody else before the copy from it is done.
            host = host.pin_memory()
            self.make_room()
        self.tensor.copy_(host, non_blocking=True)

    def has_replayed(self) -> None:
        """Forget the content of the table: a replayed graph has overwritten it."""
        self._written = []

    def make_room(self) -> None:
        """Allocate spare memory for a capture, which cannot allocate any."""
        self._spares += [self._pinned() for _ in range(2 - len(self._spares))]

    def stored_for_replays(self, numbers: Sequence[float]) -> Tensor:
        """Return memory that keeps these numbers for replays; a capture cannot allocate any.

        If none is spare, it reuses that of the graph before the last, which was captured again.
        """
        for written, host in self._stored:
            if written == list(numbers):
                return host
        if self._spares:
            host = self._spares.pop(0)
        else:
            host = self._stored.pop(max(0, len(self._stored) - 2))[1]
        host.copy_(self._as_tensor(numbers))
        self._stored.append((list(numbers), host))
        return host

    def _as_tensor(self, numbers: Sequence[float]) -> Tensor:
        """Return numbers as a tensor of the host's: torch takes longer to read a list of them."""
        return torch.frombuffer(array(_CODES[self.tensor.dtype], numbers), dtype=self.tensor.dtype)

    def _pinned(self) -> Tensor:
        return torch.empty(
            self.tensor.shape, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda
        )


def are_same(matches: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether these are the very same objects; tensors have another meaning of "equal"."""
    return len(matches) == len(others) and all(map(is_, matches, others))


def is_aligned(*tensors: Tensor) -> bool:
    """Return whether whole loads of `ALIGNMENT` bytes can read these and nothing is left over."""
    return all(t.data_ptr() % ALIGNMENT == 0 and t.numel() % ALIGNMENT == 0 for t in tensors)


def lies_like(tensor: Tensor, other: Tensor) -> bool:
    """Return whether element i in memory is the same element of both, with no gaps in either."""
    if tensor.shape != other.shape:
        return False
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    return tensor.stride() == other.stride() and is_dense(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def laid_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` in the memory layout of `other`; itself if it has that layout."""
    if lies_like(tensor, other):
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def _rows(tensor: int, size: int, chunk: int) -> Tensor:
    numbers = torch.arange(-(-size // chunk))
    left = (size - numbers * chunk).clamp(max=chunk)
    columns = [torch.full_like(numbers, tensor), numbers, left, torch.zeros_like(numbers)]
    return torch.stack(columns, dim=1).int()
