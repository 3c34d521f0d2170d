"""Where samples are taken: at the modules that multiply, of what goes in, comes out and comes back.

A module that is looked at gets another class, as it does to be given formats, and not hooks: blocks
that are alike stay alike for a compiler, which hooks with their running numbers would make it
compile one by one; and layers that run as one, or a head that never makes its logits, stay as they
are. These are looked at from outside, as far as that goes. Nothing is taken while gradients are
off.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.counts import CastCounts
from narrowcast.health.sampling import SAMPLE, sample, tap
from narrowcast.precision.chain import promised_ends
from narrowcast.precision.choice import ModulePlan
from narrowcast.precision.fp8_chain import Fp8Chain
from narrowcast.precision.gelu_chain import GeluChain
from narrowcast.precision.kinds import products_of
from narrowcast.precision.modules import swap
from narrowcast.precision.plan import Plan


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor of a model that is looked at: whose it is, what it is rounded to, and a sample."""

    module: str
    role: str
    format: str
    scaling: str
    sample: Tensor
    """All zeros until something has passed."""


class Watched(nn.Module):
    """A module that leaves samples of what passes through it."""

    nc_input: Tensor | None
    nc_output: Tensor | None
    nc_grad_output: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does, and copy samples."""
        x = args[0] if args else None
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if self.nc_input is not None and isinstance(x, Tensor) and x.is_floating_point():
            self.nc_input.copy_(sample(x))
        output = super().forward(*args, **kwargs)
        if self.nc_output is None or not isinstance(output, Tensor):
            return output
        assert self.nc_grad_output is not None
        if output.requires_grad:
            return tap(output, self.nc_output, self.nc_grad_output)
        self.nc_output.copy_(sample(output))
        return output


class Probes:
    """The sites of a prepared model, whose samples every pass fills."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.sites: list[Site] = []
        self._weights: list[_Weight] = []
        self._device = next(model.parameters()).device
        self._before: dict[nn.Module, type[nn.Module]] = {}
        # By the module that runs: a chain runs for its first and its last layer.
        taken: dict[nn.Module, dict[str, Tensor | None]] = {}
        chained = _ends_of_chains(model)
        for chosen in plan.modules:
            if not products_of(chosen.kind):
                continue
            module = model.get_submodule(chosen.name)
            entry, exit_ = chained.get(chosen.name, (module, module))
            if entry is not None:
                taken.setdefault(entry, {})["nc_input"] = self._add(chosen, "input").sample
            if exit_ is not None:
                there = taken.setdefault(exit_, {})
                there["nc_output"] = self._add(chosen, "output").sample
                there["nc_grad_output"] = self._add(chosen, "grad_output").sample
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                roles = ("weight", "grad_weight", "update")
                self._weights.append(
                    _Weight(weight, *(self._add(chosen, role).sample for role in roles))
                )
        nothing = dict.fromkeys(("nc_input", "nc_output", "nc_grad_output"))
        for module, samples in taken.items():
            self._before[module] = type(module)
            swap(module, Watched, **{**nothing, **samples})
        self.counts = CastCounts(model, [(s.module, s.role, s.format) for s in self.sites])
        """What casts to fp8 have lost, where that is counted."""

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take samples of weights and of their gradients, between the passes and the update."""
        for each in self._weights:
            each.before.copy_(sample(each.weight))
            if each.weight.grad is not None:
                each.gradient.copy_(sample(each.weight.grad))

    @torch.no_grad()
    def take_updates(self) -> None:
        """Take samples of what an update has changed in the weights as they are kept."""
        for each in self._weights:
            each.update.copy_(sample(each.weight) - each.before)

    def remove(self) -> None:
        """Make the modules again what they were."""
        for module, kind in self._before.items():
            module.__class__ = kind
            for name in ("nc_input", "nc_output", "nc_grad_output"):
                del module.__dict__[name]
            if module.__dict__["nc_plain_class"] is kind:
                del module.__dict__["nc_plain_class"]
        self._before.clear()

    def _add(self, chosen: ModulePlan, role: str) -> Site:
        policy = chosen.policy
        rounded_to = {
            "input": policy.forward,
            "weight": policy.forward,
            "output": policy.output_format,
            "grad_output": policy.grad_input,
            "grad_weight": policy.grads_format,
            "update": policy.params,
        }[role]
        site = Site(
            module=chosen.name,
            role=role,
            format=rounded_to,
            scaling=policy.scaling if role in ("input", "weight", "grad_output") else "none",
            sample=torch.zeros(SAMPLE, device=self._device),
        )
        self.sites.append(site)
        return site


@dataclass(frozen=True)
class _Weight:
    """A weight, and samples of it before an update, of its gradient, and of the update."""

    weight: nn.Parameter
    before: Tensor
    gradient: Tensor
    update: Tensor


def _ends_of_chains(model: nn.Module) -> dict[str, tuple[nn.Module | None, nn.Module | None]]:
    """Return, for layers that run as one, where the first's input and the last's output are seen.

    What is between them is never there.
    """
    seen: dict[str, tuple[nn.Module | None, nn.Module | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Chain | GeluChain):
            ends = promised_ends(module)
            assert ends is not None
            first, last = (f"{name}.{end}".lstrip(".") for end in ends)
            seen[first], seen[last] = (module, None), (None, module)
    return seen
