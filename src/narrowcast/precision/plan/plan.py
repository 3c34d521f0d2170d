"""The plan: for every module, which formats it gets, whether native or emulated, and why.

A pure function of model, policy and hardware. The command line prints it, `prepare` carries it out
and the report shows it: they read one value and cannot disagree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware, Support, detect_hardware
from narrowcast.precision.plan.fusing import Fuse, FusedPiece, fused_pieces, piece_lines
from narrowcast.precision.plan.gains import Execution, Measured, detect_execution
from narrowcast.precision.plan.gains import execution_lines as running_lines
from narrowcast.precision.plan.memory import Memory, MemoryPlan, plan_memory
from narrowcast.precision.plan.module_kinds import module_kind
from narrowcast.precision.plan.module_plan import ModulePlan, ModulePlanner, widens
from narrowcast.precision.plan.policy import ITSELF, Policy, matches, suggestion
from narrowcast.precision.plan.presets import AnyPolicy, policy_from
from narrowcast.precision.plan.table import Table, as_html, as_text, make_table
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.precision.swap import plain_class

ASSUMED_ROWS = 8192
"""Rows a linear layer multiplies at once, where nobody says."""


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
    """The requested emulation: None where needed, True everywhere, False nowhere."""
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
        notes = [*whole.notes, *running, *self.memory.lines, *piece_lines(self.fused)]
        return whole._replace(notes=notes)

    @property
    def spares_host(self) -> int:
        """Number of modules kept wider only because of the host cost of fp8."""
        return sum(each.spares_host for each in self.modules)

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
        }


def make_plan(
    model: nn.Module,
    policy: AnyPolicy,
    *,
    hardware: Hardware | None = None,
    overrides: Mapping[str, str] | None = None,
    emulate: bool | None = None,
    moments: int = 2,
    gemm_rows: int = ASSUMED_ROWS,
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
        gemm_rows: Number of rows that a linear layer multiplies at once.
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
    hardware, execution = hardware or _model_hardware(model), detect_execution(model, execution)
    whole = policy_from(policy, hardware).with_exceptions(overrides or {})
    _check_globs(whole, model)
    planner = ModulePlanner(
        whole,
        hardware,
        emulate,
        measured=Measured(
            speeds=hardware.speeds, rows=gemm_rows, execution=execution, skip_slow_fp8=skip_slow_fp8
        ),
    )
    seen: set[int] = set()
    inside_attention: set[int] = set()
    uncalled: set[str] = set()
    modules: list[ModulePlan] = []
    for name, module in model.named_modules():
        kind = module_kind(module)
        if kind == "attention":
            inside_attention |= {id(child) for child in module.modules()} - {id(module)}
        if id(module) in inside_attention:
            continue
        named = any(matches(name, glob) for glob, _ in whole.exceptions)
        named |= name.rpartition(".")[0] in uncalled
        if named and plain_class(module).forward is nn.Module.forward:
            uncalled.add(name)  # a list of modules: what it is excepted from, they are
            named = False
        own = list(module.parameters(recurse=kind == "attention"))
        itself = not name and any(glob == ITSELF for glob, _ in whole.exceptions)
        if kind == "other" and not own and not (named and name) and not itself:
            continue
        fresh = [p for p in own if id(p) not in seen]
        tied = len(own) > len(fresh)
        seen |= {id(p) for p in own}
        modules.append(planner.plan_module(name, module, kind, fresh, tied=tied, moments=moments))
    totals: dict[str, int] = {}
    for module_plan in modules:
        for role, size in module_plan.bytes.items():
            totals[role] = totals.get(role, 0) + size
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
    )


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
    """Describe the device that a model is on; the best there is where it has no weights yet."""
    first = next(model.parameters(), None)
    return detect_hardware("auto" if first is None or first.is_meta else str(first.device))
