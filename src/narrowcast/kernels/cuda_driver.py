"""Compiled kernels launched by CUDA's own call, `cuLaunchKernel`.

Triton has a C compiler make a program for every signature that a kernel is launched with: half a
second each, ten of them for a model, in the first step on a machine. The call itself has one
signature, and takes the host no longer.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any, final

import torch

_INTEGERS = ("i32", "i64")
_INVALID_CONTEXT = 201
_WARP = 32
# What Triton adds to a kernel's arguments: memory to be used as it likes, of which our kernels have
# none. CUDA takes as many as a kernel has, so that one too many does no harm.
_ADDED = 4


@final
class DriverLaunch:
    """Launches a kernel that Triton has compiled."""

    def __init__(self, compiled: Any, function: int, kept: Sequence[int]) -> None:
        """Take a loaded function, and the places of its arguments among all there are."""
        self._compiled = compiled
        self._function, self._kept = function, tuple(kept)
        self._every = self._kept == tuple(range(len(self._kept)))
        metadata = compiled.metadata
        self._block = _WARP * metadata.num_warps, 1, 1, metadata.shared
        self._room = _Room(len(self._kept))

    def __call__(self, grid: tuple[int, int, int], stream: int, arguments: Sequence[int]) -> None:
        """Launch it with addresses and sizes; a grid of nothing is none."""
        if not all(grid):
            return
        given = arguments if self._every else [arguments[i] for i in self._kept]
        places = self._room.filled(given)
        launch = _driver().cuLaunchKernel
        failed = launch(self._function, *grid, *self._block, stream, places, None)
        if failed == _INVALID_CONTEXT:  # a thread that has done nothing on the device so far
            _enter_context(torch._C._cuda_getDevice())
            failed = launch(self._function, *grid, *self._block, stream, places, None)
        _check(failed, f"launching {self._compiled.name} over {grid}")


@final
class _Room(threading.local):
    """Where a launch puts its arguments, which CUDA has read when it returns; one a thread."""

    def __init__(self, count: int) -> None:
        # Integers of 4 bytes are read from the first four of the eight: hosts of CUDA are little
        # endian.
        self._values = (ctypes.c_uint64 * (count + _ADDED))()
        self._count = count
        begin, size = ctypes.addressof(self._values), ctypes.sizeof(ctypes.c_uint64)
        places = [begin + i * size for i in range(len(self._values))]
        self._places = (ctypes.c_void_p * len(places))(*places)

    def filled(self, arguments: Sequence[int]) -> "ctypes.Array[ctypes.c_void_p]":
        """Return the addresses of these arguments."""
        self._values[: self._count] = [*arguments]
        return self._places


def driver_launch(compiled: Any) -> DriverLaunch | None:
    """Return how to launch a kernel on the current device; None where that is Triton's to do."""
    kept = arguments_of(compiled)
    if kept is None or _driver() is None:
        return None
    function = _loaded(compiled)
    return None if function is None else DriverLaunch(compiled, function, kept)


def arguments_of(compiled: Any) -> list[int] | None:
    """Return the places of the arguments that are handed to a kernel; None of an unusual kernel.

    A size of one is compiled in, as constants are.
    """
    metadata = compiled.metadata
    plain = (
        metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
    )
    types = list(compiled.src.signature.values())
    kept = [i for i, kind in enumerate(types) if kind != "constexpr"]
    known = all(isinstance(types[i], str) and _is_known(types[i]) for i in kept)
    return kept if plain and known else None


def _is_known(kind: str) -> bool:
    return kind.startswith("*") or kind in _INTEGERS


def _loaded(compiled: Any) -> int | None:
    """Load a kernel onto the current device; None where Triton would refuse it, or tell of it."""
    from triton import knobs
    from triton.compiler.compiler import max_shared_mem
    from triton.runtime import driver

    told = knobs.runtime.kernel_load_start_hook, knobs.runtime.kernel_load_end_hook
    device = torch._C._cuda_getDevice()
    shared = compiled.metadata.shared
    if any(map(is_set, told)) or shared > max_shared_mem(device):
        return None
    _, function, _, _, threads = driver.active.utils.load_binary(
        compiled.name, compiled.kernel, shared, device
    )
    return function if compiled.metadata.num_warps * _WARP <= threads else None


def is_set(hook: Any) -> bool:
    """Say whether anybody is told by a hook of Triton's, a list of calls or one call."""
    return bool(hook.calls) if hasattr(hook, "calls") else hook is not None


@functools.cache
def _driver() -> Any:
    """Return CUDA's driver; None where it is not to be found under its name.

    Called with Python's lock held: to give it up and to take it again would take longer.
    """
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.PyDLL("libcuda.so.1")
        number, address = ctypes.c_uint, ctypes.c_void_p
        driver.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
        driver.cuCtxSetCurrent.argtypes = [address]
        return driver
    return None


def _enter_context(device: int) -> None:
    """Give this thread the context of a device that torch has in all others."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    doing = f"using cuda:{device} in a new thread"
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), doing)
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), doing)
    _check(_driver().cuCtxSetCurrent(context), doing)


def _check(failed: int, doing: str) -> None:
    if failed:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(failed, ctypes.byref(said))
        why = (said.value or b"").decode() or "an unknown error"
        raise RuntimeError(f"{doing}: CUDA error {failed}, {why}")
