"""`audit`: which dtypes one training step really used, and what is suspicious about them.

It works for any loop: torch AMP, accelerate, Lightning, a plain loop, or one of `prepare`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.health.step_observer import (
    NARROW,
    OUTSIDE,
    Observation,
    PlannedFormats,
    dtype_name,
    host_copies,
    is_compiled,
    lies_on_grid,
    observe,
)
from narrowcast.numerics import BF16, FP16
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.module_plan import module_kind
from narrowcast.precision.weights.trained import TrainedWeights, weights_trained_by

LARGE_UPCAST_BYTES = 2**26
"""Casts of a module's activations to fp32 are reported from this size per step."""
FEWEST_VALUES = 32
"""Distinct values that a weight must have before its grid says where it comes from."""
NOT_SEEN = "compiled: not seen"

FindingKind = Literal[
    "no master weights",
    "weights on a narrow grid",
    "wide products",
    "large upcast",
    "no loss scale",
    "narrow moments",
    "narrow accumulation",
    "not in the optimizer",
    "not in the model",
    "lost updates",
    "skipped step",
    "zero learning rate",
    "products not seen",
]


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """Something suspicious about the dtypes of a step."""

    kind: FindingKind
    what: str
    """What was seen."""
    where: str
    """The modules or weights it concerns."""
    why: str
    """Why it matters."""
    advice: str
    """What to do about it."""

    def __str__(self) -> str:
        """Return the finding in four lines."""
        lines = (self.what, f"where: {self.where}", f"why:   {self.why}", f"do:    {self.advice}")
        return "\n  ".join(lines)


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """The dtypes of one module in the step."""

    module: str
    kind: str
    forward: tuple[str, ...]
    """Formats of its forward products, the one with most FLOPs first."""
    backward: tuple[str, ...]
    """Formats of its backward products."""
    weight: tuple[str, ...]
    """Dtypes of its own parameters."""
    gradient: tuple[str, ...]
    """Dtypes of their gradients."""
    master: tuple[str, ...]
    """Dtypes or kinds of their master weights; none for weights that need none."""
    moments: tuple[str, ...]
    """Dtypes of their optimizer moments."""


HEAD = ("module", "kind", "forward", "backward", "weight", "gradient", "master", "moments")


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit:
    """What one training step really computed in, returned by `audit`."""

    rows: tuple[AuditRow, ...]
    """Modules with weights or products, in the order of the model."""
    findings: tuple[AuditFinding, ...]
    """What is suspicious. Empty: nothing is."""
    flop_shares: Mapping[str, float]
    """Share of the FLOPs of all products by format, the largest first."""
    bytes: Mapping[str, int]
    """Size of the weights, gradients, masters and moments."""
    upcast_bytes: Mapping[str, int]
    """Size of the activations that each module cast from 16 bits to fp32."""
    compiled: tuple[str, ...] = ()
    """Compiled modules. torch runs them in eager mode while they are observed."""

    def __repr__(self) -> str:
        """Return a table with one line per group of similar modules, and the findings."""
        table = [HEAD, *self._table]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        notes = [f"{name:<10}{text}" for name, text in self._notes]
        return "\n".join([*lines, "", *notes, *(f"\n{each}" for each in self.findings)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        cell = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
        rule = f"{cell};border-bottom:1px solid currentColor"
        head = "".join(f'<th style="{rule}">{name}</th>' for name in HEAD)
        rows = "".join(
            "<tr style='background:none'>"
            + "".join(f'<td style="{cell}">{escape(text)}</td>' for text in row)
            + "</tr>"
            for row in self._table
        )
        notes = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in self._notes)
        findings = "".join(
            f"<li><b>{escape(each.what)}</b> ({escape(each.where)})<br>{escape(each.why)}"
            f"<br>{escape(each.advice)}</li>"
            for each in self.findings
        )
        return (
            '<div style="color:inherit;overflow-x:auto">'
            '<table style="border-collapse:collapse;color:inherit;background:none">'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"
            f"<ul>{findings}</ul></div>"
        )

    def row(self, module: str) -> AuditRow:
        """Return the row of one module."""
        return next(row for row in self.rows if row.module == module)

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain data for JSON."""
        return {
            "rows": [{k: _plain(v) for k, v in asdict(row).items()} for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
            "flop_shares": dict(self.flop_shares),
            "bytes": dict(self.bytes),
            "upcast_bytes": dict(self.upcast_bytes),
            "compiled": list(self.compiled),
        }

    @property
    def _table(self) -> list[tuple[str, ...]]:
        alike = groups_alike(self.rows, name=lambda r: r.module, treatment=lambda r: _cells(r)[1:])
        return [(_folded([row.module for row in rows]), *_cells(rows[0])[1:]) for rows in alike]

    @property
    def _notes(self) -> list[tuple[str, str]]:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.flop_shares.items())
        sizes = ", ".join(f"{role} {_size_text(size)}" for role, size in self.bytes.items())
        count, eager = len(self.findings), ", ".join(each or "the model" for each in self.compiled)
        return [
            ("FLOPs", shares or "no product was seen"),
            ("memory", sizes),
            *([("compiled", f"{eager}; products seen here ran in eager mode")] if eager else []),
            ("findings", str(count) if count else "none"),
        ]


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    step: Callable[[], object],
    *,
    expected: torch.dtype | str | None = None,
) -> Audit:
    """Run one training step and report the dtypes that it really used.

    The step is taken: weights and optimizer move as they would without the audit. It works with
    any loop and needs no `prepare`. It copies the trainable weights to host memory, and it
    synchronises with the device. Call it for the first step, before `torch.compile`.

    Args:
        model: The model that the step trains.
        optimizer: The optimizer of the model, or a list of them.
        step: Function without arguments that runs forward, backward and the optimizer step.
        expected: The widest dtype that products should have, such as "bf16" or `torch.bfloat16`.
            None: a mix of 16-bit and fp32 products is reported.

    Returns:
        The audit. Print it to see a table of the modules and the findings.

    Raises:
        ConfigError: An argument is invalid, or the step ran no backward pass or no update.

    Example:
        >>> def step():
        ...     with torch.autocast("cuda", dtype=torch.bfloat16):
        ...         loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> print(nc.audit(model, optimizer, step))
    """
    optimizers = _checked_optimizers(model, optimizer)
    if not callable(step):
        raise ConfigError(
            f"audit(step) must be a function without arguments, got {type(step).__name__}. Write "
            "def step(): … with the forward pass, loss.backward() and optimizer.step()."
        )
    widest = None if expected is None else _expected_bits(expected)
    setup = _TrainingSetup(model, optimizers)
    before = setup.trainable_values()
    seen = observe(model, setup.weights, step)
    changes = _Changes(setup, seen, before)
    _check_step(setup, seen, changes)
    rules = _Rules(setup, seen, changes)
    return Audit(
        rows=tuple(setup.rows(seen)),
        findings=tuple(rules.findings(widest=widest, expected=expected)),
        flop_shares=_flop_shares(seen),
        bytes=setup.bytes(seen),
        upcast_bytes={name: each.bytes for name, each in seen.upcasts.items()},
        compiled=tuple(setup.compiled),
    )


def _checked_optimizers(model: object, optimizer: Any) -> list[Any]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"audit(model) must be an nn.Module, got {type(model).__name__}. Write "
            "nc.audit(model, optimizer, step)."
        )
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise ConfigError(
                f"audit(optimizer) must be a torch optimizer or a list of them, got "
                f"{type(each).__name__}. Write nc.audit(model, optimizer, step)."
            )
    if not optimizers:
        raise ConfigError("audit(optimizer) needs at least one optimizer, got an empty list.")
    return optimizers


_BITS = {
    "fp64": 64, "fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "mxfp8": 8,
    "int8": 8, "e2m1": 4, "nvfp4": 4,
}  # fmt: skip
_LONG_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _expected_bits(expected: torch.dtype | str) -> int:
    """Return the width of the widest format that products should have."""
    name = dtype_name(expected) if isinstance(expected, torch.dtype) else expected
    name = _LONG_NAMES.get(name, name)
    if name not in _BITS:
        raise ConfigError(
            f"audit(expected) must be a dtype or one of {', '.join(_BITS)}, got {expected!r}."
        )
    return _BITS[name]


def _bits(shown: str) -> int:
    """Return the width of a format as it is shown: `bf16`, `e4m3/e5m2 emulated`."""
    return max(_BITS.get(name, 0) for name in shown.removesuffix(" emulated").split("/"))


_MASTER_KEY = re.compile(r"master|kahan|comp|residual|shift")
"""Names that optimizers give to the missing digits of a weight in their state."""
_ROUNDS_STOCHASTICALLY = ("bf16_stochastic_round", "stochastic_rounding", "stochastic_round")


@final
class _TrainingSetup:
    """A model and its optimizers: names, master weights and moments."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.model, self.optimizers = model, optimizers
        self.prepared: TrainedWeights | None = weights_trained_by(optimizers)
        self.planned = PlannedFormats(model)
        self.names = {p: name for name, p in model.named_parameters()}
        self.held = list(
            dict.fromkeys(p for each in optimizers for g in each.param_groups for p in g["params"])
        )
        masters = [] if self.prepared is None else self.prepared.masters.fp32_params
        self.stand_ins = set(masters)
        """What a prepared optimizer holds in place of weights."""
        self.weights = list(
            dict.fromkeys([*self.names, *(p for p in self.held if p not in self.stand_ins)])
        )
        self.compiled = [name for name, m in model.named_modules() if is_compiled(m)]

    def name(self, weight: nn.Parameter) -> str:
        """Return the name of a weight."""
        return self.names.get(weight, f"a parameter of shape {tuple(weight.shape)}")

    def trainable_values(self) -> dict[nn.Parameter, Tensor]:
        """Copy the trainable weights, with all digits that masters hold of them."""
        trained = [p for p in self.weights if p.requires_grad]
        return host_copies({p: self._full(p) for p in trained})

    def _full(self, weight: nn.Parameter) -> Tensor:
        if self.prepared is not None and weight in self.names:
            return self.prepared.full(weight)
        return weight.detach()

    def change(
        self, weight: nn.Parameter, before: Mapping[nn.Parameter, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return a weight before and after the step, with all digits; None if they are unknown."""
        master, _ = self.masters.get(weight, (None, ""))
        if self.prepared is None and weight in self.masters:
            # A master that lies in the optimizer's state is only known after the step.
            if not isinstance(master, nn.Parameter) or master not in before:
                return None
            weight = master
        return before[weight], local_part(self._full(weight)).cpu()

    @cached_property
    def masters(self) -> dict[nn.Parameter, tuple[Tensor | None, str]]:
        """The fp32 master of each 16-bit weight, if it is a tensor, and its dtype or kind."""
        if self.prepared is not None:
            own = self.prepared.masters
            return {} if own.kind == "none" else dict.fromkeys(own.parameters, (None, own.kind))
        result: dict[nn.Parameter, tuple[Tensor | None, str]] = {}
        for weight in self.names:
            if weight.dtype in NARROW and weight.requires_grad:
                master = self._foreign_master(weight)
                if master is not None:
                    result[weight] = master
        return result

    def _foreign_master(self, weight: nn.Parameter) -> tuple[Tensor | None, str] | None:
        """Return the master weight that another library has: known by its value or its name."""
        state = self._state(weight)
        outside = [p for p in self.held if p not in self.names and p.shape == weight.shape]
        for value in [*outside, *state.values()]:
            if isinstance(value, Tensor) and _is_master(value, weight):
                return value, dtype_name(value.dtype)
        for key, value in state.items():
            same_shape = isinstance(value, Tensor) and value.shape == weight.shape
            if same_shape and _MASTER_KEY.search(key):
                return None, key
        for each in self.optimizers:
            for source in [vars(each), *each.param_groups]:
                if any(source.get(key) for key in _ROUNDS_STOCHASTICALLY):
                    return None, "stochastic"
        return None

    def _state(self, weight: Tensor) -> Mapping[str, Any]:
        """Return what the optimizers store for a weight or for its master."""
        keys: list[Tensor] = [weight]
        if self.prepared is not None:
            own = self.prepared.masters
            keys += [m for m, p in zip(own.fp32_params, own.parameters, strict=True) if p is weight]
        for each in self.optimizers:
            for key in keys:
                if key in each.state:
                    return {str(name): value for name, value in each.state[key].items()}
        return {}

    def moments(self, weight: nn.Parameter) -> list[Tensor]:
        """Return the optimizer's moments of a weight, which are not its master."""
        master, _ = self.masters.get(weight, (None, ""))
        state = self._state(weight) or ({} if master is None else self._state(master))
        return [
            value
            for key, value in state.items()
            if isinstance(value, Tensor)
            and value.dim()
            and value is not master
            and not _MASTER_KEY.search(key)
            and not key.endswith("_scale")
        ]

    def rows(self, seen: Observation) -> Iterator[AuditRow]:
        """Yield the row of every module with weights or products."""
        for name, module in self.model.named_modules():
            own = list(module.parameters(recurse=False))
            if own or name in seen.products:
                yield self._row(name, module_kind(module), own, seen)
        if OUTSIDE in seen.products:
            yield self._row(OUTSIDE, "other", [], seen)

    def _row(
        self, name: str, kind: str, own: Sequence[nn.Parameter], seen: Observation
    ) -> AuditRow:
        products = seen.products.get(name)
        forward = () if products is None else products.formats("forward")
        if not forward and kind in _MULTIPLYING and self.is_compiled(name):
            forward = (NOT_SEEN,)
        return AuditRow(
            module=name,
            kind=kind,
            forward=forward,
            backward=() if products is None else products.formats("backward"),
            weight=_distinct(dtype_name(p.dtype) for p in own),
            gradient=_distinct(
                dtype_name(seen.gradients[p].dtype) for p in own if p in seen.gradients
            ),
            master=_distinct(self.masters[p][1] for p in own if p in self.masters),
            moments=_distinct(dtype_name(m.dtype) for p in own for m in self.moments(p)),
        )

    def is_compiled(self, name: str) -> bool:
        """Return whether a module lies in a compiled one."""
        return any(not c or name == c or name.startswith(f"{c}.") for c in self.compiled)

    def bytes(self, seen: Observation) -> dict[str, int]:
        """Return the size of everything that a step reads and writes for the weights."""
        if self.prepared is not None:
            masters = self.prepared.masters.bytes()
        else:
            masters = sum(_bytes(m) for m, _ in self.masters.values() if m is not None)
        graded = [(p, seen.gradients[p].dtype) for p in self.weights if p in seen.gradients]
        return {
            "weights": sum(map(_bytes, self.names)),
            "gradients": sum(p.numel() * dtype.itemsize for p, dtype in graded),
            "masters": masters,
            "moments": sum(_bytes(m) for p in self.weights for m in self.moments(p)),
        }


_MULTIPLYING = ("linear", "convolution", "attention", "recurrent")


def _is_master(value: Tensor, weight: nn.Parameter) -> bool:
    """Return whether an fp32 tensor rounds to this 16-bit weight. Synchronises."""
    if value is weight or value.dtype != torch.float32 or value.shape != weight.shape:
        return False
    own, full = local_part(weight), local_part(value.detach())
    return bool(own.any()) and torch.equal(full.to(own.dtype), own)


@final
class _Changes:
    """Which elements of the weights a step changed, of those with a gradient."""

    def __init__(
        self, setup: _TrainingSetup, seen: Observation, before: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self.before = before
        self.lost: dict[nn.Parameter, tuple[int, int]] = {}
        """Elements with a gradient that did not change, and all elements with a gradient."""
        self.any = False
        for weight in before:
            grad, values = seen.gradients.get(weight), setup.change(weight, before)
            if values is None or values[0].shape != values[1].shape:
                self.any = True
                continue
            same = values[0] == values[1]
            self.any |= not bool(same.all())
            if grad is not None and grad.nonzero.shape == same.shape:
                self.lost[weight] = (int((same & grad.nonzero).sum()), int(grad.nonzero.sum()))


def _check_step(setup: _TrainingSetup, seen: Observation, changes: _Changes) -> None:
    if not seen.backward_seen and not changes.any:
        raise ConfigError(
            "The step ran no backward pass through the weights of this model and optimizer. Call "
            "loss.backward() inside step, for the model that you pass to audit()."
        )
    stepped = seen.optimizer_steps or seen.scaler_seen or changes.any
    if setup.prepared is not None:
        stepped = stepped or all(p.grad is None for p in setup.prepared.all)
    if not stepped:
        raise ConfigError(
            "The step computed gradients, but no optimizer step ran and no weight changed. Call "
            "optimizer.step() inside step, and pass a whole step if you accumulate gradients."
        )


@final
class _Rules:
    """What is suspicious in an observed step."""

    def __init__(self, setup: _TrainingSetup, seen: Observation, changes: _Changes) -> None:
        self._setup, self._seen, self._changes = setup, seen, changes

    def findings(self, *, widest: int | None, expected: object) -> Iterator[AuditFinding]:
        """Yield all findings, those about lost digits first."""
        yield from self._no_master()
        yield from self._update()
        yield from self._stale()
        yield from self._grid()
        yield from self._wide_products(widest, expected)
        yield from self._loss_scale()
        yield from self._narrow_state()
        yield from self._upcasts()
        yield from self._unseen()

    def _no_master(self) -> Iterator[AuditFinding]:
        setup = self._setup
        held = set(setup.held)
        lacking: dict[str, list[nn.Parameter]] = defaultdict(list)
        for p in setup.names:
            trained = p.requires_grad and (p in held or p in self._seen.gradients)
            if trained and p.dtype in NARROW and p not in setup.masters:
                lacking[dtype_name(p.dtype)].append(p)
        for name, weights in lacking.items():
            digits = 8 if name == "bf16" else 11
            yield AuditFinding(
                kind="no master weights",
                what=f"{name} without master weights: {_count(weights, 'trainable weight')}",
                where=self._where(weights),
                why=f"{name} has {digits} significant bits, so an update below "
                f"1/{2 ** (digits + 1)} of a weight is lost. {self._lost_text(weights)}",
                advice="Load the model in fp32 and compute in 16 bits with autocast, or write "
                'nc.prepare(model.float(), optimizer, policy="bf16, params=bf16, master=split").',
            )

    def _lost_text(self, weights: Iterable[nn.Parameter]) -> str:
        pairs = [self._changes.lost[p] for p in weights if p in self._changes.lost]
        lost, all_ = sum(a for a, _ in pairs), sum(b for _, b in pairs)
        return f"In this step {lost:,} of {all_:,} elements with a gradient did not change."

    def _update(self) -> Iterator[AuditFinding]:
        seen, lost = self._seen, self._changes.lost
        if not self._changes.any and not seen.optimizer_steps:
            yield AuditFinding(
                kind="skipped step",
                what="the optimizer step was skipped",
                where="all weights",
                why="The loss scaler found inf or NaN gradients, so no weight changed. The first "
                "steps of fp16 training are often skipped, until the loss scale fits.",
                advice="Audit a later step to see the moments and the updates.",
            )
            return
        if seen.learning_rates and not any(seen.learning_rates):
            yield AuditFinding(
                kind="zero learning rate",
                what="the learning rate was 0",
                where="all parameter groups",
                why="A warm-up from 0 has this in its first step. Updates cannot be judged.",
                advice="Audit a later step.",
            )
            return
        weights = [p for p, (unchanged, all_) in lost.items() if 2 * unchanged > all_]
        if self._setup.prepared is not None and self._setup.prepared.masters.kind == "stochastic":
            weights = []  # right on average: most elements stay where they are
        weights = [p for p in weights if p in self._updated]
        if weights:
            yield AuditFinding(
                kind="lost updates",
                what=f"more than half of the updates of {_count(weights, 'weight')} were lost",
                where=self._where(weights),
                why=self._lost_text(weights),
                advice="Store these weights in fp32, or with master weights. In fp32, check the "
                "learning rate and that the optimizer updates the weights of this model.",
            )

    @cached_property
    def _updated(self) -> set[nn.Parameter]:
        """The weights that an optimizer holds, itself or by a master."""
        return {*self._setup.held, *self._setup.masters}

    def _stale(self) -> Iterator[AuditFinding]:
        setup = self._setup
        masters = {id(master) for master, _ in setup.masters.values() if master is not None}
        masters |= {id(p) for p in setup.stand_ins}
        missing = [
            p
            for p in setup.names
            if p.requires_grad and p not in self._updated and p in self._seen.gradients
        ]
        # An optimizer that nobody passed may update them: a GAN has two.
        missing = [p for p in missing if not self._has_changed(p)]
        if missing:
            yield AuditFinding(
                kind="not in the optimizer",
                what=f"not in the optimizer: {_count(missing, 'trainable weight')}",
                where=self._where(missing),
                why="They have gradients and are never updated.",
                advice="Build the optimizer after the model has its final weights, or call "
                "requires_grad_(False) on those that are frozen.",
            )
        foreign = [p for p in setup.held if p not in setup.names and id(p) not in masters]
        if foreign and (missing or not self._any_gradient(foreign)):
            yield AuditFinding(
                kind="not in the model",
                what=f"not in the model: {_count(foreign, 'parameter')} of the optimizer",
                where=self._where(foreign),
                why="The optimizer holds weights that the model does not use. A wrapper or a "
                "conversion has replaced the weights of the model.",
                advice="Build the optimizer from model.parameters() after wrapping, sharding or "
                "converting the model.",
            )

    def _has_changed(self, weight: nn.Parameter) -> bool:
        unchanged, all_ = self._changes.lost.get(weight, (0, 0))
        return unchanged < all_

    def _any_gradient(self, weights: Iterable[nn.Parameter]) -> bool:
        return any(p in self._seen.gradients for p in weights)

    def _grid(self) -> Iterator[AuditFinding]:
        on_grid: dict[str, list[nn.Parameter]] = defaultdict(list)
        for weight, value in self._changes.before.items():
            if weight.dtype == torch.float32 and weight in self._setup.names:
                for target in (BF16, FP16):
                    if lies_on_grid(value, target) and _has_digits(value):
                        on_grid[target.name].append(weight)
                        break
        for name, weights in on_grid.items():
            yield AuditFinding(
                kind="weights on a narrow grid",
                what=f"all values of {_count(weights, 'fp32 weight')} are exactly representable in "
                f"{name}",
                where=self._where(weights),
                why=f"They were initialised in {name}, or loaded from a {name} checkpoint, and "
                "cast to fp32 afterwards. The missing digits are not there.",
                advice="Initialise the model in fp32. A checkpoint that was saved in 16 bits has "
                "no more digits, so nothing needs to be done for it.",
            )

    def _wide_products(self, widest: int | None, expected: object) -> Iterator[AuditFinding]:
        limit = widest
        if limit is None:
            shares = _flop_shares(self._seen)
            narrow = sum(share for name, share in shares.items() if 0 < _bits(name) <= 16)
            if narrow < 0.5:
                return
            limit = 16
        total = sum(sum(each.flops.values()) for each in self._seen.products.values())
        wide: dict[str, int] = {}
        formats: set[str] = set()
        for name, products in self._seen.products.items():
            for (_, shown), flops in products.flops.items():
                if _bits(shown) > limit and not self._is_planned(name, shown, widest):
                    wide[name] = wide.get(name, 0) + flops
                    formats.add(shown)
        if widest is None:  # rotary embeddings and the like are in fp32 for good reasons
            wide = {n: f for n, f in wide.items() if f >= 0.01 * total or self._multiplies(n)}
        if wide:
            share = sum(wide.values()) / total if total else 0.0
            requested = f"{expected} was expected" if widest is not None else "the rest is narrower"
            yield AuditFinding(
                kind="wide products",
                what=f"{share:.1%} of the product FLOPs ran in {', '.join(sorted(formats))}, but "
                f"{requested}",
                where=_where(list(wide)),
                why="These products do not run in the precision of the others. They are slower "
                "and take more memory.",
                advice="Check that autocast covers the module in the forward pass, and that "
                "nothing casts its input or switches autocast off.",
            )

    def _multiplies(self, name: str) -> bool:
        module = dict(self._setup.model.named_modules()).get(name)
        return module is not None and module_kind(module) in _MULTIPLYING

    def _is_planned(self, name: str, shown: str, widest: int | None) -> bool:
        """Return whether a policy or a module declares that these products are wide."""
        if widest is not None:
            return False
        modules = dict(self._setup.model.named_modules())
        parts = name.split(".")
        around = [modules.get(".".join(parts[:n])) for n in range(1, len(parts) + 1)]
        if any(getattr(module, "runs_in_fp32", False) for module in around):
            return True
        requested = self._setup.planned.requested(name)
        # Emulated recurrent layers round what goes in and out, not the sums over time in them.
        recurrent = modules.get(name) is not None and module_kind(modules[name]) == "recurrent"
        return requested == shown or (requested is not None and recurrent)

    def _loss_scale(self) -> Iterator[AuditFinding]:
        seen = self._seen
        if seen.scaler_seen or self._setup.prepared is not None or not seen.fp16_results:
            return
        share = seen.fp16_tiny / seen.fp16_results
        if share >= 0.01:
            yield AuditFinding(
                kind="no loss scale",
                what="fp16 gradients are computed without a loss scale",
                where=_where(
                    [n for n, each in seen.products.items() if "fp16" in each.formats("backward")]
                ),
                why=f"{share:.1%} of the results of fp16 products in the backward pass are zero "
                "or subnormal (below 6.1e-5), where fp16 loses digits. No GradScaler was seen.",
                advice="Use torch.amp.GradScaler, bf16 instead of fp16, or nc.prepare(model, "
                'optimizer, policy="fp16"), which scales the loss.',
            )

    def _narrow_state(self) -> Iterator[AuditFinding]:
        setup = self._setup
        if setup.prepared is not None:
            return  # a policy says what is stored in 16 bits
        narrow = [p for p in setup.names if any(m.dtype in NARROW for m in setup.moments(p))]
        if narrow:
            yield AuditFinding(
                kind="narrow moments",
                what=f"optimizer moments in 16 bits: {_count(narrow, 'weight')}",
                where=self._where(narrow),
                why="Second moments move by 0.1 % per step with beta2=0.999. bf16 cannot "
                "represent such a change, so they stop decaying.",
                advice="Keep the weights that the optimizer gets in fp32. Its moments have their "
                "dtype.",
            )
        grads = self._seen.gradients
        added = [
            p
            for p in setup.names
            if p in grads and grads[p].passes > 1 and grads[p].dtype in NARROW
        ]
        if added:
            passes = max(grads[p].passes for p in added)
            yield AuditFinding(
                kind="narrow accumulation",
                what=f"gradients accumulated in 16 bits over {passes} backward passes: "
                f"{_count(added, 'weight')}",
                where=self._where(added),
                why="Every addition rounds the sum to 8 (bf16) or 11 (fp16) significant bits.",
                advice="Store the weights in fp32, so that gradients accumulate in fp32.",
            )

    def _upcasts(self) -> Iterator[AuditFinding]:
        large = {n: u for n, u in self._seen.upcasts.items() if u.bytes >= LARGE_UPCAST_BYTES}
        if large:
            size = sum(each.bytes for each in large.values())
            yield AuditFinding(
                kind="large upcast",
                what=f"{_size_text(size)} of activations were cast from 16 bits to fp32",
                where=_where([f"{n} ({_size_text(u.bytes)})" for n, u in large.items()]),
                why="The copy is twice as large as its source, and both may be stored for the "
                "backward pass. Logits of a large vocabulary are the usual case.",
                advice="Remove .float() where the next operation accepts 16 bits. For logits, "
                "compute the loss with nc.linear_cross_entropy, which does not materialise them.",
            )

    def _unseen(self) -> Iterator[AuditFinding]:
        rows = list(self._setup.rows(self._seen))
        unseen = [row.module for row in rows if row.forward == (NOT_SEEN,)]
        multiplying = any(row.kind in _MULTIPLYING for row in rows)
        if unseen or (multiplying and not self._seen.products):
            cause = "compiled code" if self._setup.compiled else "CUDA graphs or custom kernels"
            yield AuditFinding(
                kind="products not seen",
                what=f"products inside {cause} were not seen",
                where=_where(unseen) if unseen else "the whole step",
                why="Their dtypes are unknown. Weights, gradients, masters and moments are "
                "reported as they are.",
                advice="Audit the model before torch.compile or graph capture.",
            )

    def _where(self, weights: Sequence[nn.Parameter]) -> str:
        return _where([self._setup.name(p) for p in weights])


def _has_digits(value: Tensor) -> bool:
    """Return whether a tensor has enough distinct values other than powers of two and integers."""
    sample = value.flatten()[: 2**16].abs()
    mantissa = torch.frexp(sample).mantissa
    telling = sample[(mantissa != 0.5) & (sample != sample.round()) & sample.isfinite()]
    return int(telling.unique().numel()) >= FEWEST_VALUES


def _flop_shares(seen: Observation) -> dict[str, float]:
    flops: dict[str, int] = defaultdict(int)
    for products in seen.products.values():
        for (_, name), count in products.flops.items():
            flops[name] += count
    total = sum(flops.values()) or 1
    return {name: flops[name] / total for name in sorted(flops, key=lambda each: -flops[each])}


def _where(names: Sequence[str]) -> str:
    groups = groups_alike(list(names), name=str, treatment=lambda _: None)
    shown = [_folded(group) for group in groups]
    more = [f"and {len(shown) - 6} more"] if len(shown) > 6 else []
    return ", ".join([*shown[:6], *more])


def _folded(names: Sequence[str]) -> str:
    return folded(names) + (f" ×{len(names)}" if len(names) > 1 else "")


def _cells(row: AuditRow) -> tuple[str, ...]:
    return tuple(
        " ".join(value) if isinstance(value, tuple) else value
        for value in (getattr(row, name) for name in HEAD)
    )


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size_text(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
