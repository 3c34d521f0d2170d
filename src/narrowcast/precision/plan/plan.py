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
from narrowcast.precision.plan.fusing import AUTO, Fuse, FusedPiece, fused_pieces, piece_lines
from narrowcast.precision.plan.gains import Execution, Measured, detect_execution
from narrowcast.precision.plan.gains import execution_lines as running_lines
from narrowcast.precision.plan.memory import AS_IT_IS, Memory, MemoryPlan, plan_memory
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
    """What a whole model gets; carried out by `prepare`."""

    policy: Policy
    """As asked for, exceptions included."""
    hardware: Hardware
    """What it was made for."""
    modules: tuple[ModulePlan, ...]
    """Those that hold weights, multiply, or are an exception, in the model's order."""
    functional: Support
    """How products run that no module makes."""
    emulate: bool | None = None
    """What was asked: emulate where needed, everywhere, nowhere."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """What weights, gradients, master weights and moments will take on the device, by role."""
    fuse: Fuse = AUTO
    """What was asked to be computed as one."""
    fused: tuple[FusedPiece, ...] = ()
    """What is, and what is left as it is though it could be, each with the reason."""
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    """What is computed again, and what waits in the host's memory, to need less on the device."""
    execution: Execution = "eager"
    """How the model's passes were taken to be run."""

    @property
    def emulated(self) -> bool:
        """True where functional products are emulated, or their 16-bit weights widened first."""
        return self.functional.how == "emulated" or widens(self.policy)

    def __repr__(self) -> str:
        """Write the plan as a table: a line for each module, then what they come to."""
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
        """How many modules are kept wider only for what fp8 would cost the host in eager mode."""
        return sum(each.spares_host for each in self.modules)

    def module(self, name: str) -> ModulePlan:
        """Return the plan of one module."""
        return next(m for m in self.modules if m.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
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
    fuse: Fuse = AUTO,
    memory: Memory = AS_IT_IS,
    execution: Execution | None = None,
) -> Plan:
    """Decide the formats of every module. Leaves the model as it is, prepared or not.

    `hardware`: that of the device the model is on, or the best of this machine where it is on none.
    `emulate`: None where the hardware needs it, True everywhere, False nowhere: then a policy that
    would need it is refused. `moments` is how many the optimizer keeps of each weight. `gemm_rows`
    is how many rows a linear layer multiplies at once; with `skip_slow_fp8` a layer that gains
    nothing from fp8 at that number, as measured on this GPU, is kept in the wider format. `fuse`
    says which pieces are computed as one, where a model is known to have them: `auto` in 16 bits on
    a GPU, `none`, or names of pieces, which are done or refused. `memory` says what is computed
    again or kept on the host, to need less memory on the device. `running` says how the model will
    run: `eager`, where a layer that costs the host more time than fp8 saves the device is kept
    wider too, unless an exception asks for it; `compiled`; or `captured` as a CUDA graph. Left out,
    a model that is not compiled yet is taken to run as it is.
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
    saving = plan_memory(model, memory, hardware=hardware, sizes=totals)
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
