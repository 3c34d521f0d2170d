import itertools
import multiprocessing
import os
import random
import signal
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers

from narrowcast.errors import ConfigError
from narrowcast.training.data import BatchStream, Order

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Squares:
    """Sample i is i and its square."""

    samples: int

    def __len__(self):
        return self.samples

    def __getitems__(self, indices):
        i = torch.tensor(indices)
        return i, i * i


@dataclass(frozen=True)
class ProcessNumbers(Squares):
    """Every sample is the number of the process that fetched it."""

    def __getitems__(self, indices):
        return (torch.full((len(indices),), os.getpid()),)


@dataclass(frozen=True)
class Handlers(Squares):
    """Every sample says whether its process would ignore SIGINT and SIGTERM."""

    def __getitems__(self, indices):
        asked = (signal.SIGINT, signal.SIGTERM)
        return (torch.tensor([signal.getsignal(s) == signal.SIG_IGN for s in asked]),)


def stream_of(data, batch_size, *, seed, **settings):
    return BatchStream(data, Order(samples=len(data), batch_size=batch_size, seed=seed), **settings)


def first(stream, n):
    return [tuple(t.tolist() for t in batch) for batch in itertools.islice(stream, n)]


sizes = integers(1, 60).flatmap(lambda samples: integers(1, samples).map(lambda b: (samples, b)))


@given(size=sizes, seed=integers(0, 2**63 - 1), epoch=integers(0, 5))
def test_an_epoch_visits_no_sample_twice_and_fills_every_batch(size, seed, epoch):
    samples, batch_size = size
    order = Order(samples=samples, batch_size=batch_size, seed=seed)
    per_epoch = samples // batch_size
    batches = [order.indices(epoch * per_epoch + k) for k in range(per_epoch)]
    seen = list(itertools.chain(*batches))
    assert all(len(batch) == batch_size for batch in batches)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(samples))


@given(size=sizes, seed=integers(0, 2**63 - 1), start=integers(0, 200))
def test_starting_at_k_is_the_same_as_skipping_k(size, seed, start):
    order = Order(samples=size[0], batch_size=size[1], seed=seed)
    skipped = itertools.islice(order.starting_at(0), start, start + 5)
    assert list(skipped) == list(itertools.islice(order.starting_at(start), 5))


def test_a_full_epoch_is_every_sample_once():
    order = Order(samples=12, batch_size=4, seed=3)
    seen = itertools.chain(*itertools.islice(order.starting_at(0), 3))
    assert sorted(seen) == list(range(12))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(Order(samples=50, batch_size=50, seed=seed).indices(epoch))
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_batches_hold_the_samples_of_their_numbers():
    with stream_of(Squares(10), 3, seed=0, device=CPU) as stream:
        numbers, squares = next(stream)
    assert numbers.tolist() == Order(samples=10, batch_size=3, seed=0).indices(0)
    assert squares.tolist() == [i * i for i in numbers.tolist()]


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ConfigError, match=r"training samples, 5, got .*batch_size=5 or less"):
        stream_of(Squares(5), 6, seed=0, device=CPU)


def test_no_data_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"at least one sample, got 0\. Add data"):
        stream_of(Squares(0), 1, seed=0, device=CPU)


def test_workers_give_the_same_batches_in_the_same_order_as_none():
    def batches(workers):
        stream = stream_of(Squares(20), 3, seed=1, start=4, workers=workers, device=CPU)
        with stream:
            return first(stream, 15)

    assert batches(workers=2) == batches(workers=0)


def test_workers_are_other_processes_and_end_with_the_stream():
    with stream_of(ProcessNumbers(8), 2, seed=0, workers=2, device=CPU) as stream:
        fetchers = {int(next(stream)[0][0]) for _ in range(4)}
    assert os.getpid() not in fetchers
    assert len(fetchers) == 2
    for process in fetchers:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_ignore_the_signals_that_end_a_run():
    with stream_of(Handlers(8), 2, seed=0, workers=1, device=CPU) as stream:
        assert next(stream)[0].all()


@pytest.mark.parametrize("workers", [0, 1])
def test_fetching_draws_nothing_from_the_random_generator_of_the_run(workers):
    before = torch.get_rng_state()
    with stream_of(Squares(8), 2, seed=0, workers=workers, device=CPU) as stream:
        first(stream, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_on_the_gpu_are_those_on_the_cpu(workers, prefetch):
    """Each batch is read by slow work that is queued before the next copies are made."""
    data = Squares(1 << 16)
    device = torch.device("cuda")
    order = Order(samples=len(data), batch_size=1 << 12, seed=0)
    ballast = torch.randn(4096, 4096, device=device)
    sums = []
    stream = stream_of(data, 1 << 12, seed=0, workers=workers, prefetch=prefetch, device=device)
    with stream:
        for _, (numbers, squares) in zip(range(60), stream, strict=False):
            ballast = ballast @ ballast * 0 + 1
            sums.append(torch.stack([numbers.sum(), squares.sum()]) + ballast[0, 0].long() - 1)
            del numbers, squares
    expected = [
        [sum(batch), sum(i * i for i in batch)]
        for batch in itertools.islice(order.starting_at(0), 60)
    ]
    assert torch.stack(sums).tolist() == expected


def test_torchs_own_subsets_are_stacked_as_its_loader_does():
    samples = [{"x": torch.tensor([float(n)]), "y": n} for n in range(8)]
    subset = torch.utils.data.Subset(samples, [7, 5, 3, 1])
    with stream_of(subset, 4, seed=0, device=torch.device("cpu")) as stream:
        batch = next(stream)
    assert sorted(batch["y"].tolist()) == [1, 3, 5, 7]
    assert torch.equal(batch["x"].squeeze(1), batch["y"].float())


@pytest.mark.parametrize("items", [2.5, True, -1, "8"])
def test_a_count_of_items_that_is_no_whole_number_is_refused(items):
    device = torch.device("cpu")
    with (
        stream_of(Squares(8), 4, seed=0, device=device, count=lambda batch: items) as stream,
        pytest.raises(ConfigError, match="items must return the number"),
    ):
        next(stream)


class Augmented:
    """Samples that differ each time they are read, as augmentations make them."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3,), float(index)) + torch.rand(3) + random.random()


def augmented(count, *, start=0, workers):
    stream = stream_of(
        Augmented(), 8, seed=3, start=start, workers=workers, device=torch.device("cpu")
    )
    with stream:
        return list(itertools.islice(stream, count))


def test_what_workers_draw_at_random_depends_on_the_batch_alone():
    straight = augmented(12, workers=1)
    again = augmented(12, workers=2)
    resumed = augmented(5, start=7, workers=2)
    assert all(map(torch.equal, straight, again))
    assert all(map(torch.equal, straight[7:], resumed))
    assert not torch.equal(straight[0] - straight[0].round(), straight[5] - straight[5].round())


class Broken(Augmented):
    def __getitem__(self, index):
        if index == 17:
            raise OSError("picture 17 is corrupt")
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_is_named_and_no_worker_outlives_it(workers):
    """An exception is kept, with all frames it came through, by whoever looks at it."""
    stream = stream_of(Broken(), 8, seed=0, workers=workers, device=torch.device("cpu"))
    with pytest.raises(OSError, match="picture 17 is corrupt") as caught, stream:
        list(itertools.islice(stream, 5))
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "sample 17 of the task's train_data" in told
    assert not multiprocessing.active_children()


@given(size=sizes, seed=integers(0, 9), start=integers(0, 40), ranks=integers(1, 4))
def test_the_shares_of_all_ranks_are_the_batches_of_one_process(size, seed, start, ranks):
    samples, batch_size = size[0] + 4, max(size[1], ranks)
    order = Order(samples=samples, batch_size=batch_size, seed=seed)
    shares = [
        Order(samples=samples, batch_size=batch_size, seed=seed, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    streams = zip(*(share.starting_at(start) for share in shares), strict=True)
    for batch, parts in itertools.islice(zip(order.starting_at(start), streams, strict=False), 5):
        assert [batch[rank::ranks] for rank in range(ranks)] == list(parts)
    assert sum(share.share for share in shares) == pytest.approx(ranks)


def test_more_ranks_than_samples_in_a_batch_raise():
    with pytest.raises(ConfigError, match="at least the number of ranks, 4"):
        Order(samples=9, batch_size=3, seed=0, ranks=4)
