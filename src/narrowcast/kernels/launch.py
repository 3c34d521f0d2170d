"""Where Triton kernels can run: on CUDA devices, and anywhere under Triton's interpreter.

The interpreter runs a kernel as numpy code. It is Triton's own switch (TRITON_INTERPRET=1, set
before Triton is imported), and how the kernels are tested on machines without a GPU.
"""

import functools
import importlib.util
import os
import threading
from collections.abc import Mapping
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
_INTERPRETING = threading.Lock()
"""Held while Triton interprets a kernel: it replaces its own functions meanwhile, and notes which
program it is at, for the whole process."""
_KEPT = 1024
"""Launches of one kernel that are known by their very sizes; more are found by what they share."""


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_reason(device: torch.device) -> str:
    """Say why no kernel can run on a device; nothing where it can."""
    if not _triton_is_installed():
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton has no kernels for {device.type}"
    return ""


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_capturing(device: torch.device | None = None) -> bool:
    """Say whether a CUDA graph is being captured, which runs its launches again as they are now.

    `device` is where the work is, if that is known.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    # Not of `torch.cuda` itself, which answers a rehearsal of a capture as if it were one.
    return on_gpu and torch.cuda.graphs.is_current_stream_capturing()


def is_traced(*tensors: Tensor) -> bool:
    """Say whether operators are followed: by a compiler, a mode, or tensors of another kind.

    Else a kernel is launched at once: what torch does between the call of an operator and the
    function behind it takes the host as long as a launch.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton's where its first argument is; Triton itself asks no tensor."""
    device = args[0].get_device()
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
    """Launches one Triton kernel, without what Triton's own way costs the host every time.

    Triton reads off each argument what it would compile for, writes that as a text, looks for it
    among its kernels, tells hooks that nobody has set, and asks the driver about each address: 40
    to 60 µs. Which kernel it took is kept here by `specialised`, and given addresses. Tensors come
    first among a kernel's arguments, then sizes, then constants, each of one type at its place;
    what Triton looks at besides (its switches for debugging) counts as it was the first time.
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
        """Return how to launch it for new sizes; None where Triton was asked, and has done so."""
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
    """Launches what Triton has compiled: by CUDA's own call, or Triton's where that will not do."""

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
    """Refuse tensors that are elsewhere, or nowhere: a kernel would read what is not there."""
    for each in tensors:
        if device < 0 or each.get_device() != device or (each.numel() and not each.data_ptr()):
            raise UnsupportedError(
                f"Kernel inputs must be on {tensors[0].device}, got a {type(each).__name__} on "
                f"{each.device}. Move the whole layer to one GPU."
            )


def specialised(tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return what differs wherever Triton would take another kernel for these arguments."""
    aligned = [each.data_ptr() % _ALIGNED == 0 for each in tensors]
    kinds = [(n % _ALIGNED == 0, n == 1, -_INT32 <= n < _INT32) for n in sizes]
    return *[each.dtype for each in tensors], *aligned, *kinds
