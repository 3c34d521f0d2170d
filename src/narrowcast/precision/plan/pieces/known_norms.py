"""Norms that are known by what they compute: torch's own, and those of transformers.

None is taken by its name. Its own forward is called with numbers of a few rows, and has to give
what the piece would.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from narrowcast.precision.plan.module_kinds import module_kind
from narrowcast.precision.plan.pieces.probing import NOT_RUN, make_twin, numbers, reason_not_probed
from narrowcast.precision.swap import has_own_forward, plain_class

_ROWS, _WIDTH = 3, 8
WIDEST = 32768
"""Numbers of a row that a program of 512 threads still holds in registers, 64 in each."""


@dataclass(frozen=True)
class RmsNorm:
    """What a norm computes: x / rms(x), times its weight and an offset."""

    eps: float
    offset: float
    rounds: bool
    """Whether the quotient is rounded to what came in before it meets a weight in fp32."""
    rounds_to_weight_dtype: bool
    """Whether it is where the weight has 16 bits as well, which T5 makes a difference of."""
    promotes: bool
    """Whether the result is in the wider format of what came in and the weight."""
    of_torch: bool = False
    """Whether it is torch's own, which is one pass already in a single dtype."""


def match_rms_norm(module: nn.Module) -> RmsNorm | str:
    """Return what a norm of torch or of transformers computes, or why it is not known."""
    if isinstance(module, nn.RMSNorm):
        return _torchs_norm(module)
    why = reason_not_probed(module)
    weight = module._parameters.get("weight")
    own = [
        each for each in ("variance_epsilon", "eps") if isinstance(vars(module).get(each), float)
    ]
    if why or weight is None or weight.dim() != 1 or len(module._parameters) != 1 or len(own) != 1:
        return why or f"{plain_class(module).__name__} is not a known norm"
    if weight.numel() > WIDEST:
        return f"its rows of {weight.numel()} are too wide"
    eps = get_epsilon(module)
    if eps <= 0:
        return f"{plain_class(module).__name__} has no epsilon"
    fp32, bf16 = torch.float32, torch.bfloat16
    requested = _normed(module, torch.float64, fp32), _normed(module, bf16, fp32)
    residuals = _normed(module, bf16, bf16)
    yes = (True, False)
    for offset, rounds, promotes in itertools.product((0.0, 1.0), yes, yes):
        known = RmsNorm(eps, offset, rounds, rounds, promotes)
        if all(_is_as_known(known, *each) for each in requested):
            other = replace(known, rounds_to_weight_dtype=not rounds)
            by = {each: _is_as_known(each, *residuals) for each in (known, other)}
            if any(by.values()):
                return known if by[known] else other
            # Some add a weight of 16 bits and the offset in 16 bits: a rounding more, of two.
            if _is_as_known(known, *residuals, within=2.0**-6):
                return known
    return f"{plain_class(module).__name__} is not a known norm"


def _torchs_norm(module: nn.RMSNorm) -> RmsNorm | str:
    plain, weight = plain_class(module), module._parameters.get("weight")
    if has_own_forward(module) or plain.forward is not nn.RMSNorm.forward:
        return f"{plain.__name__} overrides forward"
    if weight is None or weight.dim() != 1:
        return "it has no weight" if weight is None else "its rows have several dimensions"
    if weight.numel() > WIDEST:
        return f"its rows of {weight.numel()} are too wide"
    eps = get_epsilon(module)
    return RmsNorm(
        eps, 0.0, rounds=False, rounds_to_weight_dtype=False, promotes=True, of_torch=True
    )


def get_epsilon(norm: nn.Module) -> float:
    """Return what a norm adds to the mean of squares, as it is now."""
    own = vars(norm).get("eps", vars(norm).get("variance_epsilon"))
    # As torch has it of fp32, in which it is computed.
    return torch.finfo(torch.float32).eps if own is None else float(own)


def reason_not_layer_norm(module: nn.Module) -> str:
    """Say why a layer norm of torch is not known; nothing where it is."""
    plain = plain_class(module)
    if has_own_forward(module) or plain.forward is not nn.LayerNorm.forward:
        return f"{plain.__name__} overrides forward"
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no weight"
    return "" if weight.numel() <= WIDEST else f"its rows of {weight.numel()} are too wide"


def looks_like_a_norm(module: nn.Module) -> bool:
    """Say whether a module is a norm by the mean of squares, or derived from torch's."""
    if isinstance(module, nn.RMSNorm):
        return True
    by_name = "RMS" in plain_class(module).__name__ or "variance_epsilon" in vars(module)
    return module_kind(module) == "normalisation" and by_name


def looks_like_a_layer_norm(module: nn.Module) -> bool:
    """Say whether a module is torch's layer norm, or one derived from it."""
    return isinstance(module, nn.LayerNorm)


def _normed(
    module: nn.Module, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, a weight, and what the norm makes of them."""
    x = numbers(_ROWS, _WIDTH, seed=0).to(dtype)
    weight = numbers(_WIDTH, seed=1).to(weight_dtype)
    twin = make_twin(module, _parameters={"weight": nn.Parameter(weight)})
    try:
        with torch.no_grad():
            return x, weight, type(twin).forward(twin, x)
    except NOT_RUN:
        return x, weight, None


def _is_as_known(
    known: RmsNorm, x: Tensor, weight: Tensor, matched: Tensor | None, *, within: float = 2.0**-20
) -> bool:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + known.eps)
    narrow = weight.dtype != torch.float32
    if known.rounds_to_weight_dtype if narrow else known.rounds:
        normed = normed.to(x.dtype)
    result = normed * (weight.float() + known.offset)
    if narrow or not known.promotes:
        result = result.to(x.dtype)
    if matched is None or matched.shape != result.shape:
        return False
    # No kernel is given float64: whether a result stays as wide, as T5's does, is of no account.
    if matched.dtype != result.dtype and x.dtype != torch.float64:
        return False
    # The same operations in the same order but for the offset, whose sum may be rounded elsewhere.
    return bool(((matched.double() - result.double()).abs() <= within * result.abs()).all())
