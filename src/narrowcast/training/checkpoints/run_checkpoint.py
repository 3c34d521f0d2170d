"""`save_checkpoint` and `load_checkpoint`: a prepared run in a loop of your own, on any ranks."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.precision.dtensor import as_sharded, local_part, placed_like
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import (
    OUTLINE,
    collect_parts,
    load_state,
    state_outline,
)
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.training.checkpoints.ranks import CheckpointRanks
from narrowcast.training.checkpoints.sharded import (
    ShardedSnapshot,
    index_digest,
    read_sharded,
    take_sharded_snapshot,
    write_sharded,
)
from narrowcast.training.checkpoints.tree import flatten_named, joined_name, unflatten

NOT_SENT = (torch.int16, torch.uint16)
"""Dtypes of the digits of split weights, which gloo cannot send."""
RUN, EXTRA = "run", "extra"
"""The parts of such a checkpoint."""


@final
class PendingSave:
    """A checkpoint that may still be written in the background."""

    def __init__(self, path: Path, writing: Future[int]) -> None:
        self.path, self._writing = path, writing

    @property
    def done(self) -> bool:
        """Whether it is written, or failed."""
        return self._writing.done()

    def wait(self) -> int:
        """Wait until the checkpoint is complete, and return its size in bytes.

        Raises:
            CheckpointError: It could not be written. The one before is unchanged.
        """
        return self._writing.result()


_PENDING: "weakref.WeakKeyDictionary[Engine, PendingSave]" = weakref.WeakKeyDictionary()
"""The last save of each run that was not waited for."""


def save_checkpoint(
    run: Prepared,
    folder: str | Path,
    *,
    extra: dict[str, Any] | None = None,
    background: bool = False,
) -> PendingSave:
    """Save a run to a folder, with or without a process group.

    With a process group, every rank must call it with the same folder, which all ranks share. Each
    rank writes its shards. What all ranks hold alike is written once. An older checkpoint in the
    folder is replaced when the new one is complete.

    Args:
        run: The prepared run.
        folder: The checkpoint. Its parent may hold other checkpoints.
        extra: Plain values and tensors to save with it, such as the position in the data and the
            state of random generators. They may differ by rank.
        background: Return when everything is copied, and write in a thread. The copy is on the
            GPU if there is room, else on the host. The next save or load waits for the write.
            Call `wait()` before you end the process group.

    Returns:
        The save, which is complete unless `background` is set.

    Raises:
        CheckpointError: A rank could not write. All ranks raise.
        ConfigError: `extra` has a value that is neither plain nor a tensor.
        UnsupportedError: The optimizer state or the process group is not supported.
    """
    path, ranks = _absolute(folder), CheckpointRanks()
    _wait_for_last(run.engine)
    if background and not ranks.has_own_group:
        raise UnsupportedError(
            "background=True needs a process group with gloo beside the one of training. Write "
            "background=False."
        )
    state = {RUN: ranks.together(partial(_collect, run)), EXTRA: extra or {}}
    try:
        taken = take_sharded_snapshot(state, ranks, copied=background)
    except TypeError as error:
        raise ConfigError(f"{error}. Pass plain values and tensors.") from error
    if not background:
        done = Future[int]()
        done.set_result(write_sharded(taken, path, ranks))
        return PendingSave(path, done)
    thread = ThreadPoolExecutor(1, "checkpoint")
    pending = PendingSave(path, thread.submit(write_sharded, taken, path, ranks))
    thread.shutdown(wait=False)
    _PENDING[run.engine] = pending
    return pending


def load_checkpoint(run: Prepared, folder: str | Path) -> dict[str, Any]:
    """Restore a run from a folder that `save_checkpoint` wrote, on any number of ranks.

    The run must be prepared with the same model, optimizer and settings, but it may be sharded in
    another way or not at all. With a process group, every rank must call it.

    Args:
        run: The prepared run.
        folder: The checkpoint.

    Returns:
        `extra` as this rank saved it. With more ranks than before, rank r gets that of rank r
        modulo the saved number of ranks.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or of another run. All ranks raise.
    """
    ranks = CheckpointRanks()
    _wait_for_last(run.engine)
    like = ranks.together(partial(_targets, run))
    state = read_sharded(_absolute(folder), ranks, like=like, largest=_is_amax)
    if not isinstance(state, dict) or state.keys() != {RUN, EXTRA}:
        raise CheckpointError(
            f"{folder} is a checkpoint, but not one of save_checkpoint(). Resume it with the "
            "program that wrote it."
        )
    mine = state[RUN]
    mine[OUTLINE] = state_outline(mine)
    ranks.together(partial(load_state, run.engine, mine))
    extra: dict[str, Any] = state[EXTRA]
    return extra


@final
@dataclass(frozen=True)
class StoredShards:
    """The state of a sharded run in the checkpoint of a recipe; nothing of it is read yet."""

    path: Path

    def verify(self) -> None:
        """Raise if a value was changed; reads all files in this process."""
        index_digest(self.path, content=True)

    def read(self, run: Prepared | None = None) -> dict[str, Any]:
        """Return it sharded as `run` is, on all ranks together; without one whole, in this process.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        ranks = CheckpointRanks(alone=run is None)
        like = (lambda name: None) if run is None else ranks.together(partial(_targets, run))
        state: dict[str, Any] = read_sharded(self.path, ranks, like=like, largest=_is_amax)[RUN]
        return {**state, OUTLINE: state_outline(state)}


def take_run_snapshot(
    state: dict[str, Any], ranks: CheckpointRanks, *, copied: bool
) -> ShardedSnapshot:
    """Take this rank's part of a run's state, which `StoredShards` reads. Runs collectives."""
    parts = {part: value for part, value in state.items() if part != OUTLINE}
    return take_sharded_snapshot({RUN: parts}, ranks, copied=copied)


def whole_state(state: dict[str, Any], *, needed: bool) -> dict[str, Any]:
    """Return a run's state with whole tensors on the host instead of shards; runs collectives.

    Where it is not `needed`, as on all ranks but the one that writes, they are empty.
    """
    made = dict[tuple[object, ...], Tensor]()

    def whole(tensor: Tensor) -> Tensor:
        sharded = as_sharded(tensor)
        if sharded is None:
            return tensor
        if tensor.dtype in NOT_SENT:
            sharded = as_sharded(placed_like(local_part(tensor).to(torch.int32), tensor))
        # Of tied weights too: ranks without a part of them cannot tell that they are.
        full: Tensor = sharded.full_tensor().to(tensor.dtype)
        if not needed:
            return full.new_empty(0, device="cpu")
        local = local_part(tensor)
        memory = (local.data_ptr(), tensor.shape, tensor.dtype) if local.numel() else (id(full),)
        return made[memory] if memory in made else made.setdefault(memory, full.cpu())

    result: dict[str, Any] = map_tensors(state, whole)
    return result


def sharded_state(run: Prepared, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of whole tensors with those that the run shards sharded as it does."""
    like, tensors = _targets(run), dict[str, Tensor]()

    def place(tensor: Tensor, path: tuple[object, ...]) -> str:
        name = joined_name(path, tensors)
        target = like(name)
        sharded = None if target is None else as_sharded(target)
        is_placed = as_sharded(tensor) is not None  # a frozen weight of this run
        if sharded is not None and not is_placed and tensor.shape == sharded.shape:
            on_device = tensor.to(sharded.device)
            # Every rank has read the whole: nothing has to be sent.
            tensor = distribute_tensor(
                on_device, sharded.device_mesh, sharded.placements, src_data_rank=None
            )
        tensors[name] = tensor
        return name

    from torch.distributed.tensor import distribute_tensor

    tree = flatten_named({RUN: state}, place)
    placed: dict[str, Any] = unflatten(tree, tensors)[RUN]
    placed[OUTLINE] = state_outline(placed)
    return placed


def run_targets(state: dict[str, Any], *, name: str) -> dict[str, Tensor]:
    """Return the tensors of a run's state by the names they are saved under."""
    targets = dict[str, Tensor]()

    def note(tensor: Tensor, path: tuple[object, ...]) -> str:
        saved = joined_name(path, targets)
        targets[saved] = tensor
        return saved

    flatten_named({name: state}, note)
    return targets


def _collect(run: Prepared) -> dict[str, Any]:
    run.engine.weights.ownership.check_not_swapped(doing="save_checkpoint()")
    return collect_parts(run.engine)


def _targets(run: Prepared) -> Callable[[str], Tensor | None]:
    """Return a function from the name of a saved tensor to the one that it is loaded into."""
    run.engine.weights.ownership.check_not_swapped(doing="load_checkpoint()")
    weights = run.engine.weights
    targets = run_targets(collect_parts(run.engine), name=RUN)
    # A run without steps has no moments and no lookahead points yet.
    for i, weight in enumerate(weights.all):
        targets.setdefault(f"{RUN}/lookahead/leads/{i}", weight)
    moments = {
        f"{RUN}/optimizer/{number}/state/{i}": weight
        for number, each in enumerate(member_optimizers(weights.optimizer))
        for i, weight in enumerate(weights.held[each])
    }
    return lambda name: targets.get(name, moments.get(name.rpartition("/")[0]))


def _is_amax(name: str) -> bool:
    """Return whether a tensor is part of the amax histories, which are of each rank's own data."""
    return name.startswith(f"{RUN}/amax/")


def _wait_for_last(engine: Engine) -> None:
    pending = _PENDING.pop(engine, None)
    if pending is not None:
        pending.wait()


def _absolute(folder: str | Path) -> Path:
    return Path(folder).expanduser().absolute()
