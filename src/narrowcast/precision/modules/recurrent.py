"""The weights of recurrent layers in one piece of memory, from where cuDNN reads them."""

from collections.abc import Set

import torch
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode

from narrowcast.kernels.launch import PLAIN
from narrowcast.precision.products.straight import is_transformed


def compact_recurrent(model: nn.Module, *, only: Set[nn.Parameter] | None = None) -> None:
    """Lay the weights of recurrent layers side by side again, where cuDNN wants them so.

    With `only` given, a layer that has other weights too stays where it is.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and (only is None or only >= set(module.parameters())):
            module.flatten_parameters()
            compact_bf16(module)


def compact_bf16(layer: nn.RNNBase) -> None:
    """Do what `flatten_parameters()` does for the bf16 weights that a layer computes with.

    As of torch 2.13 it passes these by, by a list of dtypes older than cuDNN's bf16, though the
    layer itself takes them to cuDNN: that would copy them in every call, and torch warn of it.
    """
    flat = layer._flat_weights
    weights = [w for w in flat if isinstance(w, Tensor) and type(w) in PLAIN]
    if torch.compiler.is_compiling() or is_transformed() or len(weights) < len(flat):
        return
    # The same question the layer asks of its input when it is called.
    if not all(w.dtype == torch.bfloat16 and torch.cudnn_is_acceptable(w) for w in weights):
        return
    distinct = len({w.data_ptr() for w in weights}) == len(weights)  # as torch asks: none is shared
    if not (distinct and torch._use_cudnn_rnn_flatten_weight()):
        return
    with torch.no_grad(), torch.cuda.device_of(weights[0]):
        torch._cudnn_rnn_flatten_weight(
            weights,
            (4 if layer.bias else 2) + (layer.proj_size > 0),
            layer.input_size,
            get_cudnn_mode(layer.mode),
            layer.hidden_size,
            layer.proj_size,
            layer.num_layers,
            layer.batch_first,
            layer.bidirectional,
        )
