"""Statistics and findings for people who stay in their own loop, or in somebody else's.

    watch = narrowcast.monitor(model, policy="bf16")
    ...
    loss.backward()
    for finding in watch.step():
        print(finding.module, finding.what, finding.why, finding.advice)
    optimizer.step()

The policy says what formats the loop computes in; nothing of the model changes but that samples are
taken as tensors pass.
"""

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

EVERY = 10
"""Steps between two readings."""


def monitor(model: nn.Module, *, policy: str | Policy = "fp32", every: int = EVERY) -> "Monitor":
    """Look at the tensors of a model that a loop of your own trains in a policy's formats.

    Compile the model afterwards, if at all. `close()`, or the end of a `with` block, makes it
    again what it was.
    """
    if every < 1:
        raise ConfigError(f"watch(every={every}): write how many steps lie between two readings")
    return Monitor(model, policy=policy, every=every)


@final
class Monitor:
    """What is known of a model's tensors, and what was found."""

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
        """Take note of a step, between `backward()` and the optimizer's; return what begins there.

        `number` is what the loop calls the step; None: one more than the last. On a GPU statistics
        are told one reading late, so that nothing waits for them.
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
        """Return what the tensors would lose to another format, scaled as a layer would.

        Of the latest reading. Waits for the device.
        """
        format_named(name)  # which refuses what is none
        lost = None if self._latest is None else self._latest.as_if(name)
        if lost is None:
            raise ConfigError(
                f"what_if({name!r}): nothing has been read yet; call it after a step() that reads, "
                f"of which there is one in {self._every} (every={self._every})"
            )
        return lost

    def close(self) -> list[FindingRecord]:
        """Make the model again what it was; return what was still on its way."""
        matches = self._arrived(leaving=0)
        self._probes.remove()
        return matches

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
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
    raise ConfigError("watch() was given a model without parameters; give it the one you train")
