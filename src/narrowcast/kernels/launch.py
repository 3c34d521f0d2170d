"""Where Triton kernels can run: on CUDA devices, and anywhere under Triton's interpreter.

The interpreter runs a kernel as numpy code. It is Triton's own switch (TRITON_INTERPRET=1, set
before Triton is imported), and how the kernels are tested on machines without a GPU.
"""

import functools
import importlib.util
import os
from typing import Any, final

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes; Triton compiles another kernel for an address, or a size, that is no multiple of it."""
_INT32 = 2**31


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


@final
class Launcher:
    """Launches one Triton kernel, without what Triton's own way costs the host every time.

    Triton reads off each argument what it would compile for, writes that as a text and looks for it
    among its kernels: 20 to 30 µs. Which kernel it took is kept here by `specialised`. Tensors come
    first among a kernel's arguments, then sizes, then constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch it; `options` are Triton's, such as the number of warps."""
        if interpreted():
            self._kernel[grid](*tensors, *sizes, *constants, **options)
            return
        device = torch.cuda.current_device()
        key = device, constants, *options.values(), *specialised(tensors, sizes)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._launch_first(key, grid, (*tensors, *sizes, *constants), options)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled[grid](*tensors, *sizes, *constants, stream=stream)

    def _launch_first(
        self, key: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        from triton.compiler import CompiledKernel

        found = self._kernel[grid](*args, **options)
        if isinstance(found, CompiledKernel):
            self._compiled[key] = found


def specialised(tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return what differs wherever Triton would take another kernel for these arguments."""
    aligned = [each.data_ptr() % _ALIGNED == 0 for each in tensors]
    kinds = [(n % _ALIGNED == 0, n == 1, -_INT32 <= n < _INT32) for n in sizes]
    return *[each.dtype for each in tensors], *aligned, *kinds
