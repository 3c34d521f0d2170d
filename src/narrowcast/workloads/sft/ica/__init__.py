"""Functional networks of language models: found by independent components, masked, frozen.

`functional_networks(model, batches)` finds them; `Masks` silences, keeps or amplifies their
channels; `Freeze` keeps their weights from moving. Needs torch and numpy, and any model that is
built like those of transformers.
"""

from narrowcast.workloads.sft.ica.capture import ModelSignals
from narrowcast.workloads.sft.ica.components import Components
from narrowcast.workloads.sft.ica.entry import (
    ICAMask,
    functional_networks,
    networks_from,
    refuse_misfit,
)
from narrowcast.workloads.sft.ica.findings import Finding
from narrowcast.workloads.sft.ica.freeze import Freeze
from narrowcast.workloads.sft.ica.ica import ICA
from narrowcast.workloads.sft.ica.layer_spec import layers_of
from narrowcast.workloads.sft.ica.masks import Masks, lesioned, preserved, random_like, scaled
from narrowcast.workloads.sft.ica.networks import (
    Channels,
    FunctionalNetworks,
    Layout,
    Match,
    Provenance,
    Score,
)
from narrowcast.workloads.sft.ica.networks_file import load_networks, save_networks
from narrowcast.workloads.sft.ica.selection import Percentile, Selector, TopK, ZScore
from narrowcast.workloads.sft.ica.signals import ArraySignals, FileSignals, Signals, StoredSignals

__all__ = [
    "ICA",
    "ArraySignals",
    "Channels",
    "Components",
    "FileSignals",
    "Finding",
    "Freeze",
    "FunctionalNetworks",
    "ICAMask",
    "Layout",
    "Masks",
    "Match",
    "ModelSignals",
    "Percentile",
    "Provenance",
    "Score",
    "Selector",
    "Signals",
    "StoredSignals",
    "TopK",
    "ZScore",
    "functional_networks",
    "layers_of",
    "lesioned",
    "load_networks",
    "networks_from",
    "preserved",
    "random_like",
    "refuse_misfit",
    "save_networks",
    "scaled",
]
