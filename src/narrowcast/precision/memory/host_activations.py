"""Activations of blocks, offloaded to pinned host memory until their backward pass.

Storages are copied while the next block computes, and prefetched one block ahead, so those of two
blocks are on the device at a time. The last block's are never offloaded. Streams wait for one
another's events, and the host for none.

The computation waits for a copy before it frees the memory that is copied, so the peak does not
depend on how far ahead the host is. On a GPU, a tensor that is written to during its copy
raises in the backward pass, as in plain torch.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from narrowcast.errors import UnsupportedError
from narrowcast.hardware.transfers import Lane, Mark, computing_on, mark_now, on_host, wait_for
from narrowcast.kernels.launch import PLAIN
from narrowcast.precision.fp8.linear import Fp8Linear
from narrowcast.precision.nested import tensors_in
from narrowcast.precision.plan.memory import MemoryPlan
from narrowcast.precision.swap import Transparent, swap

SMALLEST = 2**16
"""Bytes of a storage that is worth a copy."""


class Offloaded(Transparent):
    """A block of which nothing large stays on the device between its passes."""

    nc_shelf: "Shelf"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and put what is kept of it on the shelf."""
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return _offloaded(self, super().__call__, args, kwargs)


def offload_blocks(model: nn.Module, plan: MemoryPlan) -> None:
    """Offload the saved tensors of the blocks of a plan if it requests it."""
    if plan.offloads_activations:
        shelf = Shelf(next(model.parameters()).device)
        for name in plan.blocks:
            swap(model.get_submodule(name), Offloaded, nc_shelf=shelf)


@_disable_dynamo
def _offloaded(
    block: Offloaded, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    shelf = block.nc_shelf
    stored = shelf.begin(_others(block, args, kwargs))
    with saved_tensors_hooks(stored.pack, _unpack):
        result = call(*args, **kwargs)
    shelf.end(stored)
    return result


@final
class Shelf:
    """Where the blocks of one model put what they keep, in the order they are called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up, self.down = Lane(device), Lane(device)
        self._last: weakref.ref[OffloadedStorages] | None = None

    def begin(self, others: set[int]) -> "OffloadedStorages":
        """Return the holders of a block's own storages, by address."""
        return OffloadedStorages(self, others, before=self._last)

    def end(self, saved: "OffloadedStorages") -> None:
        """Drop the tensors of the previous block: the copies of this one are queued."""
        before = None if self._last is None else self._last()
        if before is not None:
            before.let_go()
        self._last = weakref.ref(saved)


@final
class OffloadedStorages:
    """The storages of one pass of a block: on the device, on the host, or on their way."""

    def __init__(
        self, shelf: Shelf, others: set[int], *, before: "weakref.ref[OffloadedStorages] | None"
    ) -> None:
        self._shelf, self._others, self._before = shelf, others, before
        self._after: weakref.ref[OffloadedStorages] | None = None
        if before is not None and (earlier := before()) is not None:
            earlier._after = weakref.ref(self)
        self._places: dict[tuple[int, int], int] = {}
        self._seen: list[tuple[Tensor, int, int]] = []
        """A tensor on each storage, its version when it was copied, and where its copy is."""
        self._there: list[Tensor] | None = []
        """Bytes of each storage on the device, while they are there."""
        self._hosts: list[Tensor] = []
        self._torn: set[int] = set()
        """Copies of storages that were written to before the computation had waited for them."""
        self._sent: Mark = None
        self._ready: Mark = None
        self._begun = False
        self._arriving = False
        """Whether storages were sent for, and the queue they were taken from has not waited yet."""
        self._home: torch.cuda.Stream | None = None

    def __del__(self) -> None:
        """Keep the memory of unfinished copies. This may run at any time, on any stream."""
        self._keep_arriving()

    def pack(self, tensor: Tensor) -> Any:
        """Offload a saved tensor, unless it is small or belongs to another block."""
        if self._there is None or not self._is_mine(tensor):
            return tensor
        storage = tensor.untyped_storage()
        version = 0 if tensor.is_inference() else tensor._version
        # Storages live until the block has ended, so none has the address of another; and one that
        # was written to in between is another.
        key = storage.data_ptr(), version
        if key not in self._places:
            self._places[key] = len(self._there)
            there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host, now = on_host(there), mark_now(self._shelf.device)
            self._sent = self._shelf.down.copy([(host, there)], after=[now])
            self._there.append(there)
            self._hosts.append(host)
            if not tensor.is_inference():
                self._seen.append((tensor.detach(), version, self._places[key]))
        return _View(self, self._places[key], tensor)

    def let_go(self) -> None:
        """Leave the device; the computation waits until the copies are done."""
        if not self._begun:
            self._leave()

    def storage(self, location: int) -> Tensor:
        """Return the bytes of a storage on the device, for the backward pass of the block."""
        if not self._begun or self._there is None:
            self._begun = True
            if self._written_to():
                self._leave()  # written to since: the copy has what was kept
            self._seen = []
            self.fetch()
            later = None if self._after is None else self._after()
            if later is not None:
                later._leave()
            if self._before is not None and (earlier := self._before()) is not None:
                earlier.fetch()
        self._check_overwritten(location)
        wait_for(self._ready, self._shelf.device)
        self._arriving &= computing_on(self._shelf.device) != self._home
        assert self._there is not None
        return self._there[location]

    def fetch(self) -> None:
        """Send for the storages, unless they are on the device or on their way there."""
        if self._there is not None:
            return
        self._there = [torch.empty_like(h, device=self._shelf.device) for h in self._hosts]
        now = mark_now(self._shelf.device)  # the previous user of this memory has finished by then
        pairs = list(zip(self._there, self._hosts, strict=True))
        self._ready = self._shelf.up.copy(pairs, after=[now])
        self._arriving, self._home = True, computing_on(self._shelf.device)

    def _leave(self) -> None:
        """Free the storages on the device after their copies finish."""
        self._keep_arriving()
        if self._shelf.device.type == "cuda":  # copies of a CPU were done as they were asked for
            self._torn |= self._written_to()
        wait_for(self._sent, self._shelf.device)
        self._there, self._seen = None, []

    def _written_to(self) -> set[int]:
        """Return the places of storages that were written to since they were copied."""
        return {position for tensor, version, position in self._seen if tensor._version != version}

    def _check_overwritten(self, location: int) -> None:
        if location in self._torn:
            raise UnsupportedError(
                "memory.offload=[activations]: a tensor that the backward pass needs was modified "
                "by an inplace operation while it was copied to the host. Use an out-of-place "
                "operation (torch needs that without offload too), or leave activations out of "
                "memory.offload."
            )

    def _keep_arriving(self) -> None:
        if self._arriving:
            for there in self._there or ():
                self._shelf.up.uses(there)
            self._arriving = False

    def _is_mine(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in PLAIN
            and tensor.layout == torch.strided
            and tensor.device == self._shelf.device
            and tensor.untyped_storage().nbytes() >= SMALLEST
            and tensor.untyped_storage().data_ptr() not in self._others
        )


@final
class _View:
    """How a tensor lies in a storage that is kept."""

    def __init__(self, stored: OffloadedStorages, location: int, tensor: Tensor) -> None:
        self._storages, self._index, self._dtype = stored, location, tensor.dtype
        self._lies = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """Return the original tensor."""
        whole = self._storages.storage(self._index)
        return torch.empty(0, dtype=self._dtype, device=whole.device).set_(
            whole.untyped_storage(), self._lies[2], self._lies[0], self._lies[1]
        )


def _unpack(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, _View) else packed


def _others(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the addresses of storages that stay on the device: weights, buffers, shared inputs."""
    held: list[Tensor] = [*block.parameters(), *block.buffers()]
    held += [each for each in tensors_in((args, kwargs)) if not each.requires_grad]
    for module in block.modules():
        if isinstance(module, Fp8Linear) and module.nc_weight is not None:
            held += [module.nc_weight.rowwise, module.nc_weight.columnwise]
    return {each.untyped_storage().data_ptr() for each in held if type(each) in PLAIN}
