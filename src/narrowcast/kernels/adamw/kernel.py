"""AdamW and Adam that read and write every byte of weight, gradient and state once per step.

The host reads nothing back, so a CUDA graph can replay a step. The formula is that of torch's fused
kernels, in fp32; step counts and bias corrections are in fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.adamw.programs import begin, update
from narrowcast.kernels.adamw.twin import AT_HOME, Ahead, Hyper, Weight, lost_fraction
from narrowcast.kernels.launch import (
    ALIGNMENT,
    HostTable,
    Launcher,
    TensorAddresses,
    chunk_table,
    interpreted,
    is_aligned,
    is_capturing,
    upload,
)

_Make = tuple[tuple[torch.dtype, str, str, bool, str], torch.dtype, bool]
"""What weights of one launch share: their make, the gradient's dtype, whole loads or not."""
_DTYPE = attrgetter("dtype")
COUNTERS = 64
"""Places over which programs spread their counts, so that few wait for each other."""
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
# The widths of rows: a weight's addresses and coefficients, a group's settings.
ROW, COEFFICIENTS, HYPER = 8, 16, 8
# The coefficients that `begin` does not write: they are the same in every step.
SHARE, BACK, LEFT = 11, 12, 13


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a launch is cut up; `chunk` elements a program."""

    chunk: int
    warps: int


# The best of eleven each, or within 0.3 % of it, measured on an H200 over 500M weights of a GPT:
# 3.14, 2.19 and 1.85 ms; at 4096 elements by 4 warps it is 3.18, 2.21 and 2.67. Few elements a
# thread leave registers for many threads, and a warp by itself waits for no other.
TILINGS = {
    "fp32": Tiling(chunk=1024, warps=4),
    "bf16": Tiling(chunk=256, warps=1),
    "int8": Tiling(chunk=256, warps=1),
}


class AdamKernel:
    """The tables of a set of weights, which it keeps alive, and the launches that update them."""

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        device: torch.device,
        groups: int,
        share: float = 0.0,
        ahead: Ahead = AT_HOME,
        before: int = 0,
        tiling: Tiling | None = None,
    ) -> None:
        self.weights, self._device, self._tiling = list(weights), device, tiling
        self._before = before
        count = len(self.weights)
        self._addresses = HostTable(count * ROW, device, dtype=torch.int64)
        self._gradients = HostTable(count, device, dtype=torch.int64)
        self._groups = upload(torch.tensor([w.group for w in weights], dtype=torch.int32), device)
        self._hyper = HostTable(groups * HYPER, device, dtype=torch.float64)
        self._coefficients = torch.zeros(count * COEFFICIENTS, device=device)
        self._coefficients[SHARE::COEFFICIENTS].fill_(share)
        self._ahead: Ahead | None = None
        self._write_ahead(ahead)
        self._leads = HostTable(count, device, dtype=torch.int64)
        self._leads.write([0 if w.lead is None else w.lead.data_ptr() for w in weights])
        self._seeds = torch.zeros(count, dtype=torch.int32, device=device)
        self._counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
        self._yes = torch.ones((), dtype=torch.uint8, device=device)
        self._addresses.write([address for w in weights for address in _addresses(w)])
        # A gradient has as many elements as its weight, so of it only the address is asked.
        self._states_aligned = [is_aligned(*w.tensors) for w in weights]
        self._own_makes = [w.make for w in weights]
        self._lost_counts: tuple[list[int], list[torch.dtype | None]] = [], []
        self._makes: list[_Make] = []
        self._launches: list[_Launch] = []
        self._captured: list[list[_Launch]] = []
        self._coupled = True

    def write_hyper(self, groups: Sequence[Hyper], *, ahead: Ahead | None = None) -> None:
        """Write the settings of the next step. A CUDA graph capture would fix them."""
        coupled = not all(group.decoupled for group in groups)
        if self._captured and coupled != self._coupled:
            raise UnsupportedError(
                "decoupled_weight_decay of a group changed after the step was captured as a CUDA "
                "graph. Set it before prepare()."
            )
        self._coupled = coupled
        self._hyper.write([number for group in groups for number in group.row()], replayed=False)
        if ahead is not None:
            self._write_ahead(ahead)
        for i, group in enumerate(groups):
            if isinstance(group.lr, Tensor):
                self._hyper.tensor[i * HYPER].copy_(group.lr, non_blocking=True)

    def has_replayed(self) -> None:
        """Forget the addresses of the last gradients: a replayed graph used others."""
        self._gradients.has_replayed()

    def make_room(self) -> None:
        """Have memory to spare for the addresses of gradients that a capture is about to keep."""
        self._gradients.make_room()

    def _write_ahead(self, ahead: Ahead) -> None:
        if ahead != self._ahead:
            self._ahead = ahead
            self._coefficients[BACK::COEFFICIENTS].fill_(ahead.back)
            self._coefficients[LEFT::COEFFICIENTS].fill_(ahead.left)

    def step(
        self,
        gradients: Sequence[Tensor | None],
        *,
        factor: Tensor | None,
        finite: Tensor | None,
        metered: bool,
        places: TensorAddresses | None = None,
    ) -> Tensor | None:
        """Update all weights if `finite`, and return the fraction of lost updates if `metered`.

        Gradients must have the memory layout of their weights.
        """
        addresses, dtypes, table = _gradient_addresses(gradients, places)
        matches = addresses, dtypes
        if matches != self._lost_counts:
            makes = self._kernel_variants(addresses, dtypes)
            if makes != self._makes:
                self._makes, self._launches = makes, self._cut(makes)
            self._lost_counts = matches
        if table is None:
            table = self._gradients.tensor
            self._gradients.write(addresses)
        self._prepare(table, factor, finite)
        if is_capturing(self._device):
            self._captured.append(self._launches)
        tables = self._addresses.tensor, table, self._leads.tensor
        for each in self._launches:
            _launch_update(
                (each.programs, 1, 1),
                (each.chunks, *tables, self._coefficients, self._seeds, self._counters),
                (),
                (*each.makes, self._coupled, metered, *each.tiling),
                num_warps=each.warps,
            )
        return lost_fraction(self.counts()) if metered else None

    def counts(self) -> Tensor:
        """Return how many updates the last step has lost, and how many were due."""
        return torch.stack([(self._counters & 0xFFFFFFFF).sum(), (self._counters >> 32).sum()])

    def _kernel_variants(
        self, addresses: Sequence[int], dtypes: Sequence[torch.dtype | None]
    ) -> list[_Make]:
        """Return the variant of each weight; a weight without a gradient keeps its last one."""
        before = self._makes or [(make, torch.float32, False) for make in self._own_makes]
        return [
            was if dtype is None else (make, dtype, aligned and not address % ALIGNMENT)
            for was, make, aligned, address, dtype in zip(
                before, self._own_makes, self._states_aligned, addresses, dtypes, strict=True
            )
        ]

    def _cut(self, makes: Sequence[_Make]) -> "list[_Launch]":
        sizes = [w.weight.numel() for w in self.weights]
        launches = []
        for make in dict.fromkeys(makes):
            (dtype, master, moments, averaged, lead), gradient, aligned = make
            tiling = self._tiling or TILINGS[moments]
            mine = [i for i, other in enumerate(makes) if other == make]
            chunks = chunk_table(sizes, mine, chunk=tiling.chunk)
            variant = TYPES[dtype], TYPES[gradient], master, moments, averaged, lead
            for full in (True, False):
                rows = chunks[(chunks[:, 2] == tiling.chunk) == full]
                if len(rows):
                    launch = _Launch(
                        chunks=upload(rows, self._device),
                        programs=len(rows),
                        makes=variant,
                        tiling=(aligned, full, tiling.chunk, not interpreted()),
                        warps=tiling.warps,
                    )
                    launches.append(launch)
        return launches

    def _prepare(self, gradients: Tensor, factor: Tensor | None, finite: Tensor | None) -> None:
        count = len(self.weights)
        width = 128
        tensors = (
            self._addresses.tensor,
            gradients,
            self._groups,
            self._hyper.tensor,
            self._coefficients if factor is None else factor,
            self._yes if finite is None else finite.view(torch.uint8),
            self._coefficients,
            self._seeds,
            self._counters,
        )
        factors = "one" if factor is None else "all" if factor.dim() == 0 else "each"
        grid = triton.cdiv(count, width), 1, 1
        _launch_begin(grid, tensors, (count, self._before), (factors, COUNTERS, width))


_launch_begin, _launch_update = Launcher(begin), Launcher(update)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """Chunks of weights that one launch updates, and what the kernel is compiled for."""

    chunks: Tensor
    programs: int
    makes: tuple[Any, ...]
    tiling: tuple[Any, ...]
    warps: int


def _gradient_addresses(
    gradients: Sequence[Tensor | None], places: TensorAddresses | None
) -> tuple[list[int], list[torch.dtype | None], Tensor | None]:
    """Return addresses (0: no gradient, 1: an empty tensor), dtypes and the device table."""
    there = [g for g in gradients if g is not None]
    if places is None or not places.matches(there):
        places = TensorAddresses(there, list(map(Tensor.data_ptr, there)), list(map(_DTYPE, there)))
    addresses, dtypes, table = places.addresses, places.dtypes, places.table
    if 0 in addresses:
        addresses, table = [address or 1 for address in addresses], None
    if len(there) == len(gradients):
        return addresses, [*dtypes], table
    result = iter(zip(addresses, dtypes, strict=True))
    both = [(0, None) if g is None else next(result) for g in gradients]
    return [address for address, _ in both], [dtype for _, dtype in both], None


def _addresses(w: Weight) -> list[int]:
    scales = [w.first_scale, w.second_scale]
    held = [w.weight, w.residual, w.first, w.second, *scales, w.step, w.average]
    return [0 if tensor is None else tensor.data_ptr() for tensor in held]
