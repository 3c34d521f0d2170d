"""What host and device do in some steps: a trace, and tables by operation and by module."""

import json
import math
import resource
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from narrowcast.hardware.catalog import Gpu

FOLDER, TRACE, TABLE, SUMMARY = "profile", "trace.json", "operations.json", "summary.json"
MOST_ROWS = 200
"""Operations in the table, those that take longest first."""
SHOWN_ROWS = 10
"""Operations and modules in the summary."""
MODULE = "module: "
"""Begins the names of ranges that mark the forward pass of a module."""
BACKWARD = "autograd::engine::evaluate_function: "
ELSEWHERE = "(outside modules)"
GRAPH_LAUNCH = "cudaGraphLaunch"


@final
class StepProfile:
    """Runs torch's profiler over some steps. Synchronises with the device before and after them."""

    def __init__(
        self,
        *,
        first: int,
        steps: int,
        device: torch.device,
        folder: Path,
        model: nn.Module | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """`model` has its modules in the summary; None for one that Python does not call."""
        self._first, self._last = first, first + steps - 1
        self._device, self._folder, self._model, self._gpu = device, folder, model, gpu
        self._profiler: Any = None
        self._steps = 0
        self._hooks: list[Any] = []

    def before(self, step: int) -> None:
        """Begin with the first of the steps; also in the midst of them, where a run is resumed."""
        if self._profiler is not None or not self._first <= step <= self._last:
            return
        from torch.profiler import ProfilerActivity, profile  # a third of a second

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            activities.append(ProfilerActivity.CUDA)
        self._mark_modules()
        self._profiler = profile(activities=activities, record_shapes=True, with_flops=True)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write the trace and the tables after the last of the steps."""
        self._steps += self._profiler is not None
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Write what there is; nothing where it was not begun, or is written already."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        for hook in self._hooks:
            hook.remove()
        folder = self._folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE))
        (folder / TABLE).write_text(json.dumps(_table(profiler), indent=1) + "\n")
        summary = summarise(
            profiler, steps=max(self._steps, 1), device=self._device.type, gpu=self._gpu
        )
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")

    def _mark_modules(self) -> None:
        """Mark the forward pass of each module in the trace, until the profile is closed."""
        for name, module in () if self._model is None else self._model.named_modules():
            if not name or isinstance(module, nn.ModuleList | nn.ModuleDict):
                continue
            marks = _Marks(MODULE + name)
            self._hooks += [
                module.register_forward_pre_hook(marks.begin),
                module.register_forward_hook(marks.end, always_call=True),
            ]


@dataclass
class _Marks:
    """Opens and closes the range of one module; a module may call itself."""

    name: str
    ranges: list[Any] = field(default_factory=list)

    def begin(self, *_: Any) -> None:
        self.ranges.append(torch.profiler.record_function(self.name))
        self.ranges[-1].__enter__()

    def end(self, *_: Any) -> None:
        self.ranges.pop().__exit__(None, None, None)


def _table(profiler: Any) -> list[dict[str, Any]]:
    """Return operations by the time they take themselves: on the device, and then on the host."""
    rows = [
        {
            "operation": each.key,
            "calls": each.count,
            "device_ms": each.self_device_time_total / 1e3,
            "host_ms": each.self_cpu_time_total / 1e3,
        }
        for each in profiler.key_averages()
        if not each.key.startswith(MODULE)
    ]
    rows.sort(key=lambda row: (-row["device_ms"], -row["host_ms"]))
    return rows[:MOST_ROWS]


@dataclass
class _Spent:
    """What operations of one name, or of one module, took."""

    calls: int = 0
    forward_us: float = 0.0
    backward_us: float = 0.0
    least_us: float = 0.0
    """What the operations with known sizes would take at the rates of the data sheet."""
    known_us: float = 0.0
    """What these took."""

    @property
    def microseconds(self) -> float:
        return self.forward_us + self.backward_us

    def to_json(self, name: str, *, steps: int, total: float) -> dict[str, Any]:
        """Return a row: milliseconds per step, share of all, and share of the roofline."""
        return {
            "name": name,
            "calls": self.calls / steps,
            "ms": self.microseconds / 1e3 / steps,
            "forward_ms": self.forward_us / 1e3 / steps,
            "backward_ms": self.backward_us / 1e3 / steps,
            "share": self.microseconds / total if total else 0.0,
            "roofline": self.least_us / self.known_us if self.least_us and self.known_us else None,
        }


def summarise(profiler: Any, *, steps: int, device: str, gpu: Gpu | None) -> dict[str, Any]:
    """Return the most expensive operations and modules of a finished profile.

    Time is that of the device, or of the host where that computes. A backward operation belongs to
    the module whose forward operation has its sequence number.
    """
    sizes = _input_bytes(profiler)
    operations: dict[str, _Spent] = defaultdict(_Spent)
    modules: dict[str, _Spent] = defaultdict(_Spent)
    events = [event for event in profiler.events() if str(event.device_type).endswith("CPU")]
    places = _Places(events)
    for event in events:
        took = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if took <= 0:
            continue
        module, backward = places.place(event)
        least = _least_microseconds(event, sizes.get(event.id), gpu)
        spent = [modules[module]]
        if not event.name.startswith(MODULE):
            spent.append(operations[event.name.removeprefix(BACKWARD)])
        for each in spent:
            each.calls += 1
            each.backward_us += took if backward else 0.0
            each.forward_us += 0.0 if backward else took
            if least is not None:
                each.least_us, each.known_us = each.least_us + least, each.known_us + took
    total = sum(each.microseconds for each in modules.values())
    if any(event.name.startswith(GRAPH_LAUNCH) for event in events):
        operations = _kernels(profiler)  # the host launched nothing but graphs
    return {
        "device": device,
        "steps": steps,
        "ms": total / 1e3 / steps,
        "operations": _most_expensive(operations, steps=steps, total=total),
        "modules": _most_expensive(modules, steps=steps, total=total)
        if places.knows_modules
        else [],
    }


def _kernels(profiler: Any) -> dict[str, _Spent]:
    """Return what each kernel took on the device."""
    kernels: dict[str, _Spent] = defaultdict(_Spent)
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            kernels[event.name].calls += 1
            kernels[event.name].forward_us += event.self_device_time_total
    return kernels


def _most_expensive(
    spent: Mapping[str, _Spent], *, steps: int, total: float
) -> list[dict[str, Any]]:
    ranked = sorted(spent.items(), key=lambda item: (-item[1].microseconds, item[0]))
    return [each.to_json(name, steps=steps, total=total) for name, each in ranked[:SHOWN_ROWS]]


class _Places:
    """Which module an event belongs to, and whether it is of the backward pass."""

    def __init__(self, events: list[Any]) -> None:
        self._by_event: dict[int, tuple[str, bool]] = {}
        self._by_sequence: dict[int, str] = {}
        self.knows_modules = any(event.name.startswith(MODULE) for event in events)
        for event in events:
            module, backward = self.place(event)
            if event.sequence_nr >= 0 and not backward and module != ELSEWHERE:
                self._by_sequence.setdefault(event.sequence_nr, module)
        self._by_event.clear()  # backward events may have been placed before their forward ones

    def place(self, event: Any) -> tuple[str, bool]:
        """Return the module of an event and whether it is backward."""
        chain = []
        while event is not None and id(event) not in self._by_event:
            chain.append(event)
            event = event.cpu_parent
        result = (ELSEWHERE, False) if event is None else self._by_event[id(event)]
        for each in reversed(chain):
            if each.name.startswith(MODULE):
                result = each.name.removeprefix(MODULE), False
            elif each.name.startswith(BACKWARD):
                result = self._by_sequence.get(each.sequence_nr, ELSEWHERE), True
            self._by_event[id(each)] = result
        return result


_ITEM_BYTES = {
    "double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "bool": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip
_FORMATS = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}  # fmt: skip


def _input_bytes(profiler: Any) -> dict[int, tuple[int, str]]:
    """Return the bytes of each event's inputs and the format of its first one, by event."""
    result = {}
    for event in profiler.profiler.kineto_results.events():
        pairs = [
            (shape, dtype)
            for shape, dtype in zip(event.shapes(), event.dtypes(), strict=False)
            if dtype in _ITEM_BYTES and shape
        ]
        if pairs:
            taken = sum(math.prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in pairs)
            result[event.correlation_id()] = taken, _FORMATS.get(pairs[0][1], "")
    return result


def _least_microseconds(event: Any, size: tuple[int, str] | None, gpu: Gpu | None) -> float | None:
    """Return what an operation would take at peak rates: to multiply, or to read its inputs."""
    if gpu is None or size is None:
        return None
    taken, name = size
    flops = event.flops or 0
    shapes = [shape for shape in event.input_shapes if len(shape) == 2]
    if event.name == "aten::_scaled_mm" and len(shapes) >= 2:  # which the profiler does not count
        flops = 2 * shapes[0][0] * shapes[0][1] * shapes[1][1]
    if name == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        name = "tf32"
    multiply = flops / gpu.tflops[name] / 1e6 if name in gpu.tflops else 0.0
    return max(multiply, taken / gpu.bandwidth / 1e3)


def peak_bytes(device: torch.device) -> int:
    """Return the most that tensors have taken of a GPU, or this process of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes, except on a Mac.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
