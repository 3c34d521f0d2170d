"""Ranks of torch.distributed as threads of one process, for tests of what ranks agree on."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.distributed import multi_threaded_pg as threads_as_ranks


def on_ranks(world: int, function: Callable[[int], Any], *, seconds: float = 60.0) -> list[Any]:
    """Call `function(rank)` on every rank, and return what the ranks return."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []
    store = torch.distributed.HashStore()

    def run(rank: int) -> None:
        try:
            torch.distributed.init_process_group(
                "threaded", rank=rank, world_size=world, store=store
            )
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  # raised by the caller
            errors.append(error)
            threads_as_ranks.ProcessLocalGroup.exception_handle(error)  # ends the others' waits
        finally:
            torch.distributed.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads_as_ranks._install_threaded_pg()
    try:
        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(seconds)
            assert not each.is_alive(), "a rank hangs"
    finally:
        threads_as_ranks.ProcessLocalGroup.reset()
        threads_as_ranks._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        # The stance belongs to the process; ranks that replay a step may leave it to each other.
        torch.compiler.set_stance("default")
    if errors:
        raise errors[0]
    return results
