"""Where samples are taken: at the modules that multiply, of what goes in, comes out and comes back.

A module that is looked at gets another class, as it does to be given formats, and not hooks: blocks
that are alike stay alike for a compiler, which hooks with their running numbers would make it
compile one by one; and layers that run as one, or a head that never makes its logits, stay as they
are. These are looked at from outside, as far as that goes. Nothing is taken while gradients are
off.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.health.sampling import SAMPLE, sample, take, tap
from narrowcast.precision.chain import promised_ends
from narrowcast.precision.choice import ModulePlan
from narrowcast.precision.fp8_chain import Fp8Chain
from narrowcast.precision.gelu_chain import GeluChain
from narrowcast.precision.kinds import products_of
from narrowcast.precision.modules import Onlooker, changed_tensors, swap
from narrowcast.precision.plan import Plan
from narrowcast.precision.refusals import refuse_watched


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor of a model that is looked at: whose it is, what it is rounded to, and a sample."""

    module: str
    role: str
    format: str
    scaling: str
    sample: Tensor
    """All zeros until something has passed."""


class Watched(Onlooker):
    """A module that leaves samples of what passes through it."""

    nc_input: Tensor | None
    nc_output: Tensor | None
    nc_grad_output: Tensor | None
    nc_unseen: tuple[str, ...]
    """Roles of which its last pass had nothing to look at."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module does, and copy samples of the first tensors in and out."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        x = None if self.nc_input is None else _first((args, kwargs))
        if self.nc_input is not None and x is not None:
            take(x, self.nc_input)
        output = super().forward(*args, **kwargs)
        return output if self.nc_output is None else self._nc_looked_at(output)

    def _nc_looked_at(self, output: Any) -> Any:
        assert self.nc_output is not None
        assert self.nc_grad_output is not None
        first = _first(output)
        unseen = () if first is not None else ("output",)
        if first is not None:
            take(first, self.nc_output)
        if first is None or not first.requires_grad:
            unseen = (*unseen, "grad_output")
        else:
            tapped = tap(first, self.nc_grad_output)
            if tapped is not first:
                output = changed_tensors(output, lambda each: tapped if each is first else each)
        if self.nc_unseen != unseen:  # a compiler need not know that it could have been
            self.nc_unseen = unseen
        return output


class Probes:
    """The sites of a prepared model, whose samples every pass fills."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        refuse_watched(model, doing="watch()")
        self._sites: list[Site] = []
        self._weights: list[_Weight] = []
        self._device = next(model.parameters()).device
        self._before: dict[nn.Module, type[nn.Module]] = {}
        self._seen_at: dict[Site, nn.Module] = {}
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
                for role in ("output", "grad_output"):
                    site = self._add(chosen, role)
                    there[f"nc_{role}"], self._seen_at[site] = site.sample, exit_
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                roles = ("weight", "grad_weight", "update")
                self._weights.append(
                    _Weight(weight, *(self._add(chosen, role).sample for role in roles))
                )
        nothing = dict.fromkeys(("nc_input", "nc_output", "nc_grad_output"))
        for module, samples in taken.items():
            self._before[module] = type(module)
            swap(module, Watched, **{**nothing, **samples, "nc_unseen": ()})

    @property
    def sites(self) -> list[Site]:
        """What is looked at; what a module's last pass did not have is not."""
        return [
            site
            for site in self._sites
            if site not in self._seen_at
            or site.role not in self._seen_at[site].__dict__.get("nc_unseen", ())
        ]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take samples of weights and of their gradients, between the passes and the update."""
        for each in self._weights:
            take(each.weight, each.before)
            if each.weight.grad is not None:
                take(each.weight.grad, each.gradient)

    @torch.no_grad()
    def take_updates(self) -> None:
        """Take samples of what an update has changed in the weights as they are kept."""
        for each in self._weights:
            each.update.copy_(sample(each.weight) - each.before)

    @torch.no_grad()
    def forget(self) -> None:
        """Let the next reading tell nothing that has passed before this."""
        torch._foreach_zero_([site.sample for site in self._sites])

    def remove(self) -> None:
        """Make the modules again what they were, unless somebody has done so already."""
        for module, kind in self._before.items():
            if "nc_unseen" not in module.__dict__:
                continue
            module.__class__ = kind
            for name in ("nc_input", "nc_output", "nc_grad_output", "nc_unseen"):
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
        self._sites.append(site)
        return site


@contextlib.contextmanager
def samples_kept(model: nn.Module) -> Iterator[None]:
    """Give a watched model back afterwards what its probes had sampled before the block."""
    names = ("nc_input", "nc_output", "nc_grad_output")
    watched = [module for module in model.modules() if isinstance(module, Watched)]
    found = [(module, name, getattr(module, name)) for module in watched for name in names]
    held = [(tensor, tensor.clone()) for _, _, tensor in found if tensor is not None]
    unseen = [module.nc_unseen for module in watched]
    try:
        yield
    finally:
        for tensor, before in held:
            tensor.copy_(before)
        for module, before_unseen in zip(watched, unseen, strict=True):
            module.nc_unseen = before_unseen


def _first(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in what goes into a module or comes out of it."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, tuple | list):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    else:
        return None
    for item in items:
        found = _first(item)
        if found is not None:
            return found
    return None


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
