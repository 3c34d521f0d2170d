"""From a recipe to what is trained: the target, its sites, importance functions and losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.sites import Site, find_sites
from narrowcast.workloads.decompose.importance.functions import build_importance
from narrowcast.workloads.decompose.losses.catalogue import build_losses
from narrowcast.workloads.decompose.losses.persistent import PersistentPGD
from narrowcast.workloads.decompose.losses.terms import Loss
from narrowcast.workloads.decompose.model import DecompositionModel, Reading
from narrowcast.workloads.decompose.settings import (
    DecompositionSection,
    ImportanceSection,
    SitesSection,
)
from narrowcast.workloads.decompose.subject import LanguageSubject, ToySubject, build_subject
from narrowcast.workloads.decompose.terms import LossesSection

ROUTED = ("layerwise", "subset")
"""Ends of the names of losses whose passes compute some sites with components."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a task is made of."""

    subject: ToySubject | LanguageSubject
    model: DecompositionModel
    losses: Sequence[Loss]


def build_parts(recipe: Recipe, *, device: torch.device) -> Parts:
    """Make the target and all that is trained, from the recipe's seed; elsewhere nothing is drawn.

    On the meta device only shapes count.
    """
    _check_checkpointing(recipe)
    if device.type != "meta":
        # What cannot be is refused before a toy is trained, or a large model loaded.
        build_parts(recipe, device=torch.device("meta"))
    subject = build_subject(recipe, device=device)
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(recipe.seed)
        model, losses = _trained(recipe, subject)
    return Parts(subject=subject, model=model.to(device), losses=losses)


def _check_checkpointing(recipe: Recipe) -> None:
    """Refuse to compute blocks again when their pass is over, and its masks with it."""
    requested = recipe.memory.activation_checkpointing
    if requested != "none":
        raise ConfigError(
            f"memory.activation_checkpointing must be none for decompose, got {requested}: "
            "recomputed blocks would run without masks. Write "
            "memory.activation_checkpointing=none, and recompute=true for terms of the loss, such "
            "as losses.stochastic.recompute=true."
        )


def _trained(
    recipe: Recipe, subject: ToySubject | LanguageSubject
) -> tuple[DecompositionModel, list[Loss]]:
    settings, how = recipe.section(DecompositionSection), recipe.section(ImportanceSection)
    request = recipe.section(SitesSection)
    sites = find_sites(subject.target, *_patterns(request, subject.sites))
    decomposition = Decomposition(
        subject.target,
        sites,
        seeds=settings.seeds,
        tied=_tied(request, sites, subject),
        output=subject.output,
    )
    importance = build_importance(
        how.kind, sites, seeds=settings.seeds, hidden=how.hidden, width=how.width,
        blocks=how.blocks, heads=how.heads,
    )  # fmt: skip
    losses = make_losses(recipe.section(LossesSection))
    reading = Reading(
        divergence=subject.divergence if settings.divergence == "auto" else settings.divergence,
        batch_dim=subject.batch_dim,
        squash=how.squash,
        sampling=how.sampling,
        delta=settings.delta,
    )
    adversaries = {
        loss.name: loss.sources(
            sites,
            seeds=settings.seeds,
            rows=recipe.batch_size * subject.length,
            length=subject.length,
            delta=settings.delta,
        )
        for loss in losses
        if isinstance(loss, PersistentPGD)
    }
    model = DecompositionModel(decomposition, importance, adversaries=adversaries, reading=reading)
    return model, losses


def make_losses(section: LossesSection) -> list[Loss]:
    """Return the terms that a recipe gives a coefficient."""
    requested = []
    for name, term in section.chosen.items():
        kind, routing = name, {}
        for end in ROUTED:
            if name.endswith(f"_{end}"):
                kind = name.removesuffix(f"_{end}")
                routing = {} if end == "subset" else {"routing": end}
        requested.append((kind, {**term.model_dump(), **routing}))
    return build_losses(requested)


def _patterns(
    requested: SitesSection, own: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many components modules are given by glob, and identities before others."""
    patterns = requested.patterns or dict(own)
    if not patterns and not requested.identities:
        raise ConfigError(
            "sites.names is empty, and this target has no default sites. Write e.g. "
            "sites.names=[model.layers.*.mlp.up_proj] sites.components=512."
        )
    if not requested.names and requested.components is not None:
        if isinstance(requested.components, tuple):
            raise ConfigError(
                "A list in sites.components needs sites.names, with one number per name. Write "
                "sites.names."
            )
        patterns = dict.fromkeys(patterns, requested.components)
    identities = dict.fromkeys(requested.identities, requested.identity_components or 0)
    return patterns, identities


def _tied(
    requested: SitesSection, sites: Sequence[Site], subject: ToySubject | LanguageSubject
) -> Mapping[str, str]:
    """Return which sites share components: those the toy ties, or all that share a weight."""
    names = {site.name for site in sites}
    own = subject.tied or _transposed(sites, subject.target)
    there = {name: other for name, other in own.items() if {name, other} <= names}
    if requested.tied and not there:
        raise ConfigError(
            "sites.tied=true needs two sites that are each other's transpose, but this target has "
            "none. Name both, or leave sites.tied out."
        )
    wanted = bool(subject.tied) if requested.tied is None else requested.tied
    return there if wanted else {}


def _transposed(sites: Sequence[Site], target: nn.Module) -> Mapping[str, str]:
    """Return linear sites whose weight is the very one of an embedding, such as tied heads."""
    weights = {
        site.name: target.get_submodule(site.name).get_parameter("weight")
        for site in sites
        if site.kind in ("embedding", "linear")
    }
    embeddings = {id(weights[site.name]): site.name for site in sites if site.kind == "embedding"}
    return {
        site.name: embeddings[id(weights[site.name])]
        for site in sites
        if site.kind == "linear" and id(weights[site.name]) in embeddings
    }
