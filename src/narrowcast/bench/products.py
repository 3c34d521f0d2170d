"""`bench products`: one linear layer forward and backward, over a sweep of shapes.

A case is `M×K×N`: M tokens, K numbers in, N numbers out. Forward and the two products of the
backward pass are 6·M·K·N operations, for everyone.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch._dynamo.config

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import Contender
from narrowcast.bench.linear import Shape, layer_builder, layer_plan
from narrowcast.bench.measure.memory import CONTEXT_BYTES
from narrowcast.bench.measure.timed import TimedSubject
from narrowcast.bench.measure.timing import Case, Step, Trial
from narrowcast.bench.model import device_of
from narrowcast.config.sections import Recipe
from narrowcast.errors import RecipeError
from narrowcast.workloads import load_recipe

SHAPES_ON_CUDA = (
    "1024x1024x1024,1024x4096x14336,4096x1024x4096,4096x4096x4096,4096x14336x4096,"
    "16384x1024x1024,16384x1024x4096,16384x4096x1024,16384x2048x8192,16384x4096x4096,"
    "16384x4096x14336,16384x14336x4096,65536x1024x1024,65536x1024x4096,65536x4096x14336"
)
TURN_SECONDS = 0.02
"""A layer may take 20 µs, and the clocks of a GPU some milliseconds to rise."""
SHAPES_ELSEWHERE = "256x128x512,256x512x128"


def shapes_from(text: str) -> tuple[Shape, ...]:
    """Read `16384x1024x4096,…`: tokens, in, out."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not re.fullmatch(r"[1-9]\d*([x×][1-9]\d*){2}", word):
            raise RecipeError(
                f"--shapes: {word!r} is no shape; write tokens, in and out as 16384x1024x4096"
            )
    if not words:
        raise RecipeError("--shapes names no shape; write one, e.g. 16384x1024x4096")
    return tuple(Shape(*map(int, re.split("[x×]", word))) for word in words)


PEERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="torch-bf16", kind="torch", options={"dtype": "bf16"}),
        Contender(name="torch-fp32", kind="torch", options={"dtype": "fp32"}),
        *(
            Contender(
                name=f"torchao-{recipe}",
                kind="torchao",
                options={"recipe": recipe},
                requires=("torchao",),
                distribution="torchao",
            )
            for recipe in ("tensorwise", "rowwise")
        ),
        *(
            Contender(
                name=f"raw-fp8-{scaling}",
                kind="raw",
                options={"scaling": scaling},
                note="products alone, operands quantised before: a ceiling, not a layer",
            )
            for scaling in ("tensor", "row")
        ),
    )
}

BENCH = Bench(
    peers=PEERS,
    default_peers=by_device(
        cuda="torch-bf16,torchao-tensorwise,torchao-rowwise,raw-fp8-tensor,raw-fp8-row",
        elsewhere="torch-fp32",
    ),
    default_policies=by_device(
        cuda="bf16, params=bf16, master=split | fp8-tensor, params=bf16, master=split | "
        "fp8-row, params=bf16, master=split | fp8-delayed, params=bf16, master=split | "
        "fp8-block, params=bf16, master=split",
        elsewhere="fp32 | bf16",
    ),
    bytes_of=lambda recipe, settings: _bytes(recipe, settings),
    variants={"": {"compiled": False}, " compiled": {"compiled": True}},
)


def subject(job: Mapping[str, Any]) -> TimedSubject:
    """Return what a worker times: every shape that the contender can do."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    contender, device = Contender.from_json(job["contender"]), device_of(recipe)
    # One function is compiled for every shape, each for itself.
    torch._dynamo.config.recompile_limit = 1000
    made = layer_builder(contender, device=device)
    shapes = _shapes(job["settings"], device.type)
    cases = {
        str(shape): Case(
            open=_opener(made, shape), work={"flops": shape.flops}, least_seconds=TURN_SECONDS
        )
        for shape in shapes
    }
    about = {}
    if contender.kind == "narrowcast":
        policy = contender.options["policy"]
        plans = {str(shape): layer_plan(shape, device, policy) for shape in shapes}
        about["chosen"] = {shape: plan.modules[0].reason for shape, plan in plans.items()}
    on_gpu = device.type == "cuda"
    trial = Trial(cases=cases, about=about, is_captured=lambda: on_gpu)
    return TimedSubject(lambda: trial, device=device, contender=contender)


def _opener(made: Callable[[Shape], Step], shape: Shape) -> Callable[[], Step]:
    return lambda: made(shape)


def _shapes(settings: Mapping[str, Any], device_type: str) -> tuple[Shape, ...]:
    default = SHAPES_ON_CUDA if device_type == "cuda" else SHAPES_ELSEWHERE
    return shapes_from(settings.get("shapes") or default)


def _bytes(recipe: Recipe, settings: Mapping[str, Any]) -> int:
    """The largest shape, thrice (values, gradients, what is quantised) in bf16 and its fp32."""
    shapes: Iterable[Shape] = _shapes(settings, device_of(recipe).type)
    return 3 * 6 * max(shape.numbers for shape in shapes) + CONTEXT_BYTES
