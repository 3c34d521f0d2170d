"""This library's trainer with each of its watches on or off; the non-finite guard is always on."""

from dataclasses import replace
from itertools import cycle

from narrowcast.bench.measure.timing import Case, Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.stepping import optimizer_for
from narrowcast.precision.step.prepare import prepare
from narrowcast.runs import StepRecord
from narrowcast.training.task import Batch
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
    task = replace(bench.task, train_data=_InTurn(bench))
    records = train(prepared, task, bench.recipe)
    losses: list[float] = []

    def step() -> None:
        """Go on to the next record of a step: in a run that is under way, one step."""
        losses[:] = [next(each for each in records if isinstance(each, StepRecord)).loss]

    return Trial(
        cases={"step": Case(open=lambda: step, work={"tokens": float(bench.tokens_a_step)})},
        about={
            "parameters": sum(p.numel() for p in bench.model.parameters()),
            "compiled": bench.recipe.compile,
        },
        loss=lambda: losses[0] if losses else None,
        is_captured=lambda: bench.device.type == "cuda",
    )


class _InTurn:
    """The batches that everybody has, in their order, as a run's data: on the host."""

    def __init__(self, bench: Workbench) -> None:
        self._size = bench.recipe.batch_size
        self._batches = cycle([tuple(t.cpu() for t in batch) for batch in bench.batches])

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, indices: list[int]) -> Batch:
        return next(self._batches)
