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
from narrowcast.workloads.decompose.losses.adversary import PersistentPGD
from narrowcast.workloads.decompose.losses.terms import Loss
from narrowcast.workloads.decompose.losses.total import make_losses
from narrowcast.workloads.decompose.model import DecompositionModel, Reading
from narrowcast.workloads.decompose.settings import (
    DecomposeData,
    DecompositionSection,
    ImportanceSection,
    LossesSection,
    SitesSection,
    TargetSection,
)
from narrowcast.workloads.decompose.targets.language import Language
from narrowcast.workloads.decompose.targets.pretrained import language_target
from narrowcast.workloads.decompose.targets.toy import Toy, Trainable
from narrowcast.workloads.decompose.targets.toys import toy_target

Subject = Toy | Language
"""A frozen target with its data."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a task is made of."""

    subject: Subject
    model: DecompositionModel
    losses: Sequence[Loss]


def build_parts(recipe: Recipe, *, device: torch.device, trained: bool = True) -> Parts:
    """Make the target and what is trained from the recipe's seed; on meta only shapes.

    Without `trained`, a toy's weights are random.
    """
    _check_checkpointing(recipe)
    if device.type != "meta":
        # What cannot be is refused before a toy is trained, or a large model loaded.
        build_parts(recipe, device=torch.device("meta"))
    subject = build_subject(recipe, device=device, trained=trained)
    if recipe.section(TargetSection).shuffle and device.type != "meta":
        _shuffle(subject, recipe.seed)
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(recipe.seed)
        model, losses = _trained(recipe, subject)
    return Parts(subject=subject, model=model.to(device), losses=losses)


def build_subject(recipe: Recipe, *, device: torch.device, trained: bool = True) -> Subject:
    """Make the target of a recipe, with its data; on the meta device only its shapes."""
    requested, data = recipe.section(TargetSection), recipe.section(DecomposeData)
    settings = recipe.section(DecompositionSection)
    if not requested.toy:
        if settings.seeds > 1:
            raise ConfigError(
                f"decomposition.seeds must be 1 for a language model, got {settings.seeds}. "
                "Several seeds are only for toys."
            )
        return language_target(requested.path, text=data.text, length=data.length, device=device)
    _check_no_text(requested.toy, data)
    return toy_target(
        requested.toy,
        seeds=settings.seeds,
        seed=recipe.seed,
        device=device,
        steps=requested.pretrain_steps,
        batch_size=requested.pretrain_batch_size,
        trained=trained,
    )


@torch.no_grad()
def _shuffle(subject: Subject, seed: int) -> None:
    """Permute the entries of each matrix: the same numbers, without what was learned."""
    generator = torch.Generator().manual_seed(seed)
    target: nn.Module = subject.target
    least = 3 if isinstance(subject, Toy) else 2  # toys have a dimension of seeds
    for parameter in target.parameters():
        if parameter.dim() < least:
            continue
        for matrix in parameter.view(-1, *parameter.shape[-2:]):
            order = torch.randperm(matrix.numel(), generator=generator).to(matrix.device)
            matrix.copy_(matrix.flatten()[order].view_as(matrix))
    if isinstance(target, Trainable):
        target.settle()


def _check_no_text(toy: str, data: DecomposeData) -> None:
    for name in ("text", "length"):
        if getattr(data, name) != DecomposeData.model_fields[name].default:
            raise ConfigError(
                f"data.{name} cannot be set with model.toy={toy}, which generates its own samples. "
                f"Leave data.{name} out, or write model.path=FOLDER instead of model.toy."
            )


def _check_checkpointing(recipe: Recipe) -> None:
    """Raise for checkpointed blocks: recomputed later, they would run without masks."""
    requested = recipe.memory.activation_checkpointing
    if requested != "none":
        raise ConfigError(
            f"memory.activation_checkpointing must be none for decompose, got {requested}: "
            "recomputed blocks would run without masks. Write "
            "memory.activation_checkpointing=none, and recompute=true for terms of the loss, such "
            "as losses.stochastic.recompute=true."
        )


def _trained(recipe: Recipe, subject: Subject) -> tuple[DecompositionModel, list[Loss]]:
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


def _patterns(
    requested: SitesSection, own: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of components by glob, of modules and of inserted identities."""
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


def _tied(requested: SitesSection, sites: Sequence[Site], subject: Subject) -> Mapping[str, str]:
    """Return which sites share components: those of the toy, or all that share a weight."""
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
    """Return linear sites that share the weight of an embedding, such as tied heads."""
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
