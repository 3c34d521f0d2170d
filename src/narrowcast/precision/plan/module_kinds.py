"""What kind of thing a module is, as far as precision is concerned."""

import re
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer

_CALLED_A_NORM = re.compile(r"Norm(\dd)?$", re.ASCII)  # LlamaRMSNorm, LayerNorm2d

Kind = Literal[
    "linear", "convolution", "attention", "recurrent", "embedding", "normalisation", "other"
]


def module_kind(module: nn.Module) -> Kind:
    """Return the kind of a module, by its class.

    A module of its own making that is called a norm (`LlamaRMSNorm`) is taken at its word.
    """
    match module:
        case nn.Linear() | QuantizedFrozenLayer():
            return "linear"
        case _ConvNd():
            return "convolution"
        case nn.MultiheadAttention():
            return "attention"
        case nn.RNNBase() | nn.RNNCellBase():
            return "recurrent"
        case nn.Embedding() | nn.EmbeddingBag():
            return "embedding"
        case nn.LayerNorm() | nn.GroupNorm() | nn.RMSNorm() | nn.LocalResponseNorm() | _NormBase():
            return "normalisation"
    is_leaf = next(module.children(), None) is None
    return "normalisation" if is_leaf and _CALLED_A_NORM.search(type(module).__name__) else "other"


def may_be_complex(module: nn.Module, kind: Kind) -> bool:
    """Say whether a module of its own making has a weight that `view_as_complex` would take."""
    own = module.parameters(recurse=False)
    return kind == "other" and any(weight.dim() > 1 and weight.shape[-1] == 2 for weight in own)


def multiplies(kind: Kind) -> bool:
    """Return whether a module of this kind multiplies."""
    return kind not in ("embedding", "normalisation")


def needs_one_dtype(kind: Kind) -> bool:
    """Return whether torch takes the weights of such a module in one dtype only."""
    return kind in ("recurrent", "normalisation")
