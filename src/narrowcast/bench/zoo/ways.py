"""Ways to train a model: torch's mixed precision, with Liger, torchao's fp8, and ours.

Each is written as its documentation has it. All use torch's fused AdamW and clip to a norm of 1.
"""

import importlib
import importlib.util
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowcast.bench.peers import convert_to_torchao
from narrowcast.bench.zoo.built import BuiltModel
from narrowcast.bench.zoo.models import get_entry
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.step.prepared import Prepared, prepare

Kind = Literal["amp", "liger", "torchao", "ours"]
Step = Callable[[], Tensor]
"""One training step; returns its loss on the device."""

MODES: tuple[Execution, ...] = ("eager", "compiled", "graphed")
"""`execution=` of `prepare`."""
CLIP_NORM, LR = 1.0, 1e-4
SPLIT = "params=bf16, master=split"
STEPS_TO_CAPTURE = 6
"""A step must be captured after so many, before anything is timed."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train any model."""

    name: str
    kind: Kind
    modes: tuple[str, ...] = ("eager", "compiled")
    policy: str = ""
    """Precision policy, for ours."""
    requires: str = ""
    """Module that must be importable."""
    distribution: str = ""
    """Package to install for it."""

    @property
    def missing(self) -> str:
        """What must be installed for it, or an empty string."""
        if not self.requires or importlib.util.find_spec(self.requires):
            return ""
        return f"{self.distribution} is not installed; pip install {self.distribution}"


AMP, LIGER, TORCHAO = "AMP", "AMP + Liger", "torchao tensorwise"
BF16, BF16_SPLIT, FP8_SPLIT = "bf16", "bf16 + split", "fp8-delayed + split"

WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        Way(name=AMP, kind="amp"),
        Way(name=LIGER, kind="liger", requires="liger_kernel", distribution="liger-kernel"),
        Way(
            name=TORCHAO,
            kind="torchao",
            modes=("compiled",),
            requires="torchao",
            distribution="torchao",
        ),
        *(
            Way(name=name, kind="ours", modes=MODES, policy=policy)
            for name, policy in (
                (BF16, "bf16"),
                (BF16_SPLIT, f"bf16, {SPLIT}"),
                (FP8_SPLIT, f"fp8-delayed, {SPLIT}"),
            )
        ),
    )
}
KINDS: Mapping[str, str] = {
    "amp": "torch's bf16 mixed precision (fp32 without a GPU)",
    "liger": "torch AMP with Liger kernels in the model",
    "torchao": "torchao's fp8 with one scale per tensor",
    "ours": "nc.prepare with three policies",
}
"""Names for `--ways`, besides single rows."""


@dataclass(frozen=True, kw_only=True)
class ZooTrial:
    """One model in one way and one mode."""

    model: str
    way: str
    mode: Execution

    def __str__(self) -> str:
        return f"{self.model}, {self.way}, {self.mode}"


def trials(models: Iterable[str], *, ways: Iterable[str], modes: Iterable[str]) -> list[ZooTrial]:
    """Return the rows, model by model, AMP first; `ways` has kinds or single ways."""
    ways, modes = _known(ways, (*KINDS, *WAYS), "--ways"), _known(modes, MODES, "--modes")
    rows = [
        ZooTrial(model=model, way=way.name, mode=mode)
        for model in models
        for way in WAYS.values()
        for mode in MODES
        if {way.kind, way.name} & set(ways) and mode in modes and mode in way.modes
        if way.kind != "liger" or get_entry(model).liger
    ]
    if not rows:
        raise ConfigError(
            f"--ways {shlex.join(ways)} --modes {' '.join(modes)} selects no row. torchao has only "
            "compiled rows, and only ours have graphed ones."
        )
    return rows


def make_step(
    built: BuiltModel, trial: ZooTrial, device: torch.device
) -> tuple[Step, dict[str, Any]]:
    """Return the training step of a trial, and facts about it."""
    way = WAYS[trial.way]
    match way.kind:
        case "ours":
            return _our_step(built, way.policy, trial.mode)
        case "liger":
            _apply_liger(built.model)
            about: dict[str, Any] = {}
        case "torchao":
            if device.type != "cuda":
                raise UnsupportedError("torchao's fp8 products need a GPU")
            about = {"fp8_layers": convert_to_torchao(built.model, "tensorwise")}
            if not about["fp8_layers"]:
                raise UnsupportedError("torchao converts no linear layer of this model")
        case "amp":
            about = {}
    return _amp_step(built, device, compiled=trial.mode == "compiled"), about


def _graphed_step(run: Prepared, built: BuiltModel) -> Step:
    """Return the whole step as CUDA graphs; without a GPU it runs eagerly."""
    fast = run.graphed(lambda *inputs: built.loss_fn(built.model, *inputs))
    on_gpu = next(built.model.parameters()).is_cuda
    taken = count(1)

    def step() -> Tensor:
        fast(*built.inputs)
        if next(taken) > STEPS_TO_CAPTURE and on_gpu and fast.why:
            raise UnsupportedError(f"the step cannot be captured: {fast.why}")
        assert fast.loss is not None
        return fast.loss

    return step


def _our_step(built: BuiltModel, policy: str, mode: Execution) -> tuple[Step, dict[str, Any]]:
    model, loss_fn, inputs = built.model, built.loss_fn, built.inputs
    optimizer = _optimizer(model)
    run = prepare(model, optimizer, policy=policy, clip_norm=CLIP_NORM, execution=mode)
    about = {
        "policy": str(run.plan.policy),
        "update_path": run.update_path,
        "fp8_layers": sum("fp8" in module.bytes for module in run.plan.modules),
        "fused": [str(piece) for piece in run.plan.fused if piece.fused],
    }
    if mode == "graphed":
        return _graphed_step(run, built), about
    forward = _compiled(model) if mode == "compiled" else model

    def step() -> Tensor:
        with run.autocast():
            loss = loss_fn(forward, *inputs)
        run.step(loss)
        return loss.detach()

    return step, about


def _amp_step(built: BuiltModel, device: torch.device, *, compiled: bool) -> Step:
    model, loss_fn, inputs = built.model, built.loss_fn, built.inputs
    optimizer = _optimizer(model)
    forward = _compiled(model) if compiled else model

    def autocast() -> AbstractContextManager[Any]:
        # Native 16-bit products may be 90 times slower than fp32 on a CPU, or end the process.
        if device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        with autocast():
            loss = loss_fn(forward, *inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, fused=True)


def _compiled(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model)
    return compiled  # type: ignore[no-any-return]


def _apply_liger(model: nn.Module) -> None:
    """Patch a model of transformers with Liger's kernels."""
    patches: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    config: Any = vars(model).get("config")
    known: Mapping[str, Any] = patches.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = str(config.model_type) if config is not None else type(model).__name__
    if kind not in known:
        raise UnsupportedError(f"Liger has no kernels for {kind}. Leave liger out of --ways")
    known[kind](model=model)


def _known(requested: Iterable[str], known: Iterable[str], option: str) -> tuple[str, ...]:
    """Return the requested words, or all; raises for unknown ones."""
    chosen, names = tuple(requested), tuple(known)
    for word in chosen:
        if word not in names:
            quoted = ", ".join(shlex.quote(name) for name in names)
            raise ConfigError(f"{option} must be any of {quoted}, got {word}.")
    return chosen or names
