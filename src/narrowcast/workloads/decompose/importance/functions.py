"""Functions that predict the causal importance of every component at every position."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.importance.networks import ComponentMLP, SharedMLP, Transformer

Kind = Literal["mlp", "vector_mlp", "shared_mlp", "global_shared_mlp", "global_transformer"]
Needs = Literal["acts", "inputs"]


class ImportanceFunction(nn.Module):
    """Logits of importance from what a pass of the target has kept of each site."""

    needs: Needs = "inputs"
    """What a pass must keep for it: component activations, or the inputs of sites."""

    def forward(
        self, inputs: Sequence[Tensor], acts: Sequence[Tensor], *, length: int
    ) -> list[Tensor]:
        """Return the logits of each site, (seeds, rows, components); a sample has `length` rows."""
        raise NotImplementedError


class SiteBySite(ImportanceFunction):
    """A function for each site, of what that site alone is given."""

    def __init__(self, functions: Sequence[nn.Module], needs: Needs) -> None:
        super().__init__()
        self.functions, self.needs = nn.ModuleList(functions), needs

    def forward(
        self, inputs: Sequence[Tensor], acts: Sequence[Tensor], *, length: int
    ) -> list[Tensor]:
        seen = acts if self.needs == "acts" else inputs
        return [function(x) for function, x in zip(self.functions, seen, strict=True)]


class AllAtOnce(ImportanceFunction):
    """One function of the inputs of all sites, whose outputs are theirs side by side."""

    def __init__(self, function: nn.Module, components: Sequence[int]) -> None:
        super().__init__()
        self.function, self.components = function, list(components)

    def forward(
        self, inputs: Sequence[Tensor], acts: Sequence[Tensor], *, length: int
    ) -> list[Tensor]:
        if isinstance(self.function, Transformer):
            logits = self.function(inputs, length=length)
        else:
            logits = self.function(torch.cat(list(inputs), -1))
        return list(logits.split(self.components, -1))


def build_importance(
    kind: Kind,
    sites: Sequence[Site],
    *,
    seeds: int,
    hidden: Sequence[int],
    width: int = 256,
    blocks: int = 4,
    heads: int = 4,
) -> ImportanceFunction:
    """Build the importance functions of `sites`, with weights of their own for every seed."""
    _check(kind, sites, hidden, width=width, heads=heads)
    d_in = sum(site.d_in for site in sites)
    components = [site.components for site in sites]
    match kind:
        case "mlp":
            each = [ComponentMLP(seeds, None, hidden, site.components) for site in sites]
            return SiteBySite(each, "acts")
        case "vector_mlp":
            each = [ComponentMLP(seeds, site.d_in, hidden, site.components) for site in sites]
            return SiteBySite(each, "inputs")
        case "shared_mlp":
            shared = [SharedMLP(seeds, site.d_in, hidden, site.components) for site in sites]
            return SiteBySite(shared, "inputs")
        case "global_shared_mlp":
            return AllAtOnce(SharedMLP(seeds, d_in, hidden, sum(components)), components)
        case "global_transformer":
            function = Transformer(
                seeds,
                d_in,
                sum(components),
                width=width,
                blocks=blocks,
                heads=heads,
                hidden=hidden[0],
            )
            return AllAtOnce(function, components)


def _check(
    kind: str, sites: Sequence[Site], hidden: Sequence[int], *, width: int, heads: int
) -> None:
    embeddings = [site.name for site in sites if site.kind == "embedding"]
    if embeddings and kind != "mlp":
        raise ConfigError(
            f"The importance function {kind!r} needs vector inputs, but {embeddings[0]} is an "
            "embedding, whose input is a token. Write importance.kind=mlp, or leave the embedding "
            "out."
        )
    if kind != "global_transformer":
        return
    if len(hidden) != 1:
        raise ConfigError(
            "importance.kind=global_transformer needs one hidden width for its MLPs, got "
            f"{list(hidden)}. Write e.g. importance.hidden=[1024]."
        )
    if width % (2 * heads):
        raise ConfigError(
            f"importance.width must be heads × an even number for rotary positions, got {width} "
            f"with {heads} heads. Write importance.width="
            f"{max(width // (2 * heads), 1) * 2 * heads}."
        )
