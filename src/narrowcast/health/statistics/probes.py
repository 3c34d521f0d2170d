"""Where samples are taken: inputs, outputs and gradients of the modules that multiply.

A sampled module gets another class instead of hooks, because a compiler would compile equal blocks
with hooks one by one.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.health.statistics.grouping import Grouping, TensorSite, WhatIf, make_site
from narrowcast.health.statistics.sampling import SAMPLE, CastCounts, Offsets, WeightSamples
from narrowcast.health.statistics.watched import ATTRIBUTES, MonitoredModules, Switch
from narrowcast.numerics import BlockFormat, format_named
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp
from narrowcast.precision.fused.fp8_mlp import Fp8Mlp
from narrowcast.precision.fused.gelu_mlp import GeluMlp
from narrowcast.precision.plan.module_plan import ROLES, ModulePlan, multiplies, roundings
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.step.checks import check_not_monitored
from narrowcast.precision.swap import fused_mlp_layers, set_class, swap


@final
class Probes:
    """The sites of a prepared model, whose samples every pass fills."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        supposed: Mapping[str, Policy] | None = None,
        seed: int = 0,
        in_runs: bool = False,
    ) -> None:
        """Sample runs of neighbours everywhere with `in_runs`, else only for block formats."""
        check_not_monitored(model, doing="monitor()")
        self.sites: list[TensorSite] = []
        self.switch = Switch()
        self._device = next(model.parameters()).device
        self.offsets = Offsets(self._device, seed=seed)
        """Sampled positions, drawn again before the passes of each reading."""
        self._before: dict[nn.Module, type[nn.Module]] = {}
        self._seen_at: dict[TensorSite, nn.Module] = {}
        # By the module that runs: a chain runs for its first and its last layer.
        taken: dict[nn.Module, dict[str, Tensor | None]] = {}
        in_runs_at: set[nn.Module] = set()
        chained = _ends_of_chains(model)
        multiplying = [each for each in plan.modules if multiplies(each.kind)]
        stored = {c.name: w for c in multiplying if (w := _trained_weight(model, c)) is not None}
        blocks = {
            each.name
            for each in multiplying
            if in_runs or _has_blocks(each.policy, (supposed or {}).get(each.name))
        }
        self.weights = WeightSamples(
            list(stored.values()), self.offsets, in_runs=[name in blocks for name in stored]
        )
        for each in multiplying:
            module = model.get_submodule(each.name)
            entry, exit_ = chained.get(each.name, (module, module))
            if each.name in blocks:
                in_runs_at |= {end for end in (entry, exit_) if end is not None}
            if entry is not None:
                taken.setdefault(entry, {})["nc_input"] = self._add(each, "input").sample
            if exit_ is not None:
                there = taken.setdefault(exit_, {})
                for role in ("output", "grad_output"):
                    site = self._add(each, role)
                    there[f"nc_{role}"], self._seen_at[site] = site.sample, exit_
            if each.name in stored:
                row = list(stored).index(each.name)
                for role, samples in self.weights.by_role.items():
                    self._add(each, role, sample=samples[row])
        nothing = dict.fromkeys(("nc_input", "nc_output", "nc_grad_output"))
        for module, attributes in taken.items():
            self._before[module] = type(module)
            offsets = self.offsets.runs if module in in_runs_at else self.offsets.single
            settings = {**nothing, **attributes, "nc_offsets": offsets, "nc_unseen": ()}
            swap(module, MonitoredModules, nc_switch=self.switch, **settings)
        self.grouping = Grouping(self.sites)
        self.counts = CastCounts(model, [(s.module, s.role, s.format) for s in self.sites])
        """What casts to fp8 have lost, where that is counted."""
        self.what_if = WhatIf(self.sites, supposed or {})
        """What the modules in `supposed` would lose with these policies."""

    def seen(self) -> list[bool]:
        """Return for each site whether its module's last pass had anything to sample."""
        return [
            site not in self._seen_at
            or site.role not in self._seen_at[site].__dict__.get("nc_unseen", ())
            for site in self.sites
        ]

    @torch.no_grad()
    def forget(self) -> None:
        """Leave everything before this call out of the next reading."""
        torch._foreach_zero_([site.sample for site in self.sites])

    def remove(self) -> None:
        """Restore the modules, unless that was done already."""
        for module, kind in self._before.items():
            if "nc_unseen" not in module.__dict__:
                continue
            set_class(module, kind)
            for name in ATTRIBUTES:
                del module.__dict__[name]
            if module.__dict__["nc_plain_class"] is kind:
                del module.__dict__["nc_plain_class"]
        self._before.clear()

    def _add(
        self, module_plan: ModulePlan, role: str, *, sample: Tensor | None = None
    ) -> TensorSite:
        if sample is None:
            sample = torch.zeros(SAMPLE, device=self._device)
        site = make_site(module_plan.name, role, module_plan.policy, sample=sample)
        self.sites.append(site)
        return site


def _has_blocks(*policies: Policy | None) -> bool:
    """Return whether neighbours share a scale in any format of these policies."""
    return any(
        policy.scaling == "block"
        or any(isinstance(format_named(roundings(policy, r)[-1]), BlockFormat) for r in ROLES)
        for policy in policies
        if policy is not None
    )


def _trained_weight(model: nn.Module, module_plan: ModulePlan) -> nn.Parameter | None:
    """Return the weight that a module multiplies with, if it has one that is trained."""
    weight = getattr(model.get_submodule(module_plan.name), "weight", None)
    return weight if isinstance(weight, nn.Parameter) and weight.requires_grad else None


def _ends_of_chains(model: nn.Module) -> dict[str, tuple[nn.Module | None, nn.Module | None]]:
    """Return the input of the first and the output of the last of layers that run as one."""
    seen: dict[str, tuple[nn.Module | None, nn.Module | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Mlp | GeluMlp):
            ends = fused_mlp_layers(module)
            assert ends is not None
            first, last = (f"{name}.{end}".lstrip(".") for end in ends)
            seen[first], seen[last] = (module, None), (None, module)
        elif isinstance(module, Fp8GatedMlp):
            chain, where = module.nc_chain, f"{name}.".lstrip(".")
            seen[where + chain.gate], seen[where + chain.value] = (module, None), (None, None)
            seen[where + chain.down] = (None, module)
    return seen
