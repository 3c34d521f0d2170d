"""Activations and their derivatives in few instructions, for every kernel that has one in it."""

import triton
import triton.language as tl

from narrowcast.kernels.instruction import instruction


@triton.jit
def share_and_gauss(x, BY_BITS: tl.constexpr):
    """Return the normal CDF and exp(-x²/2) to about 1e-7 (Abramowitz and Stegun 7.1.26)."""
    below = 1.0 + 0.2316418882663604 * tl.abs(x)
    exponent = x * x * -0.7213475204444817
    if BY_BITS:
        t = 1.0 / below
        gauss = tl.exp2(exponent)
    else:
        t = instruction(below, "rcp.approx.ftz.f32 $0, $1;")
        gauss = instruction(exponent, "ex2.approx.ftz.f32 $0, $1;")
    poly = 0.127414796 + t * (
        -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    )
    tail = poly * t * gauss
    return tl.where(x < 0, tail, 1.0 - tail), gauss


@triton.jit
def share_and_slope(x, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr):
    """What x is multiplied by in its activation, and the derivative of the whole"""
    if ACTIVATION == "gelu":
        share, gauss = share_and_gauss(x, BY_BITS)
        return share, share + x * gauss * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 is the logistic function of 2z, with z = √(2/π) (x + 0.044715 x³).
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return share, share + x * share * (1.0 - share) * inner
    else:
        share = tl.sigmoid(x)
        return share, share * (1.0 + x * (1.0 - share))


@triton.jit
def activated(x, other, ACTIVATION: tl.constexpr, BY_BITS: tl.constexpr):
    """Apply the activation to x; for `gelu_backward`, x is the gradient and `other` the input."""
    if ACTIVATION == "gelu":
        share, gauss = share_and_gauss(x, BY_BITS)
        return x * share
    elif ACTIVATION == "gelu_backward":
        share, gauss = share_and_gauss(other, BY_BITS)
        return x * (share + other * gauss * 0.3989422804014327)
    elif ACTIVATION == "gated_silu":
        share, _ = share_and_slope(x, "silu", BY_BITS)
        return x * share * other
    elif ACTIVATION == "gated_gelu":
        share, _ = share_and_slope(x, "gelu", BY_BITS)
        return x * share * other
    elif ACTIVATION == "gated_gelu_tanh":
        share, _ = share_and_slope(x, "gelu_tanh", BY_BITS)
        return x * share * other
    else:
        return x
