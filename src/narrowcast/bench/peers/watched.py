"""This library's step with each of its watches on or off; the non-finite guard is always on."""

from torch import Tensor

from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import optimizer_for, trial_of
from narrowcast.bench.timing import Trial
from narrowcast.precision.outcome import Outcome
from narrowcast.precision.prepare import prepare
from narrowcast.training.compiling import compiled
from narrowcast.training.determinism import deterministic_kernels
from narrowcast.training.observing import Observer


def build(
    bench: Workbench,
    *,
    policy: str,
    meter_every: int,
    ema_decay: float | None = None,
    deterministic: bool = False,
    statistics_every: int = 0,
) -> Trial:
    """Return a step in a policy, with what watches it: a meter of lost updates, statistics, …"""
    prepared = prepare(
        bench.model,
        optimizer_for(bench, bench.model),
        policy=policy,
        clip_norm=bench.recipe.clip_norm,
        meter_every=meter_every,
        ema_decay=ema_decay,
        emulate=bench.recipe.precision.emulate,
    )
    # Never left: this process measures nothing else.
    deterministic_kernels(deterministic).__enter__()
    observer = Observer(prepared, every=statistics_every)
    model = compiled(prepared.model, bench.recipe)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with prepared.compute():
            return bench.task.loss(model, (tokens, targets))

    def update() -> Outcome:
        observer.after_passes()
        outcome = prepared.step()
        observer.after_step(outcome.step)
        observer.drop(before=outcome.step)
        return outcome

    return trial_of(
        bench,
        loss_of=loss_of,
        backward=prepared.backward,
        update=update,
        compiled=bench.recipe.compile,
    )
