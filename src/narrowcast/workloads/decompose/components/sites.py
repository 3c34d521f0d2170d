"""Sites: the modules of a target to decompose, found by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from narrowcast.errors import ConfigError

Kind = Literal["linear", "conv1d", "embedding", "identity"]

MOST_PER_RANK = 64
"""Maximum components per rank: twice what published decompositions use (4000 at rank 128)."""

MOST_NAMED = 8
"""Modules that a message names."""

IDENTITY = "pre_identity"
"""The name of an inserted identity, within the module it precedes."""


@dataclass(frozen=True)
class Site:
    """A matrix of the target, and its number of components."""

    name: str
    kind: Kind
    d_in: int
    """Width of the input; of an embedding, how many tokens it knows."""
    d_out: int
    components: int
    bias: bool

    def __post_init__(self) -> None:
        rank = min(self.d_in, self.d_out)
        if not 1 <= self.components <= MOST_PER_RANK * rank:
            raise ConfigError(
                f"components of {self.name}, a {self.d_in} x {self.d_out} matrix, must be between "
                f"1 and {MOST_PER_RANK * rank} ({MOST_PER_RANK} per rank), got {self.components}."
            )


def find_sites(
    target: nn.Module, patterns: Mapping[str, int], identities: Mapping[str, int] | None = None
) -> list[Site]:
    """Return the sites whose names match shell patterns, in the target's order."""
    identities = identities or {}
    chosen = _matches(target, patterns)
    before = _matches(target, identities)
    sites: list[Site] = []
    for name, module in target.named_modules():
        if name in before:
            sites.append(_identity(name, module, before[name]))
        if name in chosen:
            sites.append(_site(name, module, chosen[name]))
    if not sites:
        raise ConfigError("No sites are named. Name modules to decompose, such as 'h.*.mlp.c_fc'.")
    return sites


def site_kind(name: str, module: nn.Module) -> Kind:
    """Return the kind of a module; raise if it is not a matrix, or has hooks."""
    kind = _kind(module)
    if kind is None:
        raise ConfigError(
            f"Sites must be linear layers, Conv1D, or embeddings without max_norm, got {name}, a "
            f"{type(module).__name__}. Write a pattern that matches only those."
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise ConfigError(
            f"{name} has hooks, which the components would not call. Remove them first."
        )
    return kind


def _matches(target: nn.Module, patterns: Mapping[str, int]) -> dict[str, int]:
    """Return the number of components of each matching module."""
    results: dict[str, tuple[str, int]] = {}
    names = [name for name, _ in target.named_modules(remove_duplicate=False) if name]
    for pattern, components in patterns.items():
        here = [name for name in names if fnmatchcase(name, pattern)]
        if not here:
            raise ConfigError(
                f"{pattern!r} matches no module of the target. Its matrices are {_some(target)}."
            )
        for name in here:
            if name in results:
                raise ConfigError(
                    f"{name} matches both {results[name][0]!r} and {pattern!r}. Write patterns "
                    "that do not overlap."
                )
            results[name] = pattern, components
    _check_shared(target, results)
    return {name: components for name, (_, components) in results.items()}


def _check_shared(target: nn.Module, names: Mapping[str, object]) -> None:
    known: dict[int, list[str]] = {}
    for name, module in target.named_modules(remove_duplicate=False):
        known.setdefault(id(module), []).append(name)
    for name in names:
        same = known[id(target.get_submodule(name))]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(same)} are one module that is called more than once per forward "
                "pass. Choose other sites."
            )


def _some(target: nn.Module) -> str:
    """Return patterns of modules that could be sites."""
    names = [
        ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name, module in target.named_modules()
        if name and _kind(module) is not None
    ]
    names = list(dict.fromkeys(names))
    return ", ".join(names[:MOST_NAMED]) + (
        f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    )


def _site(name: str, module: nn.Module, components: int) -> Site:
    kind = site_kind(name, module)
    d_in, d_out = _widths(kind, module)
    return Site(
        name, kind, d_in, d_out, components, bias=module._parameters.get("bias") is not None
    )


def _identity(name: str, module: nn.Module, components: int) -> Site:
    kind = site_kind(name, module)
    if kind == "embedding":
        raise ConfigError(
            f"{name} is an embedding, which has no identity to decompose. Name a linear layer."
        )
    width, _ = _widths(kind, module)
    return Site(f"{name}.{IDENTITY}", "identity", width, width, components, bias=False)


def _widths(kind: Kind, module: nn.Module) -> tuple[int, int]:
    weight = module._parameters["weight"]
    assert weight is not None
    *_, first, second = weight.shape
    return (second, first) if kind == "linear" else (first, second)


def _kind(module: nn.Module) -> Kind | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    seeded = weight.dim() == 3 and getattr(module, "seeds", None) == weight.shape[0]
    if seeded or _computes_as(module, nn.Linear):
        return "linear"
    if _is_conv1d(module, weight):
        return "conv1d"
    plain = _computes_as(module, nn.Embedding) and getattr(module, "max_norm", None) is None
    return "embedding" if plain else None


def _computes_as(module: nn.Module, kind: type[nn.Linear] | type[nn.Embedding]) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward


def _is_conv1d(module: nn.Module, weight: Tensor) -> bool:
    """Return whether a module is transformers' transposed linear layer, without importing it."""
    named = type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)
    return named and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]
