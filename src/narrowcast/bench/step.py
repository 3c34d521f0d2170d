"""`bench step`: one whole training step, with this library's policies and with its peers."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.bench.catalogue import Bench, by_device
from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.memory import training_bytes
from narrowcast.bench.measure.timed import TimedSubject
from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import device_of, set_up
from narrowcast.workloads import load_recipe

BUILDERS: Mapping[str, str] = {
    "narrowcast": "narrowcast.bench.peers.ours",
    "torch": "narrowcast.bench.peers.plain",
    "torchao": "narrowcast.bench.peers.float8",
    "accelerate": "narrowcast.bench.peers.huggingface",
    "lightning": "narrowcast.bench.peers.fabric",
}
"""Each kind of contender, and the module whose `build(bench, **options)` makes its trial."""

_ACCELERATE: dict[str, Any] = {"kind": "accelerate", "requires": ("accelerate",)}
_FABRIC: dict[str, Any] = {"kind": "lightning", "requires": ("lightning_fabric", "lightning")}
_TORCHAO: dict[str, Any] = {"kind": "torchao", "requires": ("torchao",)}
_LOSES = "16-bit weights without master weights: loses small updates"


def _torch(name: str, *, note: str = "", **options: Any) -> Contender:
    return Contender(name=name, kind="torch", options=options, note=note)


def _float8(recipe: str, *, weights: str) -> Contender:
    suffix = "-bf16-weights" if weights == "bf16" else ""
    return Contender(
        name=f"torchao-{recipe}{suffix}",
        options={"recipe": recipe, "weights": weights},
        distribution="torchao",
        note=_LOSES if weights == "bf16" else "",
        **_TORCHAO,
    )


PEERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        _torch("torch-fp32", compute="fp32", compiled=False),
        _torch("torch-fp32-compiled", compute="fp32", compiled=True),
        _torch("torch-tf32", compute="tf32", compiled=False),
        _torch("torch-amp-bf16", compute="bf16", compiled=False),
        _torch("torch-amp-bf16-compiled", compute="bf16", compiled=True),
        _torch("torch-amp-fp16", compute="fp16", compiled=False),
        _torch("torch-amp-fp16-compiled", compute="fp16", compiled=True),
        _torch("torch-bf16-compiled", compute="bf16", weights="bf16", compiled=True, note=_LOSES),
        _float8("tensorwise", weights="fp32"),
        _float8("rowwise", weights="fp32"),
        _float8("tensorwise", weights="bf16"),
        _float8("rowwise", weights="bf16"),
        *(
            Contender(
                name=f"accelerate-{precision}",
                options={"precision": precision, "compiled": precision == "bf16"},
                distribution="accelerate",
                **_ACCELERATE,
            )
            for precision in ("bf16", "fp32")
        ),
        *(
            Contender(
                name=f"lightning-{precision}",
                options={"precision": precision, "compiled": precision == "bf16"},
                distribution="lightning-fabric",
                **_FABRIC,
            )
            for precision in ("bf16", "fp32")
        ),
    )
}

ON_CUDA = (
    "torch-amp-bf16-compiled,torchao-tensorwise,torchao-rowwise,torchao-tensorwise-bf16-weights,"
    "torchao-rowwise-bf16-weights,accelerate-bf16,lightning-bf16,torch-amp-fp16-compiled,"
    "torch-bf16-compiled,torch-amp-bf16,torch-amp-fp16,torch-tf32"
)
"""The first is the baseline; those that compile longest come next, so that nobody waits for them
alone."""
ELSEWHERE = "torch-fp32,accelerate-fp32,lightning-fp32"
"""Native 16-bit products may be 90 times slower than fp32 on a CPU, or end the process."""
POLICIES_ON_CUDA = (
    "bf16 | bf16, params=bf16, master=split | fp16 | fp16, params=fp16, master=fp32 | "
    "fp8-tensor | fp8-delayed | aggressive"
)
POLICIES_ELSEWHERE = "fp32 | bf16"

BENCH = Bench(
    peers=PEERS,
    default_peers=by_device(cuda=ON_CUDA, elsewhere=ELSEWHERE),
    default_policies=by_device(cuda=POLICIES_ON_CUDA, elsewhere=POLICIES_ELSEWHERE),
    bytes_of=lambda recipe, settings: training_bytes(recipe),
)


def subject(job: Mapping[str, Any]) -> TimedSubject:
    """Return what a worker times."""
    recipe = load_recipe(job["recipe"], job["overrides"]).recipe
    contender = Contender.from_json(job["contender"])
    build: Callable[..., Trial] = importlib.import_module(BUILDERS[contender.kind]).build
    torch.manual_seed(recipe.seed)
    return TimedSubject(
        lambda: build(set_up(recipe), **contender.options),
        device=device_of(recipe),
        contender=contender,
    )
