"""Start the ranks of a run with torchrun, and find the folder again after a restart."""

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from narrowcast.config.common_sections import ParallelSection
from narrowcast.errors import CheckpointError, Interrupted, NarrowcastError, RankError
from narrowcast.runner.changes import continued
from narrowcast.runs import RunFolder
from narrowcast.training.parallel import KEYS, RESTARTS, RunRanks, launcher_store, running_ranks

FOLDER = f"{KEYS}/folder"


def has_to_start(settings: ParallelSection) -> bool:
    """Return whether this process has to start the ranks of a run."""
    return (settings.ranks or 1) > 1 and running_ranks() == 1


def start_ranks(arguments: Sequence[str], settings: ParallelSection) -> int:
    """Run `narrowcast` with `arguments` on each rank; return the first failure's exit code.

    Raises if a signal ended a rank, or this process.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The rank that failed has said why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    options = [
        "--standalone",
        f"--nproc-per-node={settings.ranks}",
        f"--max-restarts={settings.restarts}",
        # RunRanks save a checkpoint before they end.
        f"--shutdown-timeout={round(settings.timeout)}",
    ]
    try:
        run(parse_args([*options, "-m", "narrowcast", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        raise RankError(f"{name} ended rank {rank} (process {failure.pid}).") from error
    except SignalException as error:
        raise Interrupted(f"{signal.Signals(error.sigval).name} ended the run.") from error
    return 0


def parallel_settings(folder: str | Path, overrides: Sequence[str]) -> ParallelSection:
    """Return the `parallel` settings of a run in a folder; if they cannot be read, the defaults.

    Resuming the run reports what is wrong with the folder.
    """
    try:
        with RunFolder.open(folder) as run:
            return continued(run, overrides).after.recipe.parallel
    except NarrowcastError:
        return ParallelSection()


def remember_folder(ranks: RunRanks, folder: Path) -> None:
    """Store the folder of a new run where ranks that torchrun restarts find it."""
    store = launcher_store() if ranks.several and ranks.is_main else None
    if store is not None:
        store.set(FOLDER, str(folder.absolute()))


def folder_before_restart(ranks: RunRanks, out: str | None) -> Path | None:
    """Return the folder of the run if torchrun restarted its ranks and it had begun."""
    if not ranks.several or int(os.environ.get(RESTARTS, "0")) == 0:
        return None
    folder = None
    if ranks.is_main:
        store = launcher_store()
        if store is not None and store.check([FOLDER]):
            folder = Path(store.get(FOLDER).decode())
        elif out is not None:
            folder = Path(out)
        if folder is not None and not _holds_run(folder):
            folder = None
    return ranks.from_main(folder)


def _holds_run(folder: Path) -> bool:
    try:
        RunFolder.open(folder)
    except CheckpointError:
        return False
    return True
