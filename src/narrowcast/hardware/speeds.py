"""Measured speeds of linear layers in fp8 on a GPU, for plans.

Small shapes gain nothing, because operands are scaled and cast first. `narrowcast doctor --measure`
makes a table for the GPU it runs on; some come with the package.
"""

import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from narrowcast.hardware.trial import cache_folder

_log = logging.getLogger(__name__)

TOKENS = (1024, 4096, 16384, 65536)
WIDTHS = (1024, 2048, 4096, 8192)
"""Of inputs and of outputs. Gains are interpolated between these, and constant beyond."""
FROZEN = ("frozen-bf16", "frozen-wide", "frozen-row")
"""A frozen weight, which has no gradient: in bf16, kept in e4m3 and widened, multiplied in fp8."""
KINDS = ("bf16", "tensor", "delayed", "row", "block", *FROZEN)
"""What is measured: bf16, and fp8 by its scaling; and the same of a frozen weight."""
HIDDEN = 1.5
"""Device time over host time from which fp8 layers never wait for the host. On one H200
(`narrowcast bench models`, 8,192 rows), models at 0.65 to 1.0 gained or lost (0.84 to 1.13 times
the speed), and at 1.85 gained 1.21 eager and 1.18 compiled."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds of a linear layer, forward and backward, by kind of product and shape."""

    gpu: str
    torch: str
    date: str
    tokens: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]
    """By kind; over tokens, inputs and outputs, the last fastest."""
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    """Host time of a layer in eager mode, by kind; empty if not measured."""

    def gain(
        self, kind: str, *, tokens: int, inputs: int, outputs: int, against: str = "bf16"
    ) -> float | None:
        """Return the speedup over bf16 for a shape; None if it was not measured."""
        shape = (tokens, inputs, outputs)
        wide, narrow = self._log_seconds(against, shape), self._log_seconds(kind, shape)
        return None if wide is None or narrow is None else math.exp(wide - narrow)

    def layer_seconds(self, kind: str, *, tokens: int, inputs: int, outputs: int) -> float | None:
        """Return the time of both passes of a layer; None if the kind was not measured."""
        result = self._log_seconds(kind, (tokens, inputs, outputs))
        return None if result is None else math.exp(result)

    def waited_for(
        self, kind: str, *, tokens: int, inputs: int, outputs: int, execution: str = "eager"
    ) -> bool | None:
        """Return whether the host loses more than the device saves, or None if unknown."""
        if execution == "graphed":
            return False
        shape = (tokens, inputs, outputs)
        wide, narrow = self._log_seconds("bf16", shape), self._log_seconds(kind, shape)
        host, plain = self.host_seconds.get(kind), self.host_seconds.get("bf16")
        if wide is None or narrow is None or host is None or plain is None:
            return None
        saved = math.exp(wide) - math.exp(narrow)
        return saved < host - plain and math.exp(narrow) < HIDDEN * host

    def _log_seconds(self, kind: str, shape: tuple[int, int, int]) -> float | None:
        """Return the logarithm of a time, interpolated between neighbouring shapes."""
        if kind not in self.seconds:
            return None
        axes = (self.tokens, self.inputs, self.outputs)
        places = [_between(axis, value) for axis, value in zip(axes, shape, strict=True)]
        total = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            share, index = 1.0, 0
            for (low, above), side, axis in zip(places, corner, axes, strict=True):
                share *= above if side else 1 - above
                index = index * len(axis) + min(low + side, len(axis) - 1)
            total += share * math.log(self.seconds[kind][index])
        return total

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "torch": self.torch,
            "date": self.date,
            "tokens": list(self.tokens),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "seconds": {kind: list(values) for kind, values in self.seconds.items()},
            "host_seconds": dict(self.host_seconds),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Speeds":
        """Return what `to_json` wrote; raise a ValueError where it cannot have been measured."""
        result = cls(
            gpu=data["gpu"],
            torch=data["torch"],
            date=data["date"],
            tokens=tuple(data["tokens"]),
            inputs=tuple(data["inputs"]),
            outputs=tuple(data["outputs"]),
            seconds={kind: tuple(values) for kind, values in data["seconds"].items()},
            host_seconds=dict(data.get("host_seconds", {})),
        )
        axes = (result.tokens, result.inputs, result.outputs)
        shapes = math.prod(map(len, axes))
        times = [value for values in result.seconds.values() for value in values]
        times += result.host_seconds.values()
        if (
            "bf16" not in result.seconds
            or any(len(values) != shapes or not values for values in result.seconds.values())
            or any(list(axis) != sorted(set(axis)) for axis in axes)
            or not all(0 < value < math.inf for value in (*times, *itertools.chain(*axes)))
        ):
            raise ValueError("a table of speeds has gaps or impossible times")
        return result


def known_speeds(gpu: str) -> Speeds | None:
    """Return what was measured on this GPU here, or what comes with the package for it."""
    stored = _cache_path(gpu)
    if stored.exists():
        try:
            return Speeds.from_json(json.loads(stored.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            _log.warning(
                "the measured speeds of this GPU cannot be read from %s and are ignored; measure "
                "them again with narrowcast doctor --measure, or delete the file",
                stored,
            )
    for shipped in files(__package__).joinpath("measured").iterdir():
        if shipped.name.endswith(".json"):
            matched = Speeds.from_json(json.loads(shipped.read_text(encoding="utf-8")))
            # The H100 is the H200's processor with slower memory: its products gain as much.
            if gpu == matched.gpu or gpu.replace("H100", "H200").startswith(matched.gpu):
                return matched
    return None


def keep_speeds(speeds: Speeds) -> Path:
    """Remember a measurement for this user; return where."""
    path = _cache_path(speeds.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = path.with_suffix(f".{os.getpid()}")  # a file that is half written is never found
    extra.write_text(json.dumps(speeds.to_json(), indent=1) + "\n", encoding="utf-8")
    extra.replace(path)
    return path


def _cache_path(gpu: str) -> Path:
    return cache_folder() / "speeds" / f"{''.join(c if c.isalnum() else '-' for c in gpu)}.json"


def _between(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Return the place on an axis below a value, and how far it is to the next, in logarithms."""
    if value <= axis[0]:
        return 0, 0.0
    for i, (low, high) in enumerate(itertools.pairwise(axis)):
        if value <= high:
            return i, math.log(value / low) / math.log(high / low)
    return len(axis) - 1, 0.0
