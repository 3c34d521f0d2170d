"""Rows that are normalised in one pass over memory: by their mean square, or by mean and spread."""

from narrowcast.kernels.norms.layer_norm import layer_norm
from narrowcast.kernels.norms.rms_norm import rms_norm

__all__ = ["layer_norm", "rms_norm"]
