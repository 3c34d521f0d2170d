"""Launch compiled kernels by CUDA's own call, `cuLaunchKernelEx`.

Triton compiles a C program for every launch signature, about ten per model.
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
_KEPT = 1024
"""Grids of one kernel that are known."""
_USUAL = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
"""Settings of a kernel that takes a single launch call."""
# What Triton adds to a kernel's arguments: memory to be used as it likes, of which our kernels have
# none. CUDA takes as many as a kernel has, so that one too many does no harm.
_ADDED = 4


@final
class DriverLaunch:
    """Launches a kernel that Triton has compiled."""

    def __init__(self, compiled: Any, function: int, stored: Sequence[int]) -> None:
        """Take a loaded function, and the places of its arguments among all there are."""
        self._compiled = compiled
        self._function, self._arguments = ctypes.c_void_p(function), tuple(stored)
        self._count, self._launch = len(self._arguments), _driver().cuLaunchKernelEx
        self._settings: dict[tuple[tuple[int, int, int], int], Any] = {}
        self._room = _Room(self._count)

    def __call__(self, grid: tuple[int, int, int], stream: int, arguments: Sequence[int]) -> None:
        """Launch it with addresses and sizes; a grid of nothing is none."""
        settings = self._settings.get((grid, stream))
        if settings is None:
            if not all(grid):
                return
            settings = self._set(grid, stream)
        if len(arguments) > self._count:
            arguments = [arguments[i] for i in self._arguments]
        values, places = self._room.of_this_thread
        values[: self._count] = arguments
        failed = self._launch(settings, self._function, places, None)
        if failed == _INVALID_CONTEXT:  # a thread that has done nothing on the device so far
            _enter_context(torch._C._cuda_getDevice())
            failed = self._launch(settings, self._function, places, None)
        if failed:
            _check(failed, f"launching {self._compiled.name} over {grid}")

    def _set(self, grid: tuple[int, int, int], stream: int) -> Any:
        """Return the launch settings by reference; they are never written to."""
        if len(self._settings) >= _KEPT:  # each sequence may have a length of its own
            self._settings.clear()
        metadata = self._compiled.metadata
        block = _WARP * metadata.num_warps, 1, 1
        made = ctypes.byref(_Settings(*grid, *block, metadata.shared, stream))
        self._settings[grid, stream] = made
        return made


class _Settings(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("gridX", "gridY", "gridZ")],
        *[(name, ctypes.c_uint) for name in ("blockX", "blockY", "blockZ", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@final
class _Room(threading.local):
    """Where a launch puts its arguments, which CUDA has read when it returns; one a thread."""

    def __init__(self, count: int) -> None:
        # Integers of 4 bytes are read from the first four of the eight: hosts of CUDA are little
        # endian.
        values = (ctypes.c_uint64 * (count + _ADDED))()
        begin, size = ctypes.addressof(values), ctypes.sizeof(ctypes.c_uint64)
        places = [begin + i * size for i in range(len(values))]
        self.of_this_thread: tuple[Any, Any] = values, (ctypes.c_void_p * len(places))(*places)
        """The arguments, and where each of them is."""


def driver_launch(compiled: Any) -> DriverLaunch | None:
    """Return a launcher for a kernel on the current device; None if Triton must launch it."""
    saved = None if _driver() is None else argument_indices(compiled)
    if saved is None:
        return None
    function = _loaded(compiled)
    return None if function is None else DriverLaunch(compiled, function, saved)


def argument_indices(compiled: Any) -> list[int] | None:
    """Return the indices of arguments passed to a kernel; None for an unusual kernel."""
    settings = compiled.metadata._asdict()
    plain = all(settings.get(name, usual) == usual for name, usual in _USUAL.items())
    types = list(compiled.src.signature.values())
    stored = [i for i, kind in enumerate(types) if kind != "constexpr"]
    known = all(isinstance(types[i], str) and _is_known(types[i]) for i in stored)
    return stored if plain and known else None


def _is_known(kind: str) -> bool:
    return kind.startswith("*") or kind in _INTEGERS


def _loaded(compiled: Any) -> int | None:
    """Load a kernel onto the current device; None if Triton would raise or call a hook."""
    from triton import knobs
    from triton.compiler.compiler import max_shared_mem
    from triton.runtime import driver

    lines = knobs.runtime.kernel_load_start_hook, knobs.runtime.kernel_load_end_hook
    device = torch._C._cuda_getDevice()
    shared = compiled.metadata.shared
    if any(map(is_set, lines)) or shared > max_shared_mem(device):
        return None
    _, function, _, _, threads = driver.active.utils.load_binary(
        compiled.name, compiled.kernel, shared, device
    )
    return function if compiled.metadata.num_warps * _WARP <= threads else None


def is_set(hook: Any) -> bool:
    """Return whether a hook of Triton's, a list of calls or one call, is set."""
    return bool(hook.calls) if hasattr(hook, "calls") else hook is not None


@functools.cache
def _driver() -> Any:
    """Return the CUDA driver; None if it is not found under its name, or too old."""
    with contextlib.suppress(OSError, AttributeError):
        # Python's lock is not held in a call: a launch waits while a thousand others do.
        driver = ctypes.CDLL("libcuda.so.1")
        # What is passed has its type; argument types, asked for once more, would take time.
        return driver if driver.cuLaunchKernelEx else None
    return None


def _enter_context(device: int) -> None:
    """Set the CUDA context of a device for this thread, as torch does in its own."""
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
