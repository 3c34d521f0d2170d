"""Numeric statistics and findings for custom training loops."""

from collections import deque
from typing import Self, final

import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import detect_hardware
from narrowcast.health.findings.findings import Findings
from narrowcast.health.statistics.probes import Probes
from narrowcast.health.statistics.reading import Reading
from narrowcast.numerics import format_named
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.plan.wording import Wording
from narrowcast.runs import FindingRecord, HealthRecord


def monitor(model: nn.Module, *, policy: str | Policy = "fp32", every: int = 10) -> "Monitor":
    """Collect numeric statistics of a model that your own loop trains.

    Call it before `torch.compile`. `close()` or the end of a `with` block removes it.

    Args:
        model: The model you train.
        policy: The policy whose formats the statistics and findings refer to.
        every: Steps between readings.

    Returns:
        The monitor: call `step()` between `backward()` and the optimizer step.

    Raises:
        ConfigError: `every` is below 1, or the model has no parameters or is already monitored.

    Example:
        >>> with nc.monitor(model, policy="fp16") as health:
        ...     for batch in loader:
        ...         loss_fn(model, batch).backward()
        ...         for finding in health.step():
        ...             print(finding.what, finding.why)
        ...         optimizer.step()
    """
    if every < 1:
        raise ConfigError(
            f"monitor(every) must be at least 1, got {every}. It is the number of steps between "
            "readings."
        )
    return Monitor(model, policy=policy, every=every)


@final
class Monitor:
    """Statistics and findings of a monitored model, returned by `monitor`."""

    def __init__(self, model: nn.Module, *, policy: str | Policy, every: int) -> None:
        device = _model_device(model)
        plan = make_plan(
            model, policy, hardware=detect_hardware(str(device)), skip_slow_fp8=False, fuse="none"
        )
        self._probes, self._every = Probes(model, plan, in_runs=True), every
        terms = Wording(policy=plan.policy)
        self._findings, self._waits = Findings(lambda: terms), device.type == "cuda"
        self._readings: deque[Reading] = deque()
        self._latest: Reading | None = None
        self._steps = 0
        self._probes.switch.on = every == 1
        self.statistics: HealthRecord | None = None
        """The latest that have arrived."""

    def step(self, number: int | None = None) -> list[FindingRecord]:
        """Record a step; call it between `backward()` and the optimizer step.

        Args:
            number: Number of the step. None: one more than the last.

        Returns:
            New findings. On a GPU they come one reading late, to avoid a synchronisation.
        """
        self._steps = self._steps + 1 if number is None else number
        looked = self._probes.switch.on
        self._probes.switch.on = (self._steps + 1) % self._every == 0
        if not looked:
            return []
        self._probes.weights.take()
        self._latest = Reading(self._probes, step=self._steps)
        self._readings.append(self._latest)
        self._probes.forget()
        self._probes.offsets.draw(self._steps)
        return self._arrived(leaving=1 if self._waits else 0)

    def what_if(self, name: str) -> HealthRecord:
        """Return what the tensors of the latest reading would lose in another format.

        Synchronises with the device.

        Args:
            name: Name of the format, for example "e4m3".

        Raises:
            ConfigError: There is no such format, or no reading yet.
        """
        format_named(name)  # which refuses what is none
        lost = None if self._latest is None else self._latest.as_if(name)
        if lost is None:
            raise ConfigError(
                f"what_if({name!r}) has no readings yet. Call it after a step() that reads; "
                f"every={self._every} reads one step in {self._every}."
            )
        return lost

    def close(self) -> list[FindingRecord]:
        """Remove the monitor from the model and return the remaining findings."""
        matches = self._arrived(leaving=0)
        self._probes.remove()
        return matches

    def __enter__(self) -> Self:
        """Return this monitor."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Call `close()`."""
        self.close()

    def _arrived(self, *, leaving: int) -> list[FindingRecord]:
        result: list[FindingRecord] = []
        while len(self._readings) > leaving:
            for record in self._readings.popleft().records():
                if isinstance(record, HealthRecord):
                    self.statistics = record
                    result += self._findings.look(record)
        return result


def _model_device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise ConfigError("monitor() needs a model with parameters. Pass the model you train.")
