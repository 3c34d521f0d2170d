"""The processes that train one model together: how they find each other, share numbers and end.

Each process is a rank. Every rank takes the same steps and the same decisions; rank 0 writes.
"""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from narrowcast.config.common_sections import ParallelSection
from narrowcast.errors import ConfigError, NarrowcastError, RankError, UnsupportedError

Value = TypeVar("Value")

KEYS = "narrowcast"
"""Prefix of our keys in the store of the process group."""
PULSE_SECONDS = 0.5
"""Seconds between two signs of life."""
GRACE_SECONDS = 4.0
"""Seconds to find out which rank stopped, before the launcher ends this one too."""
AGENT_STORE, RESTARTS = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
"""Variables of torchrun: whether its store outlives the ranks, and how often it restarted them."""
JOINING = "joining the other ranks"


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """The place that a launcher gave this process among the processes of a run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    """torchrun (and what sets the same variables) or Slurm."""
    address: str = ""
    port: int = 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun, accelerate launch or Slurm gave; None for a lone process."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = _number(environment, "WORLD_SIZE")
        place = Place(
            rank=_number(environment, "RANK"),
            size=size,
            local_rank=_number(environment, "LOCAL_RANK", default=0),
            local_size=_number(environment, "LOCAL_WORLD_SIZE", default=size),
            launcher="torchrun",
            address=environment.get("MASTER_ADDR", ""),
            port=_number(environment, "MASTER_PORT", default=0),
        )
    elif "SLURM_PROCID" in environment:
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        size = _number(environment, next((n for n in names if n in environment), ""), default=1)
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_NTASKS", ""))
        job = _number(environment, "SLURM_JOB_ID", default=0)
        place = Place(
            rank=_number(environment, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environment, "SLURM_LOCALID", default=0),
            local_size=int(match[0]) if (match := re.match(r"\d+", per_node)) else size,
            launcher="Slurm",
            address=environment.get("MASTER_ADDR")
            or _first_node(environment.get("SLURM_JOB_NODELIST", "")),
            # The same number on all nodes, and another one for another job.
            port=_number(environment, "MASTER_PORT", default=15_000 + job % 20_000),
        )
    else:
        return None
    if not 0 <= place.rank < place.size:
        raise ConfigError(
            f"The rank of a process must be below the number of processes, got rank {place.rank} "
            f"of {place.size}. Check the variables that the launcher sets."
        )
    return place if place.size > 1 else None


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name, "")
    if text.isdecimal():
        return int(text)
    if text or default is None:
        raise ConfigError(
            f"{name} must be a whole number, got {text!r}. Start all processes with torchrun."
        )
    return default


def _first_node(nodes: str) -> str:
    """Return the first host of a list of Slurm: `gpu[03-05,9],cpu1` starts with gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else "127.0.0.1"


def running_ranks() -> int:
    """Return the number of ranks of this run: an existing process group, a launcher's, or 1."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    place = find_place()
    return 1 if place is None else place.size


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RunRanks:
    """The ranks of a run, as seen by one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    pulse: "Pulse | None" = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the records and the files of the run."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    def device(self, requested: str) -> str:
        """Return the device of this rank for the recipe's `device`."""
        if not self.several or requested == "cpu":
            return requested
        if requested == "auto" and not torch.cuda.is_available():
            return "cpu"
        if requested in ("auto", "cuda"):
            return f"cuda:{self.local_rank}"
        raise ConfigError(
            f"device must be auto, cuda or cpu with several ranks, got {requested}. Each rank uses "
            "the GPU of its LOCAL_RANK."
        )

    def require(self, settings: ParallelSection) -> None:
        """Raise if the settings ask for another number of ranks."""
        if settings.ranks in (None, self.size):
            return
        raise ConfigError(
            f"parallel.ranks must be the number of processes that the launcher started, "
            f"{self.size}, got {settings.ranks}. Leave parallel.ranks out."
            if self.several
            else f"parallel.ranks={settings.ranks} needs as many processes, got one. Use the "
            "command line, which starts them, or `torchrun --nproc-per-node "
            f"{settings.ranks} -m narrowcast`."
        )

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place. Does not synchronise with a GPU."""
        if self.several:
            torch.distributed.all_reduce(tensor)
        return tensor

    def from_main(self, value: Value) -> Value:
        """Return the value of rank 0 on every rank. Synchronises."""
        if not self.several:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    @torch.no_grad()
    def broadcast_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on rank 0, in place."""
        for tensor in tensors:
            # As bytes: gloo sends no 16-bit integers.
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            torch.distributed.broadcast(content, 0)
            tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in order, on every rank. Synchronises."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gathered(None)

    def at(self, what: str) -> None:
        """Note what this rank is about to do, for the message of the others if it stops."""
        if self.pulse is not None:
            self.pulse.doing = what

    @contextlib.contextmanager
    def ending_together(self, resume: Callable[[], str] = str) -> Iterator[None]:
        """Name the rank that died, hung or failed, if the others cannot be reached.

        `resume()` returns how the run can be resumed, as a sentence.
        """
        try:
            yield
        except Exception as error:
            if self.pulse is None or isinstance(error, RankError):
                raise
            if not _is_lost_peer(error):
                self.pulse.end(error)
                raise
            self.pulse.end(None)
            why = self.pulse.why_it_ended()
            raise RankError(f"{why} {resume()}".strip()) from error

    def is_said_by_main(self, error: BaseException) -> bool:
        """Return whether rank 0 ended with an error of the same kind, which it reports."""
        kind = "" if isinstance(error, RankError) else type(error).__name__
        return self.pulse is not None and self.pulse.main_ended_with(kind)

    def close(self) -> None:
        """Leave the run. The process group stays for the next one."""
        if self.pulse is not None:
            self.pulse.close()


ALONE = RunRanks()
"""A run in one process."""


def join(settings: ParallelSection, *, device: str) -> RunRanks:
    """Return the ranks of this run; create the process group if there is none yet.

    Raises if their number is not the requested one, or if they do not find each other.
    """
    distributed = torch.distributed
    exists = distributed.is_available() and distributed.is_initialized()
    place = None if exists and distributed.get_world_size() == 1 else find_place()
    size = distributed.get_world_size() if exists else 1 if place is None else place.size
    RunRanks(size=size).require(settings)
    if size == 1:
        return ALONE
    if not distributed.is_available():
        raise UnsupportedError("This build of torch has no torch.distributed. Use one process.")
    if device == "mps":
        raise UnsupportedError("device=mps has no collectives. Write device=cpu, or use one rank.")
    timeout = timedelta(seconds=settings.timeout)
    gpu = device != "cpu" and torch.cuda.is_available()
    rank = distributed.get_rank() if exists else place.rank if place else 0
    local = rank if place is None else place.local_rank
    if gpu:
        if local >= torch.cuda.device_count():
            raise UnsupportedError(
                f"Rank {rank} needs GPU {local} of this machine, which has "
                f"{torch.cuda.device_count()}. Start one process per GPU."
            )
        torch.cuda.set_device(local)
    if not exists:
        assert place is not None
        _create_group(place, "cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timeout)
    pulse = Pulse(rank=rank, size=size)
    return RunRanks(
        rank=rank,
        size=size,
        local_rank=local,
        local_size=size if place is None else place.local_size,
        pulse=pulse,
    )


def _create_group(place: Place, backend: str, *, timeout: timedelta) -> None:
    for name, value in {"MASTER_ADDR": place.address, "MASTER_PORT": str(place.port)}.items():
        if value in ("", "0"):
            raise ConfigError(
                f"{name} must say where rank 0 is, got nothing. Start the processes with torchrun, "
                f"or set {name}."
            )
        os.environ[name] = value
    try:
        torch.distributed.init_process_group(
            backend,
            store=_store_of_restart(place, timeout),
            timeout=timeout,
            rank=place.rank,
            world_size=place.size,
        )
        atexit.register(_leave_group)
    except (RuntimeError, ValueError) as error:
        text = str(error).partition("\n")[0][:200]
        raise RankError(
            f"Rank {place.rank} could not join the {place.size} ranks that {place.launcher} "
            f"announced at {place.address}:{place.port} within {timeout.total_seconds():g} s: "
            f"{text}. Check that all of them started."
        ) from error


def _store_of_restart(place: Place, timeout: timedelta) -> Any:
    """Return torchrun's store with keys of this restart; None without one, for torch's own.

    torch 2.13 shares the store between restarts, and connects to addresses of ranks that are gone.
    """
    if os.environ.get(AGENT_STORE) != "True":
        return None
    distributed: Any = torch.distributed  # has no types for its stores
    store = distributed.TCPStore(place.address, place.port, is_master=False, timeout=timeout)
    return distributed.PrefixStore(f"{KEYS}/restart/{os.environ.get(RESTARTS, '0')}", store)


def is_sharded(model: nn.Module) -> bool:
    """Return whether torch's `fully_shard` was applied to a model."""
    return hasattr(model, "set_requires_gradient_sync")


def _leave_group() -> None:
    """Destroy the process group that we created, at the end of the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@final
class Pulse:
    """Heartbeats of this rank in the store of the process group, and of the other ranks."""

    def __init__(self, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.doing = JOINING
        self._store = _default_store().clone()
        # A process may train several runs, one after the other.
        self._run = self._store.add(f"{KEYS}/runs/{rank}", 1)
        self._stop = threading.Event()
        self._beats, self._since = 0, time.monotonic()
        self._lock = threading.Lock()
        self._beat()
        self._thread = threading.Thread(target=self._keep_beating, name="pulse", daemon=True)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """Report why this rank ends; None: because another one did."""
        kind = "" if error is None else type(error).__name__
        text = "" if error is None else str(error).partition("\n")[0]
        with contextlib.suppress(RuntimeError), self._lock:
            self._store.set(self._key("ended", self._rank), json.dumps([kind, text]))

    def why_it_ended(self) -> str:
        """Return which rank died, hung or failed, and what it was doing, as sentences."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            before = {rank: self._read("pulse", rank) for rank in others}
            deadline = time.monotonic() + GRACE_SECONDS
            missing = others
            while missing and time.monotonic() < deadline:
                time.sleep(PULSE_SECONDS / 2)
                missing = [rank for rank in missing if self._read("ended", rank) is None]
                if any((self._read("ended", rank) or ["", ""])[0] for rank in others):
                    break
            ends = {rank: self._read("ended", rank) for rank in others}
            blamed = [
                f"Rank {rank} failed: {end[0]}: {end[1]}"
                for rank, end in ends.items()
                if end and end[0]
            ]
            if not blamed:
                now = {rank: self._read("pulse", rank) for rank in missing}
                blamed = [
                    _gone(rank, before[rank], alive=before[rank] != now[rank]) for rank in missing
                ]
        except RuntimeError:  # the store is gone, and with it the process that has it
            blamed = ["The process that hosts the store of the process group, rank 0, died."]
        if not blamed:
            blamed = ["The ranks lost their connection to each other."]
        return " ".join(text if text.endswith(".") else f"{text}." for text in blamed)

    def main_ended_with(self, kind: str) -> bool:
        """Return whether rank 0 ended with an error of this kind; "": of any, or for others."""
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while time.monotonic() < deadline:
            try:
                ended = self._read("ended", 0)
            except RuntimeError:
                return (
                    kind != ""
                )  # its store ended with it; of a lost rank it may have said nothing
            if ended is not None:
                return kind in ("", ended[0])
            time.sleep(PULSE_SECONDS / 10)
        return False

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _keep_beating(self) -> None:
        while not self._stop.wait(PULSE_SECONDS):
            try:
                self._beat()
            except RuntimeError:  # the store is gone
                if launcher_store() is not None:
                    # torchrun died, and its ranks would train on without it.
                    os.kill(os.getpid(), signal.SIGTERM)
                return  # that of a rank: collectives will say so

    def _beat(self) -> None:
        self._beats += 1
        sign = [self._beats, self.doing, socket.gethostname(), os.getpid()]
        with self._lock:
            self._store.set(self._key("pulse", self._rank), json.dumps(sign))

    def _read(self, what: str, rank: int) -> Any:
        key = self._key(what, rank)
        with self._lock:
            if not self._store.check([key]):
                return None
            return json.loads(self._store.get(key))

    def _key(self, what: str, rank: int) -> str:
        return f"{KEYS}/{self._run}/{what}/{rank}"


def _gone(rank: int, sign: Any, *, alive: bool) -> str:
    if sign is None:
        return f"Rank {rank} never joined"
    _, doing, host, process = sign
    what = "hangs" if alive else "died or froze"
    return f"Rank {rank} {what} while {doing} (process {process} on {host})"


def _default_store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def launcher_store() -> Any:
    """Return the store of torchrun, which outlives a restart of the ranks, or None."""
    if os.environ.get(AGENT_STORE) != "True":
        return None
    store = _default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank."""
    if isinstance(error, NarrowcastError):  # as while a checkpoint is written
        cause = error.__cause__
        return cause is not None and _is_lost_peer(cause)
    if isinstance(error, torch.distributed.DistError):
        return True
    marks = ("gloo", "NCCL", "Connection closed by peer", "ProcessGroup", "recvValue")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)
