"""Batches in an order that is a pure function of the seed, copied to the device ahead of time."""

import gc
import hashlib
import operator
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError, blamed_on
from narrowcast.hardware.randomness import seed_everything
from narrowcast.precision.nested import map_tensors, tensors_in
from narrowcast.training.signals import STOPPING
from narrowcast.training.task import Batch, MapDataset, SampleDataset, Task

Batches: TypeAlias = Generator[Batch, None, None]
Collate: TypeAlias = Callable[[Any], Batch]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Samples of batch k; each epoch is a new permutation without its partial last batch.

    With several ranks, rank r has samples r, r + ranks, r + 2 ranks … of each batch. The batches do
    not depend on the number of ranks.
    """

    samples: int
    batch_size: int
    seed: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise ConfigError("The training data must hold at least one sample, got 0. Add data.")
        if self.batch_size > self.samples:
            raise ConfigError(
                f"batch_size must be at most the number of training samples, {self.samples}, got "
                f"{self.batch_size}. Write batch_size={self.samples} or less, or add data."
            )
        if self.batch_size < self.ranks:
            raise ConfigError(
                f"batch_size must be at least the number of ranks, {self.ranks}, which share each "
                f"batch, got {self.batch_size}. Write batch_size={self.ranks} or more, or use "
                "fewer ranks."
            )

    @property
    def batches_per_epoch(self) -> int:
        """Return how many whole batches the samples fill."""
        return self.samples // self.batch_size

    def indices(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch; for many in a row, `starting_at` is faster."""
        return next(self.starting_at(batch))

    def starting_at(self, batch: int) -> Iterator[list[int]]:
        """Yield this rank's samples of `batch` and of all that follow it, without end."""
        epoch, within = divmod(batch, self.batches_per_epoch)
        while True:
            permutation = self._permutation(epoch)
            for number in range(within, self.batches_per_epoch):
                first = number * self.batch_size
                batch_samples = permutation[first : first + self.batch_size]
                yield batch_samples[self.rank :: self.ranks].tolist()
            epoch, within = epoch + 1, 0

    @property
    def share(self) -> float:
        """Return this rank's samples of a batch, relative to an equal share of all ranks."""
        mine = len(range(self.rank, self.batch_size, self.ranks))
        return mine * self.ranks / self.batch_size

    @property
    def run_seed(self) -> int:
        """Return the seed of what this rank draws outside of workers, such as dropout."""
        return hashed(f"{self.seed} rank {self.rank}") if self.rank else self.seed

    def random_seed(self, batch: int) -> int:
        """Return the seed of what this rank's samples of a batch draw in a worker."""
        rank = f" rank {self.rank}" if self.ranks > 1 else ""
        return hashed(f"{self.seed} batch {batch}{rank}")

    def _permutation(self, epoch: int) -> Tensor:
        # A hash, not a sum: seed 0 epoch 1 must not be the order of seed 1 epoch 0.
        generator = torch.Generator().manual_seed(hashed(f"{self.seed} {epoch}"))
        return torch.randperm(self.samples, generator=generator)


class BatchStream:
    """An endless iterator of batches on `device`, from batch `start` on.

    `workers` and `prefetch` do not change the batches. Close it to end its processes.
    """

    def __init__(
        self,
        dataset: MapDataset | SampleDataset,
        order: Order,
        *,
        start: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device,
        collate: Collate | None = None,
        count: Callable[[Batch], int] | None = None,
    ) -> None:
        if collate is None:
            collate = _stacked
        self._count, self._counts = count, deque[int]()
        self._fetched: Batches = (
            _fetched_by_workers(
                dataset, order, start=start, workers=workers, prefetch=prefetch, collate=collate
            )
            if workers
            else (_collated(collate, fetch(dataset, i)) for i in order.starting_at(start))
        )
        counted = self._counted(self._fetched)
        self._batches: Batches = (
            _copied_ahead(counted, device, depth=prefetch)
            if device.type == "cuda"
            else (map_tensors(batch, lambda t: t.to(device)) for batch in counted)
        )
        self.items = 0
        """Result of `count` for the latest batch, computed on the CPU: does not synchronise."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if self._count is not None:
            self.items = self._counts.popleft()
        return batch

    def close(self) -> None:
        """End the worker processes; the stream gives no more batches."""
        self._batches.close()
        self._fetched.close()

    def _counted(self, batches: Batches) -> Batches:
        for batch in batches:
            if self._count is not None:
                self._counts.append(_whole_number(self._count(batch)))
            yield batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def fetch(dataset: MapDataset | SampleDataset, indices: list[int]) -> Any:
    """Return the samples of `indices`; an error names the sample that failed."""
    if isinstance(dataset, MapDataset):
        with blamed_on(f"the task's train_data for samples {_listed(indices)}"):
            return dataset.__getitems__(indices)
    samples = []
    for index in indices:
        with blamed_on(f"sample {index} of the task's train_data"):
            samples.append(dataset[index])
    return samples


def _listed(indices: list[int]) -> str:
    """Return sample numbers as text, the first eight of many."""
    more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
    return f"{', '.join(map(str, indices[:8]))}{more}"


def hashed(text: str) -> int:
    """Return a seed that differs for other texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _fetched_by_workers(
    dataset: MapDataset | SampleDataset,
    order: Order,
    *,
    start: int,
    workers: int,
    prefetch: int,
    collate: Collate,
) -> Batches:
    """Yield the batches of `order`, fetched by worker processes, in that order."""
    loader = DataLoader(
        _Seeded(dataset, order),
        batch_sampler=_From(order, start),  # type: ignore[arg-type]  # for `_Seeded` alone
        num_workers=workers,
        prefetch_factor=max(prefetch, 1),
        collate_fn=collate,
        worker_init_fn=begin_worker,
        # Its own: the loader draws a seed for its workers, from the run's generator by default,
        # and a run that is resumed would draw once more than one that never stopped.
        generator=torch.Generator(),
    )
    yield from by_workers(loader)


def by_workers(loader: "DataLoader[Any]") -> Generator[Any]:
    """Yield what the workers of a loader fetch, and always end them.

    An exception's traceback would keep the loader alive, and Python would wait forever for workers
    that ignore SIGTERM.
    """
    # A worker has a copy of all that is here. What a GPU's driver gave cannot be given back there,
    # and trying to ends the process: so no garbage is left to it, see `begin_worker`.
    gc.collect()
    batches = iter(loader)
    try:
        yield from batches
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other way


class _Numbered(NamedTuple):
    number: int
    indices: list[int]


@dataclass(frozen=True)
class _Seeded(Dataset[Any]):
    """Data whose random numbers depend only on the batch, whatever the workers or resumes."""

    data: MapDataset | SampleDataset
    order: Order

    def __getitems__(self, batch: _Numbered) -> Any:
        seed_everything(self.order.random_seed(batch.number))
        return fetch(self.data, batch.indices)


@dataclass(frozen=True)
class _From:
    order: Order
    start: int

    def __iter__(self) -> Iterator[_Numbered]:
        return map(_Numbered, count(self.start), self.order.starting_at(self.start))


def _collated(collate: Collate, samples: Any) -> Batch:
    with blamed_on("the task's collate, or torch's default_collate"):
        return collate(samples)


def _whole_number(items: object) -> int:
    """Return a count of items as an int, from an int, a tensor or a NumPy integer."""
    try:
        count = operator.index(items)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        count = -1
    if count < 0 or isinstance(items, bool):
        raise ConfigError(
            f"The task's items must return the number of items in a batch, got {items!r}. Return a "
            "whole number of 0 or more."
        )
    return count


def _stacked(fetched: Any) -> Any:
    """Return data that is stacked already, or stack a list of samples."""
    return default_collate(fetched) if isinstance(fetched, list) else fetched


def begin_worker(worker: int) -> None:
    """Make a worker ignore signals: the run ends it, and needs its batches until then."""
    gc.freeze()
    # A terminal sends Ctrl-C, and SIGHUP when it is closed, to every process of the run, and a
    # scheduler SIGTERM. The trainer finishes its step first and needs batches for it; it ends its
    # workers itself.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _copied_ahead(batches: Batches, device: torch.device, *, depth: int) -> Batches:
    """Yield `batches` on a CUDA device, `depth` of them copied before they are needed."""
    copying = torch.cuda.Stream(device)
    waiting: deque[tuple[Batch, torch.cuda.Event]] = deque()
    for batch in batches:
        with torch.cuda.stream(copying):
            copies = map_tensors(batch, lambda t: t.pin_memory().to(device, non_blocking=True))
            waiting.append((copies, copying.record_event()))
        if len(waiting) > depth:
            ready, copied = waiting.popleft()
            using = torch.cuda.current_stream(device)
            using.wait_event(copied)
            for tensor in tensors_in(ready):
                # Else its memory could be given to the next copy while a kernel still reads it.
                tensor.record_stream(using)
            yield ready


def batch_order(samples: int, recipe: Recipe, *, rank: int = 0, ranks: int = 1) -> Order:
    """Return the order of a recipe's samples, as one of several ranks reads them."""
    return Order(
        samples=samples, batch_size=recipe.batch_size, seed=recipe.seed, rank=rank, ranks=ranks
    )


def make_batches(
    task: Task, recipe: Recipe, order: Order, *, start: int, device: torch.device
) -> BatchStream:
    """Return the batches of a run from batch `start` on."""
    return BatchStream(
        task.train_data,
        order,
        start=start,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        device=device,
        collate=task.collate,
        count=task.items,
    )
