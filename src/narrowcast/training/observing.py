"""Health readings of a run: samples of its tensors, their statistics, and findings."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from narrowcast.hardware.profile import StepProfile
from narrowcast.health.findings.findings import Findings
from narrowcast.health.statistics.probes import Probes
from narrowcast.health.statistics.reading import Reading
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import HealthRecord, Record, StepRecord

EXPONENTS_EVERY = 10
"""Readings between two that also have histograms of exponents for the worst tensors."""


@final
class Observer:
    """Reads the tensors of a prepared model every few steps; `every=0` switches it off."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        every: int,
        seed: int,
        own: Callable[[], Mapping[str, Policy]] = dict,
        profile: StepProfile | None = None,
    ) -> None:
        """Install the probes. `own()` returns the policies that widened modules came from."""
        self._prepared, self._every, self._own = prepared, every, own
        self._seed = seed
        self._profile = profile
        self._findings = Findings(lambda: prepared.engine.log.wording)
        self._readings: deque[tuple[int, Reading]] = deque()
        self._probes: Probes | None = None
        self.looked = 0
        """Step of the latest reading that was judged."""
        self.unsafe_to_lower: list[str] = []
        """Modules that would not fit their own formats, by the latest reading."""
        self._install()

    @property
    def issues(self) -> list[tuple[str, str, str]]:
        """Problems in the latest reading that was judged: kind, module, role."""
        return self._findings.present

    def before_step(self, step: int) -> Callable[[], None] | None:
        """Get ready for a step; return what to call between its backward pass and its update."""
        if self._profile is not None:
            self._profile.before(step)
        if self._probes is None:
            return None
        self._probes.switch.on = step % self._every == 0
        if not self._probes.switch.on:
            return None
        self._probes.offsets.draw(step)
        return self._probes.weights.take

    def after_step(self, step: int, *, forward_only: bool = False) -> None:
        """Read the tensors of a step that was just queued, if a reading is due."""
        if self._profile is not None:
            self._profile.after(step)
        if self._probes is None or step % self._every:
            return
        if not forward_only:
            self._probes.weights.take_updates()
        exponents = (step // self._every - 1) % EXPONENTS_EVERY == 0
        reading = Reading(self._probes, step=step, exponents=exponents, forward_only=forward_only)
        self._readings.append((step, reading))
        self._probes.forget()

    def account(self, record: StepRecord, *, explained: bool = False) -> Iterator[Record]:
        """Yield the findings and statistics that come with a step's record.

        Statistics of a bad step that a diagnosis `explained` are not judged: samples often miss the
        first bad value.
        """
        scaling = self._prepared.loss_scale
        yield from self._findings.step(record, scaling=scaling)
        while self._readings and self._readings[0][0] <= record.step:
            _, reading = self._readings.popleft()
            for message in reading.records():
                yield message
                if isinstance(message, HealthRecord) and not explained:
                    self.looked = message.step
                    scaled = scaling is not None and record.loss_scale > scaling.min_scale
                    if not reading.forward_only:  # gradients decide too
                        self.unsafe_to_lower = reading.unsafe_to_lower(scaled=scaled)
                    yield from self._findings.look(
                        message, scaling=scaling, loss_scale=record.loss_scale
                    )

    @contextlib.contextmanager
    def probes_removed(self) -> Iterator[None]:
        """Remove the probes inside the block, where formats may change."""
        self._remove()
        try:
            yield
        finally:
            self._install()

    def close(self) -> None:
        """Remove the probes and close the profile."""
        self._remove()
        if self._profile is not None:
            self._profile.close()

    def state_dict(self) -> dict[str, Any]:
        return self._findings.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._findings.load_state_dict(state)

    def _remove(self) -> None:
        if self._probes is not None:
            self._probes.remove()

    def _install(self) -> None:
        if self._every:
            self._probes = Probes(
                self._prepared.model, self._prepared.plan, supposed=self._own(), seed=self._seed
            )
