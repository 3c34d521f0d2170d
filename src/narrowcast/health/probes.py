"""Where samples are taken: at the modules that multiply, of what goes in, comes out and comes back.

A module that is looked at gets another class, as it does to be given formats, and not hooks: blocks
that are alike stay alike for a compiler, which hooks with their running numbers would make it
compile one by one; and layers that run as one, or a head that never makes its logits, stay as they
are. These are looked at from outside, as far as that goes. Nothing is taken while gradients are
off, nor in steps that nobody will read; but what is compiled, or captured as a CUDA graph, is the
same in every step, and takes samples in all of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.counts import CastCounts
from narrowcast.health.grouping import Grouping
from narrowcast.health.sampling import SAMPLE, take, tap
from narrowcast.health.sites import Site
from narrowcast.health.weight_samples import WeightSamples
from narrowcast.precision.chain import promised_ends
from narrowcast.precision.choice import ModulePlan
from narrowcast.precision.fp8_chain import Fp8Chain
from narrowcast.precision.gelu_chain import GeluChain
from narrowcast.precision.kinds import products_of
from narrowcast.precision.modules import Onlooker, swap
from narrowcast.precision.plan import Plan


@dataclass
class Switch:
    """Whether samples are taken now, for all modules of a model."""

    on: bool = True


class Watched(Onlooker):
    """A module that leaves samples of what passes through it."""

    nc_switch: Switch
    nc_input: Tensor | None
    nc_output: Tensor | None
    nc_grad_output: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does, and copy samples."""
        if not self._looks():
            return super().forward(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.nc_sees(args[0])
        output = super().forward(*args, **kwargs)
        if self.nc_output is None or not isinstance(output, Tensor):
            return output
        assert self.nc_grad_output is not None
        if output.requires_grad:
            return tap(output, self.nc_output, self.nc_grad_output)
        take(output, self.nc_output)
        return output

    def nc_sees(self, x: Tensor) -> None:
        """Copy a sample of the input."""
        if self.nc_input is not None and self._looks():
            take(x, self.nc_input)

    def _looks(self) -> bool:
        # A compiler that asked the switch would compile again whenever it moves.
        on = torch.compiler.is_compiling() or self.nc_switch.on or _is_capturing()
        return on and torch.is_grad_enabled()


class Probes:
    """The sites of a prepared model, whose samples every pass fills."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.sites: list[Site] = []
        self.switch = Switch()
        self._device = next(model.parameters()).device
        self._before: dict[nn.Module, type[nn.Module]] = {}
        # By the module that runs: a chain runs for its first and its last layer.
        taken: dict[nn.Module, dict[str, Tensor | None]] = {}
        chained = _ends_of_chains(model)
        kept = {c.name: w for c in plan.modules if (w := _trained_weight(model, c)) is not None}
        self.weights = WeightSamples(list(kept.values()), self._device)
        rows = dict(zip(kept, range(len(kept)), strict=True))
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
            if chosen.name in rows:
                row = rows[chosen.name]
                self._add(chosen, "weight", sample=self.weights.before[row])
                self._add(chosen, "grad_weight", sample=self.weights.gradient[row])
                self._add(chosen, "update", sample=self.weights.update[row])
        nothing = dict.fromkeys(("nc_input", "nc_output", "nc_grad_output"))
        for module, samples in taken.items():
            self._before[module] = type(module)
            swap(module, Watched, nc_switch=self.switch, **{**nothing, **samples})
        self.grouping = Grouping(self.sites)
        self.counts = CastCounts(model, [(s.module, s.role, s.format) for s in self.sites])
        """What casts to fp8 have lost, where that is counted."""

    def remove(self) -> None:
        """Make the modules again what they were."""
        for module, kind in self._before.items():
            module.__class__ = kind
            for name in ("nc_switch", "nc_input", "nc_output", "nc_grad_output"):
                del module.__dict__[name]
            if module.__dict__["nc_plain_class"] is kind:
                del module.__dict__["nc_plain_class"]
        self._before.clear()

    def _add(self, chosen: ModulePlan, role: str, *, sample: Tensor | None = None) -> Site:
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
            sample=torch.zeros(SAMPLE, device=self._device) if sample is None else sample,
        )
        self.sites.append(site)
        return site


def _trained_weight(model: nn.Module, chosen: ModulePlan) -> nn.Parameter | None:
    """Return the weight that a module multiplies with, if it is one and is trained."""
    weight = getattr(model.get_submodule(chosen.name), "weight", None)
    trained = isinstance(weight, nn.Parameter) and weight.requires_grad
    return weight if trained and products_of(chosen.kind) else None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
