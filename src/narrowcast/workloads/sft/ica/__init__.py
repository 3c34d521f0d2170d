"""Functional networks of language models: find, mask, freeze and test them.

Names are imported on first use: recipe settings and reports need neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.workloads.sft.ica.entry import ICAMask as ICAMask
    from narrowcast.workloads.sft.ica.entry import ModelSignals as ModelSignals
    from narrowcast.workloads.sft.ica.entry import check_fit as check_fit
    from narrowcast.workloads.sft.ica.entry import functional_networks as functional_networks
    from narrowcast.workloads.sft.ica.entry import networks_from as networks_from
    from narrowcast.workloads.sft.ica.freeze import Freeze as Freeze
    from narrowcast.workloads.sft.ica.ica import ICA as ICA
    from narrowcast.workloads.sft.ica.ica import Components as Components
    from narrowcast.workloads.sft.ica.masks import Masks as Masks
    from narrowcast.workloads.sft.ica.masks import lesioned as lesioned
    from narrowcast.workloads.sft.ica.masks import preserved as preserved
    from narrowcast.workloads.sft.ica.masks import random_like as random_like
    from narrowcast.workloads.sft.ica.masks import scaled as scaled
    from narrowcast.workloads.sft.ica.networks import Channels as Channels
    from narrowcast.workloads.sft.ica.networks import FunctionalNetworks as FunctionalNetworks
    from narrowcast.workloads.sft.ica.networks import Layout as Layout
    from narrowcast.workloads.sft.ica.networks import Match as Match
    from narrowcast.workloads.sft.ica.networks import Provenance as Provenance
    from narrowcast.workloads.sft.ica.networks import Score as Score
    from narrowcast.workloads.sft.ica.networks import parse_layers as parse_layers
    from narrowcast.workloads.sft.ica.networks_file import load_networks as load_networks
    from narrowcast.workloads.sft.ica.networks_file import save_networks as save_networks
    from narrowcast.workloads.sft.ica.selection import Percentile as Percentile
    from narrowcast.workloads.sft.ica.selection import Selector as Selector
    from narrowcast.workloads.sft.ica.selection import TopK as TopK
    from narrowcast.workloads.sft.ica.selection import ZScore as ZScore
    from narrowcast.workloads.sft.ica.signals import ArraySignals as ArraySignals
    from narrowcast.workloads.sft.ica.signals import FileSignals as FileSignals
    from narrowcast.workloads.sft.ica.signals import Finding as Finding
    from narrowcast.workloads.sft.ica.signals import Signals as Signals
    from narrowcast.workloads.sft.ica.signals import StoredSignals as StoredSignals
    from narrowcast.workloads.sft.ica.study.ablate import ablate as ablate
    from narrowcast.workloads.sft.ica.study.ablation import Ablation as Ablation
    from narrowcast.workloads.sft.ica.study.driving import bootstrap as bootstrap
    from narrowcast.workloads.sft.ica.study.driving import driving_tokens as driving_tokens

_HOMES = {
    "entry": "ICAMask ModelSignals check_fit functional_networks networks_from",
    "freeze": "Freeze",
    "ica": "Components ICA",
    "masks": "Masks lesioned preserved random_like scaled",
    "networks": "Channels FunctionalNetworks Layout Match Provenance Score parse_layers",
    "networks_file": "load_networks save_networks",
    "selection": "Percentile Selector TopK ZScore",
    "signals": "ArraySignals FileSignals Finding Signals StoredSignals",
    "study.ablate": "ablate",
    "study.ablation": "Ablation",
    "study.driving": "bootstrap driving_tokens",
}
"""Public names by module."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
