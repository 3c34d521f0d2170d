"""The memory of the card while a hybrid run keeps copies of its weights: told, and acted on.

From 10 of 16 parts on it is a finding, from 12 the allocator's cache is given back, from 14 a
checkpoint is written at once, because the next allocation may end the run.
"""

from collections.abc import Callable
from typing import final

import torch

from narrowcast.runs import FindingRecord
from narrowcast.strategies.hybrid.control.vram import Card, Pressure, card, cleanup_due

EVERY = 50
"""Steps between two looks; each asks the driver, and waits for the steps so far."""


@final
class CardWatch:
    """Looks at the memory of a card now and then; on a CPU there is none to look at."""

    def __init__(
        self, device: torch.device, *, look: Callable[[torch.device], Card] | None = None
    ) -> None:
        """Watch a device; `look` returns its card, the driver's word where it is not given."""
        self._device = device
        self._look = look or (card if device.type == "cuda" else None)
        self._seen: Pressure = "fine"
        self.wants_checkpoint = False
        """Whether the last look found so little left that a checkpoint is to be written."""

    def is_due(self, step: int) -> bool:
        """Say whether to look after this step."""
        return self._look is not None and step > 0 and step % EVERY == 0

    def act(self, step: int) -> list[FindingRecord]:
        """Look, do what it calls for, and tell of it when it has become worse."""
        assert self._look is not None
        now = self._look(self._device)
        before, self._seen = self._seen, now.pressure
        self.wants_checkpoint = now.pressure == "emergency" and before != "emergency"
        if cleanup_due(step, now.pressure) and self._device.type == "cuda":
            torch.cuda.empty_cache()
        if _ORDER.index(now.pressure) <= _ORDER.index(before):
            return []
        share = now.used_bytes / now.total_bytes
        return [
            FindingRecord(
                step=step,
                since=step,
                module="",
                role="memory",
                what=f"the card is {share:.0%} full",
                why="weights, averages, leads and past weights of the run, and whatever else is "
                "there",
                action=_ACTIONS[now.pressure],
                advice="keep fewer averages (strategy.readout.half_lives), leads in bf16 "
                "(strategy.lookahead.storage), past weights on the host "
                "(strategy.jumps.history_on=cpu), or save memory (memory.checkpoint)",
            )
        ]


_ORDER: tuple[Pressure, ...] = ("fine", "warning", "cleanup", "emergency")
_ACTIONS: dict[Pressure, str] = {
    "fine": "",
    "warning": "",
    "cleanup": "gave the allocator's cache back",
    "emergency": "gave the allocator's cache back, and saved the run",
}
