"""Sharded checkpoints: each rank writes its shards, and any number of ranks reads them back.

A folder has one safetensors file per rank that wrote something, and `index.json`, which says where
each part of each tensor is. It is written under another name, synced and renamed by rank 0.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from os import getpid
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowcast.errors import CheckpointError, UnsupportedError
from narrowcast.hardware.transfers import HostCopies, free, to_host
from narrowcast.kernels.adamw.twin import BLOCK, decode, encode
from narrowcast.kernels.launch import PLAIN
from narrowcast.plain_files import read_plain
from narrowcast.precision.dtensor import as_sharded, local_part, placed_like
from narrowcast.precision.weights.master import SCALE
from narrowcast.runs.writing import (
    MARK,
    explain_write_error,
    remove,
    remove_leftovers,
    sync_folder,
    write_text,
)
from narrowcast.training.checkpoints.frozen import checksums
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.checkpoints.tree import (
    CHECKSUM_THREADS,
    flatten_named,
    joined_name,
    unflatten,
    write_tensors,
)

FORMAT = 1
"""Version of the layout; readers raise for any other."""
INDEX = "index.json"
ADVICE = ". Load another checkpoint, or start the run again."
"""Ends the message of a damaged checkpoint."""
PREVIOUS = ".previous"
"""Follows the name of a checkpoint that is replaced, until the new one has its name."""
CODES = (torch.int8, torch.uint8)
"""Dtypes of 8-bit moments, whose scales belong to blocks of a shard."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor: where it begins, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls(offset=(0,) * len(shape), shape=tuple(shape))

    def overlap(self, other: "Box") -> "Box":
        """Return what both have, with a length of 0 or less where they do not meet."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = zip(begin, self._end, other._end, strict=True)
        return Box(offset=begin, shape=tuple(min(a, b) - start for start, a, b in ends))

    def slices_in(self, other: "Box") -> tuple[slice, ...]:
        """Return where this box is in the tensor that holds `other`."""
        pairs = zip(self.offset, other.offset, self.shape, strict=True)
        return tuple(slice(mine - its, mine - its + n) for mine, its, n in pairs)

    @property
    def size(self) -> int:
        """Number of elements; 0 for an overlap of boxes that do not meet."""
        return math.prod(self.shape) if all(n > 0 for n in self.shape) else 0

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedSnapshot:
    """This rank's part of a checkpoint, and what the index says of all of it."""

    tensors: Callable[[], dict[str, Tensor]]
    """Waits for the tensors to be on the host, and returns them."""
    chunks: dict[str, dict[str, Any]]
    """What the index says of each part that this rank writes."""
    index: dict[str, Any]


def take_sharded_snapshot(
    state: dict[str, Any], ranks: CheckpointRanks, *, copied: bool = False
) -> ShardedSnapshot:
    """Take this rank's part of `state`. Runs collectives.

    With `copied`, training may continue while it is written.
    """
    named = ranks.together(lambda: _Named(state))
    described = [f"{name} {_outline(tensor)}" for name, tensor in named.tensors.items()]
    if not all(ranks.same([json.dumps(described)])):
        raise CheckpointError(
            "All ranks must save tensors of the same names and shapes, but some ranks have "
            "others. Save each stage of a pipeline as a checkpoint of its own."
        )
    tree = ranks.first(named.tree)
    patches = ranks.gather([] if tree == named.tree else _patches(tree, named.tree))
    firsts = [named.aliases.get(name, "") for name in named.tensors]
    alike = zip(named.tensors, ranks.same(firsts), strict=True)
    index = {
        "format": FORMAT,
        "ranks": ranks.count,
        "state": tree,
        "patches": {str(rank): each for rank, each in enumerate(patches) if each},
        "aliases": {n: named.aliases[n] for n, same in alike if same and n in named.aliases},
    }
    plain = {name: each for name, each in named.tensors.items() if as_sharded(each) is None}
    sums = checksums(plain.items()) if ranks.count > 1 else dict.fromkeys(plain, "")
    alike = zip(sums, ranks.same(list(sums.values())), strict=True)
    by_rank = {name for name, same in alike if not same}
    return ranks.together(lambda: _snapshot(named, index, by_rank, ranks.rank, copied=copied))


def write_sharded(
    taken: ShardedSnapshot,
    path: Path,
    ranks: CheckpointRanks,
    *,
    also: Callable[[Path, str], None] = lambda folder, digest: None,
) -> int:
    """Write a checkpoint with all other ranks, and return its size in bytes.

    A crash at any time leaves the checkpoint that was at `path`, or the new one. Rank 0 calls
    `also(folder, digest)` to write more files beside the index of that digest.
    """
    folder = path.with_name(ranks.first(f"{path.name}{MARK}{getpid()}"))
    try:
        ranks.first_does(lambda: _begin(folder, path))
        parts = ranks.gather(ranks.together(lambda: _write_file(taken, folder, ranks.rank)))
        ranks.first_does(lambda: _finish(folder, path, taken.index, parts, also))
    finally:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                remove(folder)
    return sum(part["bytes"] for part in parts)


def read_sharded(
    path: Path,
    ranks: CheckpointRanks,
    *,
    like: Callable[[str], Tensor | None] = lambda name: None,
    largest: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Return the state in `path` with tensors on the CPU, sharded as those that `like` returns.

    Each rank reads the parts that it needs. On another number of ranks, what differed by rank is
    that of rank r modulo the saved number, or the elementwise maximum where `largest` says so.
    """
    reader = ranks.together(lambda: _Reader(existing_checkpoint(path), ranks, like, largest))
    if not all(ranks.same([reader.digest])):
        raise CheckpointError(
            f"The ranks do not see the same checkpoint at {path}. Load it from a folder that all "
            "ranks share."
        )
    ranks.together(reader.verify)
    return ranks.together(reader.state)


def index_digest(path: Path, *, content: bool) -> str:
    """Return the digest of the index in `path`, after checking the files in this process alone.

    With `content` also every value in them, otherwise their sizes.
    """
    alone = CheckpointRanks(alone=True)
    reader = _Reader(path, alone, lambda name: None, lambda name: False)
    reader.verify(content=content)
    return reader.digest


def existing_checkpoint(path: Path) -> Path:
    """Return `path`, or what a crash left of it while it was replaced."""
    previous = path.with_name(path.name + PREVIOUS)
    return previous if previous.is_dir() and not path.is_dir() else path


@final
class _Named:
    """The tensors of a state by name, and which of them are the same memory."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.locals: dict[str, Tensor] = {}
        """The part of each tensor on this rank."""
        self.aliases: dict[str, str] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self.tree = flatten_named(state, self._name)

    def get_scale(self, name: str) -> Tensor | None:
        """Return the scales of 8-bit codes."""
        codes = self.tensors[name].dtype in CODES
        return self.tensors.get(name + SCALE) if codes else None

    def has_codes(self, name: str) -> bool:
        """Return whether these are the scales of 8-bit codes."""
        codes = self.tensors.get(name.removesuffix(SCALE))
        return name.endswith(SCALE) and codes is not None and codes.dtype in CODES

    def _name(self, tensor: Tensor, path: tuple[object, ...]) -> str:
        name = joined_name(path, self.tensors)
        if type(tensor) not in PLAIN and as_sharded(tensor) is None:
            raise UnsupportedError(
                f"{name} must be a plain tensor or a DTensor to be saved, got a "
                f"{type(tensor).__name__}. Use an optimizer whose state is plain tensors."
            )
        local = local_part(tensor)
        memory = (local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype)
        if local.numel() and (first := self._names.setdefault(memory, name)) != name:
            self.aliases[name] = first
        self.tensors[name], self.locals[name] = tensor, local
        return name


def _outline(tensor: Tensor) -> str:
    # What differs by rank may have another shape there.
    return f"{tensor.dtype} {list(tensor.shape) if as_sharded(tensor) is not None else ''}"


def own_box(tensor: Tensor, box_of_shard: Callable[..., Box] | None = None) -> Box:
    """Return which part of a tensor this rank holds."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return Box.whole(tuple(tensor.shape))
    local = local_part(tensor)
    place = box_of_shard or _box_of_shard
    return place(sharded.device_mesh, sharded.placements, tuple(tensor.shape), tuple(local.shape))


def _box_of_shard(
    mesh: Any, placements: tuple[Any, ...], whole: tuple[int, ...], local: tuple[int, ...]
) -> Box:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(
            f"A checkpoint holds sharded or replicated tensors, got {placements}. Call "
            "redistribute() on the tensor first."
        )
    if 0 in local:
        return Box(offset=(0,) * len(local), shape=local)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    if tuple(shape) != local:
        raise UnsupportedError(
            f"A checkpoint holds shards that are one block of a tensor, got a shard of {local} "
            f"placed as {placements}. Shard it in another way."
        )
    return Box(offset=tuple(offset), shape=local)


def _is_written_here(tensor: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same shard."""
    sharded = as_sharded(tensor)
    coordinates = sharded.device_mesh.get_coordinate()
    if coordinates is None:  # of another mesh
        return False
    placed = zip(coordinates, sharded.placements, strict=True)
    return all(place == 0 for place, placement in placed if placement.is_replicate())


def _snapshot(
    named: _Named, index: dict[str, Any], by_rank: set[str], rank: int, *, copied: bool
) -> ShardedSnapshot:
    kinds, mine, chunks = dict[str, Any](), dict[str, Tensor](), dict[str, Any]()
    box_of_shard = cache(_box_of_shard)  # most shards have the shape of another, and a box is slow
    for name, tensor in named.tensors.items():
        if name in index["aliases"] or named.has_codes(name):
            continue
        sharded = as_sharded(tensor) is not None
        scale = named.get_scale(name)
        kinds[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "by_rank": name in by_rank,
            "scale": None if scale is None else name + SCALE,
        }
        local, box = named.locals[name], own_box(tensor, box_of_shard)
        if sharded:
            writes = _is_written_here(tensor) and local.numel() > 0
        else:
            writes = name in by_rank or rank == 0
        if writes:
            mine[name] = local
            chunks[name] = {"offset": list(box.offset), "shape": list(box.shape)}
            if scale is not None:
                mine[name + SCALE] = named.locals[name + SCALE]
                chunks[name]["strides"] = list(local.stride())
    tensors = HostCopies(mine).wait if copied else partial(to_host, mine)
    return ShardedSnapshot(tensors=tensors, chunks=chunks, index={**index, "tensors": kinds})


def _patches(first: Any, own: Any, path: tuple[Any, ...] = ()) -> list[list[Any]]:
    """Return what of a rank's JSON state differs from that of rank 0, as paths and values."""
    match first, own:
        case dict(), dict() if first.keys() == own.keys():
            return [each for key in own for each in _patches(first[key], own[key], (*path, key))]
        case list(), list() if len(first) == len(own):
            pairs = enumerate(zip(first, own, strict=True))
            return [each for i, pair in pairs for each in _patches(*pair, (*path, i))]
        case _:
            return [] if repr(first) == repr(own) else [[list(path), own]]


def _patched(tree: Any, patches: list[list[Any]]) -> Any:
    """Return the state of a rank: that of rank 0 with its own values in it."""
    whole: Any = {"": json.loads(json.dumps(tree))}
    for path, value in patches:
        keys: list[Any] = ["", *path]
        inside = whole
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = value
    return whole[""]


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _begin(folder: Path, path: Path) -> None:
    """Make the folder to write into, and put back what a crash left half replaced."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        previous = path.with_name(path.name + PREVIOUS)
        if previous.is_dir():
            if path.is_dir():
                remove(previous)
            else:
                previous.rename(path)
        for name in (path.name, previous.name):
            remove_leftovers(path.parent, of=f"{name}{MARK}")
        folder.mkdir()


def _write_file(taken: ShardedSnapshot, folder: Path, rank: int) -> dict[str, Any]:
    """Write this rank's file, and return what the index says of it."""
    tensors = taken.tensors()
    if not tensors:
        return {"bytes": 0, "chunks": {}}
    file = folder / _file(rank)
    with _writing(file), ThreadPoolExecutor(CHECKSUM_THREADS, "checksum") as threads:
        matched = threads.map(_checksum, tensors.values())
        folder.mkdir(exist_ok=True)  # network file systems show it late
        write_tensors(file, tensors, metadata={"rank": str(rank)})
        sums = dict(zip(tensors, matched, strict=True))
    free(tensors)
    chunks = {
        name: {
            **chunk,
            "sha256": sums[name],
            **({"scale_sha256": sums[name + SCALE]} if "strides" in chunk else {}),
        }
        for name, chunk in taken.chunks.items()
    }
    return {"bytes": file.stat().st_size, "chunks": chunks}


def _finish(
    folder: Path,
    path: Path,
    index: dict[str, Any],
    parts: list[dict[str, Any]],
    also: Callable[[Path, str], None],
) -> None:
    """Write the index and what belongs to it, and give the checkpoint its name."""
    sizes = {str(rank): part["bytes"] for rank, part in enumerate(parts) if part["bytes"]}
    for number, size in sizes.items():
        file = folder / _file(int(number))
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(
                f"Rank {number} wrote a file that rank 0 does not see in {path.parent}. Write "
                "checkpoints to a folder that all ranks share."
            )
    body = {**index, "bytes": sizes, "chunks": _merged(index, parts)}
    previous = path.with_name(path.name + PREVIOUS)
    with _writing(path):
        text = json.dumps(body)
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_text(folder / INDEX, f'{{"sha256": "{digest}", "index": {text}}}')
        also(folder, digest)
        sync_folder(folder)
        if path.is_dir():
            path.rename(previous)
        folder.rename(path)
        sync_folder(path.parent)
        if previous.is_dir():
            with contextlib.suppress(OSError):
                remove(previous)


def _merged(index: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parts of each tensor by rank; of the same part on several meshes the first."""
    chunks, firsts = dict[str, dict[str, Any]](), dict[str, str]()
    for rank, part in enumerate(parts):
        for name, chunk in part["chunks"].items():
            place = f"{name} {chunk['offset']} {chunk['shape']}"
            if index["tensors"][name]["by_rank"] or place not in firsts:
                chunks.setdefault(name, {})[str(rank)] = chunk
                firsts[place] = chunk["sha256"]
            elif firsts[place] != chunk["sha256"]:
                raise CheckpointError(
                    f"Two ranks hold other values of the same part of {name}. Average or broadcast "
                    "it over the ranks before you save."
                )
    return chunks


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise what stopped a write."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Cannot write {path}: {explain_write_error(error)}.") from error


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise that a file is damaged if it cannot be read as what it should be."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, RecursionError, RuntimeError) as error:
        raise _damaged(f"{file} cannot be read: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise _damaged(f"{file} is not part of a sharded checkpoint") from error


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"{what}{ADVICE}")


@final
class _Reader(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read as this rank needs it."""

    def __init__(
        self,
        path: Path,
        ranks: CheckpointRanks,
        like: Callable[[str], Tensor | None],
        largest: Callable[[str], bool],
    ) -> None:
        self._path, self._ranks, self._like, self._largest = path, ranks, like, largest
        self._made: dict[str, Tensor] = {}
        file = path / INDEX
        if not file.is_file():
            raise CheckpointError(
                f"{path} must be a sharded checkpoint, got no {INDEX} in it. Pass the folder that "
                "save_checkpoint wrote."
            )
        with _reading(file):
            text = read_plain(file).decode()
            described = json.loads(text)
            self._index: dict[str, Any] = described["index"]
            self.digest: str = described["sha256"]
            content = json.dumps(self._index)
        if hashlib.sha256(content.encode()).hexdigest() != self.digest:
            raise _damaged(f"{file} was changed after it was written")
        if (layout := self._index.get("format")) != FORMAT:
            raise CheckpointError(
                f"{file} must have layout {FORMAT}, got {layout}. Load it with the version of "
                "narrowcast that wrote it."
            )
        self._saved_ranks = int(self._index["ranks"])
        names = self._index["tensors"]
        self._codes_by_scale = {
            each["scale"]: name for name, each in names.items() if each["scale"]
        }

    def state(self) -> Any:
        """Return the state as this rank had it, or one of those that saved."""
        patches = self._index["patches"].get(str(self._source_rank), [])
        with _reading(self._path / INDEX):
            return unflatten(_patched(self._index["state"], patches), self)

    def verify(self, *, content: bool = True) -> None:
        """Raise if a file is missing, cut or changed; each rank reads some of the files."""
        for number, (rank, size) in enumerate(self._index["bytes"].items()):
            file = self._path / _file(int(rank))
            if not file.is_file():
                raise _damaged(f"{file} is missing")
            if (actual := file.stat().st_size) != size:
                raise _damaged(f"{file} must have {size} bytes, got {actual}")
            if content and number % self._ranks.count == self._ranks.rank:
                self._verify_content(file, rank)

    def _verify_content(self, file: Path, rank: str) -> None:
        expected = dict[str, str]()
        for name, by_rank in self._index["chunks"].items():
            if (chunk := by_rank.get(rank)) is not None:
                expected[name] = chunk["sha256"]
                if "scale_sha256" in chunk:
                    expected[name + SCALE] = chunk["scale_sha256"]
        with (
            _reading(file),
            safe_open(file, "pt") as content,
            ThreadPoolExecutor(thread_name_prefix="checksum") as threads,
        ):
            sums = threads.map(lambda name: _checksum(content.get_tensor(name)), expected)
            results = dict(zip(expected, sums, strict=True))
        if changed := [name for name in expected if results[name] != expected[name]]:
            raise _damaged(
                f"{file} was changed after it was written: {changed[0]} has other values"
            )

    def __len__(self) -> int:
        return len(self._index["tensors"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index["tensors"])

    def __getitem__(self, name: str) -> Tensor:
        name = self._index["aliases"].get(name, name)
        if name not in self._made:
            if name in self._codes_by_scale:
                self[self._codes_by_scale[name]]  # brings its scales
            else:
                self._read(name)
        return self._made[name]

    @property
    def _source_rank(self) -> int:
        return self._ranks.rank % self._saved_ranks

    def _read(self, name: str) -> None:
        entry = self._index["tensors"][name]
        chunks = self._index["chunks"].get(name, {})
        if entry["by_rank"]:
            self._read_by_rank(name, chunks)
            return
        shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
        like = self._like(name)
        if like is None or tuple(like.shape) != shape or as_sharded(like) is None:
            like = None
        box = Box.whole(shape) if like is None else own_box(like)
        local = torch.empty(box.shape, dtype=dtype)
        if entry["scale"]:
            strides = local.stride() if like is None else local_part(like).stride()
            local = torch.empty_strided(box.shape, strides, dtype=dtype)
            self._made[entry["scale"]] = self._read_codes(name, box, chunks, into=local)
        else:
            self._fill(name, box, chunks, into=local)
        self._made[name] = local if like is None else placed_like(local, like)

    def _read_by_rank(self, name: str, chunks: Mapping[str, Any]) -> None:
        largest = self._ranks.count != self._saved_ranks and self._largest(name)
        sources = list(chunks) if largest else [str(self._source_rank)]
        scale = self._index["tensors"][name]["scale"]
        for each in (name, *([scale] if scale else [])):
            tensors = [self._part(each, rank) for rank in sources]
            self._made[each] = torch.stack(tensors).amax(0) if largest else tensors[0]

    def _part(self, name: str, rank: str) -> Tensor:
        file = self._path / _file(int(rank))
        with _reading(file), safe_open(file, "pt") as content:
            tensor: Tensor = content.get_tensor(name)
        return tensor

    def _overlaps(
        self, name: str, box: Box, chunks: Mapping[str, Any]
    ) -> Iterator[tuple[str, Box, Box]]:
        """Yield rank, box and common box of each saved part that `box` overlaps."""
        covered = 0
        for rank, chunk in chunks.items():
            source = Box(offset=tuple(chunk["offset"]), shape=tuple(chunk["shape"]))
            common = source.overlap(box)
            if common.size:
                covered += common.size
                yield rank, source, common
        if covered != box.size:
            raise _damaged(f"{self._path / INDEX} lacks parts of {name}")

    def _fill(self, name: str, box: Box, chunks: Mapping[str, Any], *, into: Tensor) -> None:
        for rank, source, common in self._overlaps(name, box, chunks):
            file = self._path / _file(int(rank))
            with _reading(file), safe_open(file, "pt") as content:
                if not common.shape:
                    into.copy_(content.get_tensor(name))
                else:
                    part = content.get_slice(name)[common.slices_in(source)]
                    into[common.slices_in(box)] = part

    def _read_codes(
        self, name: str, box: Box, chunks: Mapping[str, Any], *, into: Tensor
    ) -> Tensor:
        """Read 8-bit codes and return their scales, exact where all of a block had one scale.

        Other blocks are decoded and encoded again, rounded to the nearest code.
        """
        self._fill(name, box, chunks, into=into)
        scales = torch.empty_strided(box.shape, into.stride(), dtype=torch.float32)
        for rank, source, common in self._overlaps(name, box, chunks):
            spread = self._part(name + SCALE, rank).repeat_interleave(BLOCK)
            scales[common.slices_in(box)] = _laid(spread, chunks[rank])[common.slices_in(source)]
        if not into.numel():
            return torch.empty(0)
        flat = _in_memory_order(scales)
        blocks = torch.cat([flat, flat[-1:].expand(-flat.numel() % BLOCK)]).view(-1, BLOCK)
        result, mixed = blocks.amax(1), blocks.amax(1) != blocks.amin(1)
        if mixed.any():
            values = torch.empty_strided(box.shape, into.stride(), dtype=torch.float32)
            for rank, source, common in self._overlaps(name, box, chunks):
                part = self._decoded(name, rank, chunks[rank])
                values[common.slices_in(box)] = part[common.slices_in(source)]
            middle = torch.full((into.numel(),), 2**15, dtype=torch.int64)
            signed = into.dtype == torch.int8
            codes, fresh = encode(_in_memory_order(values), middle, signed=signed)
            here = mixed.repeat_interleave(BLOCK)[: into.numel()]
            _in_memory_order(into)[here] = codes[here]
            result[mixed] = fresh[mixed]
        return result

    def _decoded(self, name: str, rank: str, chunk: Mapping[str, Any]) -> Tensor:
        saved = self._part(name, rank)
        codes = torch.empty_strided(chunk["shape"], chunk["strides"], dtype=saved.dtype)
        flat = _in_memory_order(codes.copy_(saved))
        return _laid(decode(flat, self._part(name + SCALE, rank)), chunk)


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid(flat: Tensor, chunk: Mapping[str, Any]) -> Tensor:
    """Return values in memory order as the part of a tensor that they are."""
    return flat.as_strided(chunk["shape"], chunk["strides"])
