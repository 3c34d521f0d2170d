"""The weights that a decomposition trains: components of each site, by the site's name."""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.sites import Site


class Components(nn.Module):
    """The components of a site: the columns of V, read from, and the rows of U, written to."""

    def __init__(self, site: Site, seeds: int, *, device: torch.device | None = None) -> None:
        """Draw them so that activations and outputs begin at the size of the inputs."""
        super().__init__()
        count = site.components
        self.V = nn.Parameter(torch.randn(seeds, site.d_in, count, device=device) / site.d_in**0.5)
        self.U = nn.Parameter(torch.randn(seeds, count, site.d_out, device=device) / count**0.5)

    def pair(self, full: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return V and U with the digits that `full` has of each parameter, by its id."""
        return full[id(self.V)], full[id(self.U)]


class TiedComponents(nn.Module):
    """The components of another site turned around, for a matrix that is that one transposed."""

    def __init__(self, of: Components) -> None:
        """Refer to the other's parameters, which are trained and kept once."""
        super().__init__()
        self._owner = (of,)  # in a tuple it is no submodule, whose weights would be kept again

    @property
    def V(self) -> Tensor:
        """What the other writes to: (seeds, d_in, C)."""
        return self._owner[0].U.mT

    @property
    def U(self) -> Tensor:
        """What the other reads from: (seeds, C, d_out)."""
        return self._owner[0].V.mT

    def pair(self, full: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return V and U with the digits that `full` has of each parameter, by its id."""
        V, U = self._owner[0].pair(full)
        return U.mT, V.mT


class ComponentDict(nn.Module):
    """Components by the names of their sites, in the order of these."""

    def __init__(self, components: Mapping[str, Components | TiedComponents]) -> None:
        """Keep them under names without the dots that torch keeps for itself."""
        super().__init__()
        self.names = tuple(components)
        for name, each in components.items():
            self.add_module(_key(name), each)

    def __getitem__(self, name: str) -> Components | TiedComponents:
        """Return a site's components."""
        return cast(Components | TiedComponents, self._modules[_key(name)])

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return how many sites there are."""
        return len(self.names)

    def values(self) -> list[Components | TiedComponents]:
        """Return all components."""
        return [self[name] for name in self.names]

    def items(self) -> list[tuple[str, Components | TiedComponents]]:
        """Return all names with their components."""
        return [(name, self[name]) for name in self.names]


def make_components(
    sites: Mapping[str, Site], seeds: int, *, tied: Mapping[str, str], device: torch.device
) -> ComponentDict:
    """Draw components for all sites but those that are tied to another's."""
    for name, other in tied.items():
        _check_tie(sites, name, other, tied)
    own = {
        name: Components(site, seeds, device=device)
        for name, site in sites.items()
        if name not in tied
    }
    return ComponentDict(
        {name: TiedComponents(own[tied[name]]) if name in tied else own[name] for name in sites}
    )


def _check_tie(sites: Mapping[str, Site], name: str, other: str, tied: Mapping[str, str]) -> None:
    for each in (name, other):
        if each not in sites:
            raise ConfigError(f"tied must name sites ({', '.join(sites)}), got {each}.")
    if other in tied:
        raise ConfigError(
            f"{name} is tied to {other}, which is itself tied to {tied[other]}. Tie both to "
            f"{tied[other]}."
        )
    one, two = sites[name], sites[other]
    turned = (two.d_out, two.d_in, two.components)
    if (one.d_in, one.d_out, one.components) != turned:
        raise ConfigError(
            f"{name} ({one.d_in} x {one.d_out}, {one.components} components) is not the transpose "
            f"of {other} ({two.d_in} x {two.d_out}, {two.components}). Tie a matrix to its "
            "transpose, with the same number of components, or write sites.tied=false."
        )


def _key(name: str) -> str:
    return name.replace(".", "/")
