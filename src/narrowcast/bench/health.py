"""`bench health`: what it costs to watch a run, here and with the tools there are elsewhere."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import Contender
from narrowcast.bench.memory import training_bytes
from narrowcast.bench.model import device_of, set_up
from narrowcast.bench.timed import TimedSubject
from narrowcast.bench.timing import Trial
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

BENCH = Bench(
    peers=PEERS,
    default_peers=by_device(cuda=",".join(PEERS), elsewhere=",".join(PEERS)),
    default_policies=by_device(cuda="bf16 | bf16, params=bf16, master=split", elsewhere="bf16"),
    bytes_of=lambda recipe, settings: training_bytes(recipe),
    variants={
        " (guard alone)": {"meter_every": 0},
        " (lost updates, every step)": {"meter_every": 1},
        " (lost updates, every 10)": {"meter_every": 10},
        " (statistics, every step)": {"meter_every": 0, "statistics_every": 1},
        " (statistics, every 10)": {"meter_every": 0, "statistics_every": 10},
        " (average of weights)": {"meter_every": 0, "ema_decay": 0.999},
        " (deterministic)": {"meter_every": 0, "deterministic": True},
    },
    policies_first=True,
)


def subject(job: Mapping[str, Any]) -> TimedSubject:
    """Return what a worker times."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    contender = Contender.from_json(job["contender"])
    build: Callable[..., Trial] = importlib.import_module(BUILDERS[contender.kind]).build
    return TimedSubject(
        lambda: build(set_up(recipe), **contender.options),
        device=device_of(recipe),
        contender=contender,
    )
