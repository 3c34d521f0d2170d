"""`bench optimizer`: the update alone, over the tensor sizes of a real model."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import COPY, Contender
from narrowcast.bench.measure.memory import CONTEXT_BYTES
from narrowcast.bench.measure.timed import TimedSubject
from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import device_of, shapes_of
from narrowcast.bench.updates.weights import draw
from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.workloads import load_recipe

BUILDERS: Mapping[str, str] = {
    "narrowcast": "narrowcast.bench.updates.ours",
    "torch": "narrowcast.bench.updates.torch_native",
    "third party": "narrowcast.bench.updates.third_party",
    "copy": "narrowcast.bench.updates.copying",
}


def _third_party(name: str, module: str, *, distribution: str, note: str = "") -> Contender:
    return Contender(
        name=name,
        kind="third party",
        options={"which": name},
        requires=(module,),
        distribution=distribution,
        note=note,
    )


PEERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="torch-fused", kind="torch", options={"fused": True}),
        Contender(name="torch-foreach", kind="torch", options={"fused": False}),
        _third_party("optimi", "optimi", distribution="torch-optimi"),
        _third_party(
            "bitsandbytes-8bit",
            "bitsandbytes",
            distribution="bitsandbytes",
            note="bf16 weights without master weights: loses small updates",
        ),
        _third_party("torchao-8bit", "torchao", distribution="torchao"),
        _third_party("torchao-fp8", "torchao", distribution="torchao"),
        _third_party("torchao-stochastic", "torchao", distribution="torchao"),
        Contender(name=COPY, kind="copy"),
    )
}

BENCH = Bench(
    peers=PEERS,
    default_peers=by_device(cuda=",".join(PEERS), elsewhere=f"torch-fused,torch-foreach,{COPY}"),
    default_policies=by_device(
        cuda="bf16 | bf16, params=bf16, master=split | bf16, params=bf16, master=kahan | "
        "bf16, params=bf16, master=stochastic | fp16, params=fp16, master=fp32 | "
        "bf16, params=bf16, master=split, moments=bf16 | "
        "bf16, params=bf16, master=split, moments=int8",
        elsewhere="fp32 | bf16, params=bf16, master=split",
    ),
    bytes_of=lambda recipe, settings: _bytes(recipe),
)


def subject(job: Mapping[str, Any]) -> TimedSubject:
    """Return what a worker times."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    contender = Contender.from_json(job["contender"])
    build: Callable[..., Trial] = importlib.import_module(BUILDERS[contender.kind]).build
    return TimedSubject(
        lambda: build(draw(recipe), **contender.options),
        device=device_of(recipe),
        contender=contender,
    )


def _bytes(recipe: Recipe) -> int:
    """Weights, gradients, moments and a master or a copy, with as much again in flight."""
    if recipe.optimizer.name != "adamw":
        raise RecipeError(
            f"optimizer.name={recipe.optimizer.name}: all contenders here are AdamW; "
            "leave it out, or measure whole steps with `narrowcast bench step`"
        )
    return 32 * sum(p.numel() for p in shapes_of(recipe).model.parameters()) + CONTEXT_BYTES
