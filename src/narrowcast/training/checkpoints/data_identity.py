"""Fingerprint of the training data, so that a run is not resumed on other data by mistake."""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from narrowcast.errors import ConfigError, blamed_on
from narrowcast.hardware.randomness import preserve_rng, seed_everything
from narrowcast.training.data import begin_worker, by_workers, fetch
from narrowcast.training.task import MapDataset, SampleDataset, Task

LOOKED_AT = 64
"""Samples to fingerprint if the data has no digest; fast even if each is an image to decode."""
IN_MEMORY = 100_000
"""Lists up to this length are fingerprinted whole, in a tenth of a second."""
READ_AGAIN = 4
"""Samples that are read twice, to check that they are reproducible."""
CHUNK = 16 * 2**20
"""Bytes that a thread hashes at a time."""

ALL, SOME, NONE = "all of it", f"{LOOKED_AT} samples spread over it", "nothing"


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The fingerprint of the data in a checkpoint."""

    samples: int
    digest: str
    """SHA-256 in hexadecimal; empty if nothing could be fingerprinted."""
    looked_at: str
    """What the digest covers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differs_from(self, saved: Mapping[str, Any]) -> str:
        """Return how this data differs from what was saved, as text, or ""."""
        if saved["samples"] != self.samples:
            return f"it had {saved['samples']} samples and now has {self.samples}"
        if not saved["digest"] or not self.digest:
            return ""
        if saved["looked_at"] != self.looked_at:
            return "its fingerprint is now computed in another way, so it cannot be compared"
        same = saved["digest"] == self.digest
        return "" if same else f"it still has {self.samples} samples, but with other values"


def identify_data(task: Task, *, workers: int = 0) -> DataIdentity:
    """Fingerprint the data of a task: by its own digest, as a whole in memory, or by samples.

    With `workers`, a separate process reads the samples: open files must not be shared with them.
    """
    data = task.train_data
    samples, looked_at = len(data), ALL
    if task.data_digest is not None:
        with blamed_on("data_digest of the task"):
            digest = task.data_digest()
        if not isinstance(digest, str) or not digest:
            raise ConfigError(
                "data_digest of the task must return a non-empty text that differs for other "
                f"data, got {digest!r}. Return e.g. narrowcast.fingerprint(array)."
            )
    elif isinstance(data, TensorDataset):
        digest = fingerprint(*data.tensors)
    elif isinstance(data, list | tuple) and samples <= IN_MEMORY:
        digest = _digest_of_value(list(data))
    else:
        looked_at = SOME
        with blamed_on("reading samples of the task's train_data"):
            digest = _digest_of_some(task, workers=workers)
    return DataIdentity(samples=samples, digest=digest, looked_at=looked_at if digest else NONE)


def fingerprint(*arrays: NDArray[Any] | Tensor) -> str:
    """Return the SHA-256 of the dtypes, shapes and values of arrays.

    Chunks are hashed in parallel without a copy, one to two gigabytes per second.
    """
    whole = hashlib.sha256()
    with ThreadPoolExecutor(thread_name_prefix="digest") as threads:
        for array in arrays:
            whole.update(f"{array.dtype} {tuple(array.shape)} ".encode())
            chunks = _chunks(array)
            # A thread costs more than to hash the few bytes of a sample.
            hashed = threads.map(_sha256, chunks) if len(chunks) > 1 else map(_sha256, chunks)
            for part in hashed:
                whole.update(part)
    return whole.hexdigest()


def _sha256(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def _chunks(array: NDArray[Any] | Tensor) -> list[memoryview]:
    if isinstance(array, Tensor):
        plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous()
        array = plain.reshape(-1).view(torch.uint8).numpy()
    flat = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]


def _digest_of_some(task: Task, *, workers: int) -> str:
    """Return the digest of samples spread over the data, or "" if they are not reproducible."""
    data = task.train_data
    count = len(data)
    shown = min(LOOKED_AT, count)
    indices = [number * (count - 1) // max(shown - 1, 1) for number in range(shown)]
    again = indices[:READ_AGAIN]
    look = _Look(data)
    if workers:
        loader = DataLoader(
            look,
            sampler=[*indices, *again],
            batch_size=None,
            num_workers=1,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),  # a run draws nothing for this
        )
        matches = list(by_workers(loader))
    else:
        with preserve_rng(next(task.model.parameters()).device):
            matches = [look[index] for index in (*indices, *again)]
    # Samples that differ at each read cannot identify the data.
    if "" in matches or matches[:READ_AGAIN] != matches[shown:]:
        return ""
    return hashlib.sha256("".join(matches[:shown]).encode()).hexdigest()


class _Look(Dataset[str]):
    """The digests of samples instead of the samples."""

    def __init__(self, data: MapDataset | SampleDataset) -> None:
        self._data = data

    def __getitem__(self, index: int) -> str:
        seed_everything(0)  # what augmentations draw from
        return _digest_of_value(fetch(self._data, [index]))


def _digest_of_value(value: Any) -> str:
    """Return the digest of a nested value, or "" if a part of it cannot be read."""
    whole = hashlib.sha256()
    try:
        for piece in _pieces(value):
            whole.update(piece)
    except (_UnknownError, RuntimeError, TypeError, ValueError):
        return ""  # a sparse tensor, an object of any kind
    return whole.hexdigest()


class _UnknownError(Exception):
    """A value whose content cannot be read."""


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the bytes of a value; different values have different bytes."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | np.generic():
            text = repr(value).encode()
            yield f"{type(value).__name__} {len(text)} ".encode()
            yield text
        case Tensor() | np.ndarray():
            if isinstance(value, np.ndarray) and value.dtype.hasobject:
                yield from _pieces(value.tolist())
            else:
                yield fingerprint(value).encode()
        case Mapping():
            yield f"{{{len(value)} ".encode()
            for key, item in value.items():
                yield from _pieces(key)
                yield from _pieces(item)
        case list() | tuple() | range():
            yield f"[{len(value)} ".encode()
            for item in value:
                yield from _pieces(item)
        case _ if hasattr(value, "__array_interface__"):  # pictures have it
            yield fingerprint(np.asarray(value)).encode()
        case _ if is_dataclass(value) and not isinstance(value, type):
            yield from _pieces([getattr(value, each.name) for each in fields(value)])
        case _:
            raise _UnknownError
