"""transformers: a callback that monitors the model its Trainer trains."""

from typing import Any

from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import Tell, sentence
from narrowcast.precision.plan.policy import Policy
from narrowcast.runs import FindingRecord


def transformers_callback(
    *, policy: str | Policy = "fp32", every: int = 10, tell: Tell | None = None
) -> Any:
    """Return a callback for transformers' Trainer that monitors the model it trains.

    Findings go to `tell`, or to transformers' log as warnings.
    """
    from transformers import TrainerCallback
    from transformers.utils import logging

    base: Any = TrainerCallback  # its types are there or not, as it is installed or not

    class Watching(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
            # Nobody says so when a training ends by an exception.
            before: Monitor | None = getattr(self, "watch", None)
            if before is not None:
                before.close()
            self.watch = monitor(settings["model"], policy=policy, every=every)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **inputs: Any) -> None:
            self._tell(self.watch.step(state.global_step + 1))

        def on_train_end(self, args: Any, state: Any, control: Any, **overrides: Any) -> None:
            self._tell(self.watch.close())

        def _tell(self, matches: list[FindingRecord]) -> None:
            log = logging.get_logger("transformers.narrowcast")
            for finding in matches:
                (tell or (lambda f: log.warning(sentence(f))))(finding)

    return Watching()
