"""Collectives of the ranks that write or read one checkpoint, without pickle.

torch's `*_object` collectives pickle what they send. Here only tensors travel: bytes of JSON, or
64-bit integers.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import CheckpointError

T = TypeVar("T")


@final
class CheckpointRanks:
    """All ranks of the default process group, or one process without a group or `alone`."""

    def __init__(self, *, alone: bool = False) -> None:
        self._group: Any = None
        self.rank, self.count = 0, 1
        if not alone and dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
        if self.count > 1:
            self._group = _host_group(dist.group.WORLD)

    @property
    def has_own_group(self) -> bool:
        """Whether other collectives may run during those of a checkpoint."""
        return self.count == 1 or self._group is not dist.group.WORLD

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank."""
        if self.count == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([content.numel()]))
        largest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(content, (0, largest - content.numel()))
        parts = zip(self._all_gather(padded), sizes, strict=True)
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in parts]

    def first(self, value: Any) -> Any:
        """Return the JSON value of rank 0."""
        if self.count == 1:
            return value
        content = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(content)])
        self._broadcast(size)
        sent = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._broadcast(sent)
        return json.loads(sent.numpy().tobytes())

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on this rank; raise on all ranks if it fails on one."""
        if self.count == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # raised below, once all ranks know of it
            failure = error
        texts = self.gather(None if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(text if texts[0] == text else f"Rank {rank}: {text}")
        return result

    def first_does(self, work: Callable[[], None]) -> None:
        """Let rank 0 do something, and wait for it; raise on all ranks if it fails."""
        self.together(work if self.rank == 0 else lambda: None)

    def same(self, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether all ranks have the same; each rank has as many texts."""
        if self.count == 1:
            return [True] * len(texts)
        digests = torch.tensor([_digest(text) for text in texts], dtype=torch.int64)
        least, most = digests.clone(), digests
        for each, op in ((least, dist.ReduceOp.MIN), (most, dist.ReduceOp.MAX)):
            with _lost_rank_named():
                dist.all_reduce(each, op, group=self._group)
        return [bool(equal) for equal in (least == most).tolist()]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        results = [torch.empty_like(tensor) for _ in range(self.count)]
        with _lost_rank_named():
            dist.all_gather(results, tensor, group=self._group)
        return results

    def _broadcast(self, tensor: Tensor) -> None:
        with _lost_rank_named():
            dist.broadcast(tensor, 0, group=self._group)


@functools.lru_cache(maxsize=1)
def _host_group(world: Any) -> Any:
    """Return a group of all ranks for tensors on the host, of its own where torch has one."""
    # torch calls its own choice of backends "undefined".
    usual = any(name in dist.get_backend(world) for name in ("gloo", "nccl", "undefined"))
    if not usual or not dist.is_gloo_available():
        return world
    return dist.new_group(backend="gloo", timeout=_timeout(world))


def _timeout(world: Any) -> Any:
    """Return how long ranks of a group wait for each other; None if torch does not say."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return world._get_backend(torch.device(device)).options._timeout
    return None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


@contextlib.contextmanager
def _lost_rank_named() -> Iterator[None]:
    """Raise what to do if a collective fails."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"A rank ended while the ranks wrote or read a checkpoint ({error}). The last "
            "complete checkpoint is unchanged. Start all ranks again and load it."
        ) from error
