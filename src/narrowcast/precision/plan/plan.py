"""The plan: for every module, which formats it gets, whether native or emulated, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NamedTuple

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, Support, detect_hardware
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.fusing import Fuse, FusedPiece, fused_pieces, piece_lines
from narrowcast.precision.plan.gains import Execution, GemmRows, Measured, detect_execution
from narrowcast.precision.plan.gains import execution_lines as running_lines
from narrowcast.precision.plan.memory import Memory, MemoryPlan, plan_memory
from narrowcast.precision.plan.module_plan import (
    ListedModule,
    ModulePlan,
    ModulePlanner,
    describe_loss,
    module_kind,
    multiplies,
    widens,
)
from narrowcast.precision.plan.policy import (
    ITSELF,
    PRODUCTS,
    AnyPolicy,
    Policy,
    matches,
    policy_from,
    short_text,
    suggestion,
)
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.precision.swap import plain_class

HEAD = ("module", "kind", "products", "weights", "how", "parameters", "reason")
NUMBER = HEAD.index("parameters")
ROLES = {"params": "weights", "grads": "gradients", "fp8": "weights in fp8"}


class Table(NamedTuple):
    """What is shown of a plan: a title, rows under `HEAD`, and what they come to."""

    title: str
    rows: list[tuple[str, ...]]
    notes: list[tuple[str, str]]


def make_table(
    policy: Policy,
    hardware: Hardware,
    modules: Sequence[ModulePlan],
    functional: Support,
    sizes: Mapping[str, int],
) -> Table:
    """Return the table of a plan; modules that differ only in an index share a row."""
    alike = groups_alike(modules, name=lambda m: m.name, treatment=lambda m: (*_row(m), m.kind))
    total = sum(module.parameters for module in modules)
    taken = [f"{ROLES.get(role, role)} {_mib(size)}" for role, size in sizes.items() if size]
    outside = f"{policy.functional}, {functional.how}: {functional.reason}"
    return Table(
        title=f"{short_text(policy)} on {hardware.name} ({hardware.device})",
        rows=[_folded_row(row) for row in alike],
        notes=[
            ("outside", f"products outside modules (attention, matmul): {outside}"),
            ("in all", f"{len(modules)} modules, {total:,} parameters"),
            ("memory", f"{' + '.join(taken)} = {_mib(sum(sizes.values()))}, and activations"),
        ],
    )


def as_text(table: Table) -> str:
    """Write a table in columns."""
    lines = [HEAD, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD) - 1)]
    written = [_aligned(line, widths) for line in lines]
    width = max([9, *(len(name) + 2 for name, _ in table.notes)])
    notes = [f"{name:<{width}}{text}" for name, text in table.notes]
    return "\n".join([table.title, "", *written, "", *notes])


def as_html(table: Table) -> str:
    """Write a table for a notebook, in whatever colours that has."""
    cell = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
    number = cell.replace("left", "right")
    rule = "border-bottom:1px solid currentColor"
    styles = [number if i == NUMBER else cell for i in range(len(HEAD))]
    head = "".join(
        f'<th style="{style};{rule}">{name}</th>' for name, style in zip(HEAD, styles, strict=True)
    )
    rows = "".join(
        "<tr style='background:none'>"
        + "".join(
            f'<td style="{style}">{escape(text)}</td>'
            for text, style in zip(row, styles, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in table.notes)
    return (
        '<div style="color:inherit;overflow-x:auto">'
        f"<div><b>{escape(table.title)}</b></div>"
        '<table style="border-collapse:collapse;color:inherit;background:none">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</div>"
    )


def _row(module: ModulePlan) -> tuple[str, ...]:
    """Return what a module has in every column but its name."""
    shown = module.to_json()
    products = [shown[role] for role in PRODUCTS]
    reason = module.reason.removeprefix(f"{module.how}: ")
    return (
        module.kind,
        products[0] if len(set(products)) == 1 else " ".join(products),
        shown["params"],
        module.how,
        f"{module.parameters:,}",
        reason,
    )


def _folded_row(alike: Sequence[ModulePlan]) -> tuple[str, ...]:
    kind, products, weights, how, _, reason = _row(alike[0])
    times = f" ×{len(alike)}" if len(alike) > 1 else ""
    parameters = f"{sum(module.parameters for module in alike):,}"
    name = folded([module.name for module in alike]) + times
    reason = "; ".join(filter(None, [reason, describe_loss([module.frozen for module in alike])]))
    return name, kind, products, weights, how, parameters, reason


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        text.rjust(width) if i == NUMBER else text.ljust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=False))
    ]
    return "  ".join([*cells, line[-1]]).rstrip()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Formats of every module of a model, made by `plan` and carried out by `prepare`."""

    policy: Policy
    """The requested policy, exceptions included."""
    hardware: Hardware
    """The device it was made for."""
    modules: tuple[ModulePlan, ...]
    """Modules with weights, products or an exception, in the order of the model."""
    functional: Support
    """How products outside modules run."""
    emulate: bool | None = None
    """The requested emulation: None if needed, True everywhere, False nowhere."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Device memory of weights, gradients, master weights and moments, by role."""
    fuse: Fuse = "auto"
    """The requested fused pieces."""
    fused: tuple[FusedPiece, ...] = ()
    """Pieces that are fused, and those that are not, each with the reason."""
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    """What is recomputed or offloaded to save device memory."""
    execution: Execution = "eager"
    """How the model is expected to run."""
    rows: GemmRows = field(default_factory=GemmRows)
    """How many rows linear layers multiply at once."""
    moments: int = 2
    """Moments per weight that `bytes` counts."""

    @property
    def learns_rows(self) -> bool:
        """Whether its formats depend on numbers of rows that are only assumed."""
        return self.rows.source == "assumed" and any(m.rows is not None for m in self.modules)

    @property
    def emulated(self) -> bool:
        """Whether products outside modules are emulated, or their 16-bit weights are cast first."""
        return self.functional.how == "emulated" or widens(self.policy)

    def __repr__(self) -> str:
        """Return the plan as a table with one line per group of similar modules."""
        return as_text(self._table)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Show the same table in a notebook."""
        return as_html(self._table)

    @property
    def _table(self) -> Table:
        whole = make_table(self.policy, self.hardware, self.modules, self.functional, self.bytes)
        speeds, narrow = self.hardware.speeds, any("fp8" in each.bytes for each in self.modules)
        weighed = narrow and speeds is not None and bool(speeds.host_seconds)
        running = running_lines(self.execution, spared=self.spares_host, weighed=weighed)
        decided = any(each.rows is not None for each in self.modules)
        rows = [("rows", str(self.rows))] if decided else []
        notes = [*whole.notes, *running, *rows, *self.memory.lines, *piece_lines(self.fused)]
        return whole._replace(notes=notes)

    @property
    def spares_host(self) -> int:
        """Number of modules kept wider only because of the host cost of fp8."""
        return sum(each.spares_host for each in self.modules)

    def fits(self, budget: str | int) -> bool:
        """Return whether a training step fits into a budget such as "24GiB".

        Raises:
            ConfigError: The plan was made without a batch, so activations are unknown.
        """
        if self.memory.predicted is None:
            raise ConfigError(
                "plan.fits() needs the memory of a step, which depends on the batch. Pass batch= "
                "to nc.plan(), or use nc.plan_recipe()."
            )
        return self.memory.predicted.fits(budget)

    def module(self, name: str) -> ModulePlan:
        """Return the plan of one module."""
        return next(m for m in self.modules if m.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return {
            "policy": str(self.policy),
            "hardware": f"{self.hardware.name} ({self.hardware.device})",
            "modules": [m.to_json() for m in self.modules],
            "functional": {
                "format": self.policy.functional,
                "how": self.functional.how,
                "reason": self.functional.reason,
            },
            "bytes": dict(self.bytes),
            "fused": [each.to_json() for each in self.fused],
            "memory": self.memory.to_json(),
            "execution": self.execution,
            "rows": self.rows.to_json(),
        }


def make_plan(
    model: nn.Module,
    policy: AnyPolicy,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, str] | None = None,
    emulate: bool | None = None,
    moments: int = 2,
    gemm_rows: int | GemmRows | None = None,
    skip_slow_fp8: bool = True,
    fuse: Fuse = "auto",
    memory: Memory | None = None,
    execution: Execution | None = None,
) -> Plan:
    """Decide the number format of every module, without changing the model.

    Args:
        model: The model, prepared or not. It may be on the meta device.
        policy: A preset name or policy text, a `Policy`, or a torch dtype.
        hardware: The device to plan for. None: the device of the model, or the best one here.
        overrides: Exceptions by module glob, for example `{"*.head": "bf16"}`.
        emulate: None: emulate where the hardware needs it. True: everywhere. False: never; a
            policy that needs emulation raises.
        moments: Number of moments that the optimizer stores per weight.
        gemm_rows: Number of rows that a linear layer multiplies at once. None: 8,192 is assumed,
            until a prepared run learns the numbers from its first training batch.
        skip_slow_fp8: Keep a layer in the wider format if fp8 measured no faster for it.
        fuse: "auto" (fuse known pieces in 16 bits on a GPU), "none", or names of pieces. A named
            piece that cannot be fused raises.
        memory: What to recompute or offload to save device memory. None: nothing.
        execution: "eager", "compiled" or "graphed". In eager mode a layer stays wider if fp8 costs
            the host more time than it saves. None: detected from the model.

    Returns:
        The plan. Print it to see the format of every module and the reason.

    Raises:
        ConfigError: The policy is invalid, or an exception matches no module.
        UnsupportedError: This hardware cannot run the policy as requested.
    """
    hardware = hardware or _model_hardware(model)
    execution = detect_execution(model, execution)
    whole = policy_from(policy, hardware).with_exceptions(overrides or {})
    _check_globs(whole, model)
    rows = GemmRows.of(gemm_rows)
    measured = Measured(
        speeds=hardware.speeds, rows=rows, execution=execution, skip_slow_fp8=skip_slow_fp8
    )
    planner = ModulePlanner(whole, hardware, emulate, measured=measured)
    modules = [planner.plan_module(each, moments=moments) for each in _listed(model, whole)]
    totals = _total_bytes(modules)
    functional = planner.support(whole.functional)
    fused = fused_pieces(
        model,
        fuse,
        policy=whole,
        hardware=hardware,
        modules=modules,
        emulated=functional.how == "emulated" or widens(whole),
    )
    saving = plan_memory(model, memory or Memory(), hardware=hardware, sizes=totals)
    if saving.on_host:
        totals["moments"] -= saving.on_host
    return Plan(
        policy=whole,
        hardware=hardware,
        modules=tuple(modules),
        functional=functional,
        emulate=emulate,
        bytes=totals,
        fuse=fuse if isinstance(fuse, str) else tuple(fuse),
        fused=fused,
        memory=saving,
        execution=execution,
        rows=rows,
        moments=moments,
    )


def _listed(model: nn.Module, policy: Policy) -> Iterator[ListedModule]:
    """Yield the modules of a plan: those with weights, products or an exception."""
    seen: set[int] = set()
    inside_attention: set[int] = set()
    uncalled: set[str] = set()
    in_fp32: set[str] = set()
    globs = [glob for glob, _ in policy.exceptions]
    for name, module in model.named_modules():
        kind = module_kind(module)
        if kind == "attention":
            inside_attention |= {id(child) for child in module.modules()} - {id(module)}
        if id(module) in inside_attention:
            continue
        named = any(matches(name, glob) for glob in globs)
        named |= name.rpartition(".")[0] in uncalled
        if named and plain_class(module).forward is nn.Module.forward:
            uncalled.add(name)  # a list of modules: its exception applies to its members
            named = False
        if getattr(module, "runs_in_fp32", False) or name.rpartition(".")[0] in in_fp32:
            in_fp32.add(name)
        own = list(module.parameters(recurse=kind == "attention"))
        excepted = named if name else ITSELF in globs
        if kind == "other" and not own and not excepted:
            continue
        fresh = [p for p in own if id(p) not in seen]
        seen |= {id(p) for p in own}
        tied = len(own) > len(fresh)
        yield ListedModule(name, module, kind, fresh, tied, in_fp32=name in in_fp32)


def _total_bytes(modules: Sequence[ModulePlan]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for each in modules:
        for role, size in each.bytes.items():
            totals[role] = totals.get(role, 0) + size
    return totals


def with_losses(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan that was made from shapes alone with what a model's kept weights have lost."""
    if not any(each.frozen for each in plan.modules):
        return plan
    measured = []
    for each in plan.modules:
        module = model.get_submodule(each.name)
        if each.frozen is not None and isinstance(module, QuantizedFrozenLayer):
            each = replace(each, frozen=replace(each.frozen, snr_db=module.quantized.snr_db))
        measured.append(each)
    return replace(plan, modules=tuple(measured))


def with_rows(plan: Plan, model: nn.Module, rows: GemmRows) -> Plan:
    """Return the plan of a model for other numbers of rows, and all else as it was."""
    made = make_plan(
        model,
        plan.policy,
        hardware=plan.hardware,
        emulate=plan.emulate,
        moments=plan.moments,
        gemm_rows=rows,
        fuse=plan.fuse,
        memory=plan.memory.requested,
        execution=plan.execution,
    )
    before = plan.memory
    memory = replace(made.memory, predicted=before.predicted, chosen=before.chosen)
    return replace(made, memory=memory)


def _check_globs(policy: Policy, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules()]
    for glob, text in policy.exceptions:
        if not any(matches(name, glob) for name in names):
            raise ConfigError(
                f"precision exception `{glob}: {text}` matches no "
                f"module{suggestion(glob, names)}. Print the plan without it to see the module "
                "names."
            )


def _model_hardware(model: nn.Module) -> Hardware:
    """Describe the device of a model; the best available one if it has no weights yet."""
    first = next(model.parameters(), None)
    return detect_hardware("auto" if first is None or first.is_meta else str(first.device))


@dataclass(frozen=True, kw_only=True)
class PrecisionChange:
    """A module whose formats were changed in a run."""

    module: str
    before: str
    """The previous formats, such as `bf16` or `e4m3/e5m2 delayed`."""
    after: str


def changes_between(before: Plan, after: Plan) -> list[PrecisionChange]:
    """Return the modules that two plans of a model treat differently, in its order."""
    had = {module.name: formats_text(module, before) for module in before.modules}
    has = {module.name: formats_text(module, after) for module in after.modules}
    names = dict.fromkeys([*had, *has])
    # A plan lists a module without weights only where an exception names it; else it is as around.
    pairs = (
        (n, had.get(n, before.policy.functional), has.get(n, after.policy.functional))
        for n in names
    )
    return [PrecisionChange(module=n, before=a, after=b) for n, a, b in pairs if a != b]


def formats_text(module: ModulePlan, plan: Plan) -> str:
    """Return the formats of products, and of weights if they are not fp32."""
    return ", ".join(_parts(module, plan))


def _parts(module: ModulePlan, plan: Plan) -> Iterator[str]:
    policy = module.policy
    if module.kind == "normalisation":
        yield policy.reduce
    elif multiplies(module.kind):
        formats = dict.fromkeys(getattr(policy, role) for role in PRODUCTS)
        scaling = "" if policy.scaling == "none" else f" {policy.scaling}"
        yield "/".join(formats) + scaling
    if policy.params != "fp32":
        master = "no master" if plan.policy.master == "none" else f"{plan.policy.master} master"
        yield f"weights {policy.params} with {master}"
    elif not multiplies(module.kind) and module.kind != "normalisation":
        yield "weights fp32"
