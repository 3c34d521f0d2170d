"""`bench health`: what it costs to watch a run, here and with the tools there are elsewhere."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.memory import training_bytes
from narrowcast.bench.measure.timed import TimedSubject
from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import device_of, set_up
from narrowcast.workloads import load_recipe

BUILDERS: Mapping[str, str] = {
    "narrowcast": "narrowcast.bench.peers.watched",
    "torch": "narrowcast.bench.peers.debugged",
    "transformers": "narrowcast.bench.peers.debugged",
}

_EAGER = "eager, with a wait for the device at every module"

PEERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="torch-eager", kind="torch", options={"watch": "nothing"}),
        Contender(
            name="torch-detect-anomaly",
            kind="torch",
            options={"watch": "anomaly"},
            note="finds NaN in the backward pass; " + _EAGER,
        ),
        Contender(
            name="transformers-debug",
            kind="transformers",
            options={"watch": "transformers"},
            requires=("transformers",),
            distribution="transformers",
            note="DebugUnderflowOverflow: finds NaN and infinity in the forward pass; " + _EAGER,
        ),
    )
}

UNWATCHED = ("steps=1000000000", "eval.every=0", "health.every=0", "health.verdicts=false")
"""Steps without end, and nothing beside them."""


def _watching(*overrides: str, **options: Any) -> dict[str, Any]:
    return {"meter_every": 0, **options, "overrides": [*UNWATCHED, *overrides]}


BENCH = Bench(
    peers=PEERS,
    default_peers=by_device(cuda=",".join(PEERS), elsewhere=",".join(PEERS)),
    default_policies=by_device(cuda="bf16, params=bf16, master=split", elsewhere="bf16"),
    bytes_of=lambda recipe, settings: training_bytes(recipe),
    variants={
        " (guard alone)": _watching(),
        " (lost updates, every step)": _watching(meter_every=1),
        " (verdicts)": _watching("health.verdicts=true"),
        " (statistics, every step)": _watching("health.every=1"),
        " (statistics, every 50)": _watching("health.every=50"),
        " (adaptive, idle)": _watching("health.every=50", "precision.adapt.enabled=true"),
        " (average of weights)": _watching(ema_decay=0.999),
        " (deterministic)": _watching("deterministic=true"),
    },
    policies_first=True,
)


def subject(job: Mapping[str, Any]) -> TimedSubject:
    """Return what a worker times."""
    contender = Contender.from_json(job["contender"])
    options = dict(contender.options)
    overrides = [*job["overrides"], *options.pop("overrides", ())]
    recipe = load_recipe(job["recipe"], overrides).recipe
    build: Callable[..., Trial] = importlib.import_module(BUILDERS[contender.kind]).build
    return TimedSubject(
        lambda: build(set_up(recipe), **options),
        device=device_of(recipe),
        contender=contender,
    )
