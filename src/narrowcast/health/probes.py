"""Where samples are taken: at the modules that multiply, of what goes in, comes out and comes back.

Hooks that change nothing copy samples as tensors pass (see `sampling`). They are quiet: layers that
run as one, and a head that never makes its logits, stay as they are, and are looked at from outside
as far as that goes. Nothing is taken while gradients are off.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowcast.health.sampling import SAMPLE, sample, tap
from narrowcast.precision.chain import promised_ends
from narrowcast.precision.choice import ModulePlan
from narrowcast.precision.fp8_chain import Fp8Chain
from narrowcast.precision.gelu_chain import GeluChain
from narrowcast.precision.kinds import products_of
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


class Probes:
    """The sites of a prepared model, and the hooks that fill their samples."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.sites: list[Site] = []
        self._handles: list[RemovableHandle] = []
        self._weights: list[tuple[nn.Parameter, Site, Site]] = []
        device = next(model.parameters()).device
        inside = _ends_of_chains(model)
        for chosen in plan.modules:
            if not products_of(chosen.kind):
                continue
            module = model.get_submodule(chosen.name)
            entry, exit_ = inside.get(chosen.name, (module, module))
            if entry is not None:
                (site,) = self._add(chosen, "input", device=device)
                hook = _quiet(_Entry(site.sample))
                self._handles.append(entry.register_forward_pre_hook(hook))
            if exit_ is not None:
                output, gradient = self._add(chosen, "output", "grad_output", device=device)
                hook = _quiet(_Exit(output.sample, gradient.sample))
                self._handles.append(exit_.register_forward_hook(hook))
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                site, gradient = self._add(chosen, "weight", "grad_weight", device=device)
                self._weights.append((weight, site, gradient))

    @torch.no_grad()
    def take_weights(self) -> None:
        """Take samples of weights and of their gradients, between the passes and the update."""
        for weight, site, gradient_site in self._weights:
            site.sample.copy_(sample(weight))
            if weight.grad is not None:
                gradient_site.sample.copy_(sample(weight.grad))

    def _add(self, chosen: ModulePlan, *roles: str, device: torch.device) -> list[Site]:
        added = [_site(chosen, role, device) for role in roles]
        self.sites.extend(added)
        return added

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _site(chosen: ModulePlan, role: str, device: torch.device) -> Site:
    policy = chosen.policy
    rounded_to = {
        "input": policy.forward,
        "weight": policy.forward,
        "output": policy.output_format,
        "grad_output": policy.grad_input,
        "grad_weight": policy.grads_format,
    }[role]
    scaled = role in ("input", "weight", "grad_output")
    return Site(
        module=chosen.name,
        role=role,
        format=rounded_to,
        scaling=policy.scaling if scaled else "none",
        sample=torch.zeros(SAMPLE, device=device),
    )


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


class _Entry:
    """Samples the first tensor that goes into a module."""

    def __init__(self, into: Tensor) -> None:
        self._into = into

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.is_floating_point() and torch.is_grad_enabled():
            self._into.copy_(sample(x))


class _Exit:
    """Samples what a module returns, and the gradient that comes back to it."""

    def __init__(self, into: Tensor, gradient_into: Tensor) -> None:
        self._into, self._gradient_into = into, gradient_into

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, Tensor) or not torch.is_grad_enabled():
            return None
        if not output.requires_grad:
            self._into.copy_(sample(output))
            return None
        return tap(output, self._into, self._gradient_into)


def _quiet(hook: Any) -> Any:
    hook.nc_quiet = True
    return hook
