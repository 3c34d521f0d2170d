"""This library's trainer with each of its watches on or off; the non-finite guard is always on."""

from narrowcast.bench.measure.timing import Case, Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import optimizer_for
from narrowcast.precision.step.prepare import prepare
from narrowcast.runs import StepRecord
from narrowcast.training.trainer import train


def build(
    bench: Workbench, *, policy: str, meter_every: int, ema_decay: float | None = None
) -> Trial:
    """Return a step of a run in a policy, watched as its recipe says."""
    prepared = prepare(
        bench.model,
        optimizer_for(bench, bench.model),
        policy=policy,
        clip_norm=bench.recipe.clip_norm,
        meter_every=meter_every,
        ema_decay=ema_decay,
        emulate=bench.recipe.precision.emulate,
    )
    records = train(prepared, bench.task, bench.recipe)
    losses: list[float] = []

    def step() -> None:
        """Go on to the next record of a step: in a run that is under way, one step."""
        losses[:] = [next(each for each in records if isinstance(each, StepRecord)).loss]

    return Trial(
        cases={"step": Case(open=lambda: step, work=bench.work)},
        about={
            "parameters": sum(p.numel() for p in bench.model.parameters()),
            "compiled": bench.recipe.compile,
        },
        loss=lambda: losses[0] if losses else None,
        is_captured=lambda: bench.device.type == "cuda",
    )
