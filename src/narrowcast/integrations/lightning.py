"""Lightning: a callback that monitors the module a trainer fits."""

from typing import Any

from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import Tell, sentence
from narrowcast.precision.plan.policy import Policy
from narrowcast.runs import FindingRecord


def lightning_callback(
    *, policy: str | Policy = "fp32", every: int = 10, tell: Tell | None = None
) -> Any:
    """Return a callback for a Lightning trainer that monitors the module it fits.

    Findings go to `tell`, or to Lightning's warnings.
    """
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_warn

    base: Any = Callback

    class Watching(base):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch = monitor(pl_module, policy=policy, every=every)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self._tell(self.watch.step(trainer.global_step + 1))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._tell(self.watch.close())

        def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
            watching: Monitor | None = getattr(self, "watch", None)
            if watching is not None:
                self._tell(watching.close())

        def _tell(self, matches: list[FindingRecord]) -> None:
            for finding in matches:
                (tell or (lambda f: rank_zero_warn(sentence(f))))(finding)

    return Watching()
