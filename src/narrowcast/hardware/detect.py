"""Detect how products of each format run on a device: natively, emulated, or not at all.

A CPU may announce bf16 instructions that kill the process or run 90 times slower than fp32. So they
are tried once in a child process, timed, and cached.
"""

import platform
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from narrowcast.errors import UnsupportedError
from narrowcast.hardware.speeds import Speeds, known_speeds
from narrowcast.hardware.trial import CpuTrial, try_products
from narrowcast.numerics import FORMATS, BlockFormat
from narrowcast.runs.environment import host_memory_bytes

How = Literal["native", "emulated", "impossible"]

# Real 16-bit product units at least double the rate of fp32. A ratio near one is timing noise, and
# which path a run takes must not depend on noise.
_WORTH_IT = 0.5


@dataclass(frozen=True, kw_only=True)
class Support:
    """How products of one format run, and why."""

    how: How
    reason: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Capabilities of one device. You can write one yourself to plan for another device."""

    device: str
    """Device in torch notation: `cpu`, `cuda:0`, `mps`."""
    name: str
    memory_bytes: int | None
    """None if unknown."""
    capability: tuple[int, int] | None = None
    """The compute capability of an NVIDIA GPU."""
    products: Mapping[str, Support] = field(default_factory=dict)
    """Support by format name. A format that is not listed can be emulated."""
    speeds: Speeds | None = None
    """Measured fp8 speeds of this GPU, or None."""

    def support(self, format_name: str) -> Support:
        """Return how products of this format run on this device."""
        return self.products.get(
            format_name, Support(how="emulated", reason="support is unknown for this format")
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "device": self.device,
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "capability": list(self.capability) if self.capability else None,
            "products": {
                name: {"how": support.how, "reason": support.reason}
                for name, support in self.products.items()
            },
            "speeds": None if self.speeds is None else self.speeds.to_json(),
        }


def detect_hardware(device: str = "auto") -> Hardware:
    """Return the capabilities of a device.

    On a CPU the first call tries 16-bit products in a child process and caches the result.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps", or "auto" for the first GPU or else the CPU.

    Returns:
        The hardware.

    Raises:
        UnsupportedError: The device does not exist here.

    Example:
        >>> nc.detect_hardware().support("bf16").how
    """
    if device == "auto":
        device = _best_device()
    match _kind(device):
        case "cpu":
            return _cpu()
        case "cuda":
            if not torch.cuda.is_available():
                raise UnsupportedError(
                    f"device={device} needs a CUDA GPU, but torch finds none. Write device=cpu or "
                    "device=auto."
                )
            _require_index(device)
            return _cuda(device)
        case "mps":
            if not torch.backends.mps.is_available():
                raise UnsupportedError(
                    "device=mps needs an Apple GPU, but torch finds none. Write device=cpu or "
                    "device=auto."
                )
            return _mps()
        case _:
            raise UnsupportedError(f"device must be cpu, cuda, mps or auto, got {device}.")


def _kind(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        return ""  # torch's list of possible causes does not help here


def _require_index(device: str) -> None:
    index, count = torch.device(device).index or 0, torch.cuda.device_count()
    if index >= count:
        raise UnsupportedError(
            f"device={device} does not exist: torch finds {count} CUDA GPU(s), numbered from 0. "
            f"Write device=cuda:{count - 1} or device=auto."
        )


def _best_device() -> str:
    if torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@cache
def _cpu() -> Hardware:
    announced = _announced_by_cpu()
    trials = try_products(sorted(announced)) if announced else {}
    products = {
        "fp32": Support(how="native", reason="every CPU multiplies fp32"),
        "tf32": Support(how="emulated", reason="no CPU has tf32 products"),
        "bf16": _cpu_support("bf16", trials),
        "fp16": _cpu_support("fp16", trials),
        **_narrow_products(
            lambda name: Support(how="emulated", reason=f"no CPU has {name} products")
        ),
    }
    return Hardware(
        device="cpu",
        name=_cpu_name(),
        memory_bytes=host_memory_bytes(),
        products=types.MappingProxyType(products),
    )


def _cpu_support(name: str, trials: Mapping[str, CpuTrial]) -> Support:
    trial = trials.get(name)
    if trial is None:
        return Support(how="emulated", reason=f"this CPU has no {name} products")
    if trial.died:
        return Support(
            how="emulated",
            reason=f"this CPU reports {name} products, but a test process that used one crashed",
        )
    if trial.slowdown > _WORTH_IT:
        return Support(
            how="emulated",
            reason=f"a native {name} product takes {trial.slowdown:.1f} × the time of fp32 here",
        )
    return Support(how="native", reason=f"{1 / trial.slowdown:.1f} × the rate of fp32, measured")


def _cuda(device: str) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    return gpu_hardware(
        device,
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
    )


def gpu_hardware(
    device: str, *, name: str, memory_bytes: int, capability: tuple[int, int]
) -> Hardware:
    """Return what an NVIDIA GPU of this compute capability supports."""

    def since(what: str, needed: tuple[int, int]) -> Support:
        if capability >= needed:
            return Support(how="native", reason=f"compute capability {_dotted(capability)}")
        return Support(
            how="emulated",
            reason=f"{what} products need compute capability {_dotted(needed)}, "
            f"this GPU has {_dotted(capability)}",
        )

    products = {
        "fp32": Support(how="native", reason="every GPU multiplies fp32"),
        "tf32": since("tf32", (8, 0)),
        "bf16": since("bf16", (8, 0)),
        "fp16": since("fp16", (7, 0)),
        **_narrow_products(lambda name: Support(how="emulated", reason=f"no kernel for {name}")),
        "e4m3": since("fp8", (8, 9)),
        "e5m2": since("fp8", (8, 9)),
    }
    return Hardware(
        device=device,
        name=name,
        memory_bytes=memory_bytes,
        capability=capability,
        products=types.MappingProxyType(products),
        speeds=known_speeds(name) if capability >= (8, 9) else None,
    )


def _mps() -> Hardware:
    native = Support(how="native", reason="Apple GPU")
    products = {
        "fp32": native,
        "tf32": Support(how="emulated", reason="Apple GPUs have no tf32 products"),
        "bf16": native,
        "fp16": native,
        **_narrow_products(
            lambda name: Support(how="emulated", reason=f"Apple GPUs have no {name}")
        ),
    }
    return Hardware(
        device="mps",
        name=platform.processor() or "Apple GPU",
        memory_bytes=torch.mps.recommended_max_memory(),
        products=types.MappingProxyType(products),
    )


def _narrow_products(support: Callable[[str], Support]) -> dict[str, Support]:
    """Return the support of every format narrower than 16 bits, by one rule."""
    return {
        name: support(name)
        for name, known in FORMATS.items()
        if isinstance(known, BlockFormat) or known.bits < 16
    }


def _announced_by_cpu() -> set[str]:
    """Return the 16-bit formats whose product instructions the CPU's flags name."""
    flags = _cpu_flags()
    announced = set()
    if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        announced.add("bf16")
    if flags & {"avx512_fp16", "amx_fp16", "asimdhp"}:
        announced.add("fp16")
    return announced


@cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(_cpuinfo("flags").split()) | frozenset(_cpuinfo("Features").split())


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@cache
def _cpuinfo(key: str) -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
