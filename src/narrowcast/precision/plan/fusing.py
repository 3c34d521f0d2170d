"""Which pieces of a model are computed as one, and why, or why not: part of the plan.

A piece is known by what its modules compute, and by nothing else: what is not known for certain is
left alone, and told.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.kernels.launch import unsupported_reason
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.known_models import causal_models, makes_masks, why_masked
from narrowcast.precision.plan.known_modules import (
    looks_like_a_gated_mlp,
    looks_like_a_gelu_written_out,
    looks_like_a_layer_norm,
    looks_like_a_norm,
    looks_like_turning,
    match_gated_mlp,
    match_rms_norm,
    match_rotary,
    reason_not_gelu,
    reason_not_layer_norm,
)
from narrowcast.precision.plan.module_plan import ModulePlan
from narrowcast.precision.plan.policy import Policy, suggestion

Fuse = str | Sequence[str]
"""What is asked for: `auto`, `none`, or names of pieces."""

AUTO, NONE = "auto", "none"
_EMULATED = "products are emulated one by one"
Known = Callable[[nn.Module, Mapping[str, str]], Iterable[tuple[str, str]]]


def _losses(model: nn.Module, left: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for result in causal_models(model):
        head = f"{result.name}.{result.head}".lstrip(".")
        yield result.name, result.why_not or left.get(head, "")


def _modules(looks: Callable[[nn.Module], bool], known: Callable[[nn.Module], Any]) -> Known:
    """Return what finds the modules that look like a piece, and asks each what it is."""

    def walk_pieces(model: nn.Module, left: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name, module in model.named_modules():
            if looks(module):
                answer = known(module)
                why_not = answer if isinstance(answer, str) else ""
                yield name, why_not or left.get(name, "")

    return walk_pieces


PIECES: Mapping[str, Known] = {
    "loss": _losses,
    "gelu": _modules(looks_like_a_gelu_written_out, reason_not_gelu),
    "layer_norm": _modules(looks_like_a_layer_norm, reason_not_layer_norm),
    "mask": _modules(makes_masks, why_masked),
    "rms_norm": _modules(looks_like_a_norm, match_rms_norm),
    "rotary": _modules(looks_like_turning, match_rotary),
    "swiglu": _modules(looks_like_a_gated_mlp, match_gated_mlp),
}
"""What finds the modules of a piece in a model, of which some are left: names, and why not."""

_MADE = {
    "loss": "computed from hidden states; no logits in training",
    "gelu": "one torch operation in place of several",
    "layer_norm": "one pass over memory",
    "mask": "no mask is built in training if none is passed, also when compiled",
    "rms_norm": "one pass over memory",
    "rotary": "queries and keys rotated in one pass",
    "swiglu": "the gate's activation times the value in one pass",
}
_COMPILED = ", except in compiled code"
_OF_WHOLE_MODELS = ("loss", "mask")
"""Pieces that no compiler knows of, and that need no kernel of ours on a CPU."""
_OF_TORCH = (nn.LayerNorm, nn.RMSNorm)
"""Modules that half of all models have: that a machine or a policy fuses none is no news."""


@dataclass(frozen=True, kw_only=True)
class FusedPiece:
    """Modules that are computed as one piece, or left as they are, for the same reason."""

    piece: str
    modules: tuple[str, ...]
    fused: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "piece": self.piece,
            "fused": self.fused,
            "modules": list(self.modules),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        """Write it in a line, with modules that differ only in an index as one."""
        alike = groups_alike(self.modules, name=str, treatment=lambda _: "")
        names = ", ".join(map(folded, alike))
        return f"{self.piece}: {names}: {self.reason}" if names else f"{self.piece}: {self.reason}"


def piece_lines(pieces: Sequence[FusedPiece]) -> list[tuple[str, str]]:
    """Return what a plan says of its pieces in lines; those left for one reason share a line."""
    fused = [("fused", str(each)) for each in pieces if each.fused]
    left: dict[str, list[FusedPiece]] = {}
    for each in pieces:
        if not each.fused:
            left.setdefault(each.reason, []).append(each)
    for reason, alike in left.items():
        names = ", ".join(each.piece for each in alike)
        fused.append(("unfused", str(alike[0]) if len(alike) == 1 else f"{names}: {reason}"))
    return fused


def requested_pieces(fuse: Fuse) -> tuple[str, ...] | None:
    """Return the pieces that are named; None for `auto`, which names none."""
    named = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    if named == (AUTO,):
        return None
    if named == (NONE,):
        return ()
    for each in named:
        if each not in PIECES:
            known = ", ".join(PIECES)
            raise ConfigError(
                f"fuse must be auto, none, or some of {known}, got "
                f"{each!r}{suggestion(each, list(PIECES))}."
            )
    return tuple(dict.fromkeys(named))


def fused_pieces(
    model: nn.Module,
    fuse: Fuse,
    *,
    policy: Policy,
    hardware: Hardware,
    modules: Sequence[ModulePlan],
    emulated: bool,
) -> tuple[FusedPiece, ...]:
    """Decide what is computed as one; what is named and cannot be is refused."""
    named = requested_pieces(fuse)
    left = {each.name: why for each in modules if (why := _why_left(each))}
    matches: list[FusedPiece] = []
    for piece in PIECES if named is None else named:
        everywhere = _why_nowhere(piece, policy, hardware, named=named is not None)
        everywhere = _EMULATED if emulated else everywhere
        by_reason: dict[tuple[bool, str], list[str]] = {}
        made = _MADE[piece] + (_COMPILED if named is None and piece not in _OF_WHOLE_MODELS else "")
        for name, why_not in PIECES[piece](model, left):
            if everywhere and named is None and isinstance(model.get_submodule(name), _OF_TORCH):
                continue
            reason = why_not or everywhere
            by_reason.setdefault((not reason, reason or made), []).append(name)
        of_piece = [
            FusedPiece(piece=piece, modules=tuple(names), fused=fused, reason=reason)
            for (fused, reason), names in by_reason.items()
        ]
        if named is not None and not any(each.fused for each in of_piece):
            reason = of_piece[0].reason if of_piece else "this model has no matching module"
            raise UnsupportedError(
                f"fuse={piece} cannot be used: {reason}. Leave {piece} out, or write fuse=auto."
            )
        matches += of_piece
    return tuple(matches)


def _why_left(module: ModulePlan) -> str:
    """Say why a module is left as it is for what the plan has for it; nothing where it is not."""
    if module.policy.reduce != "fp32":
        return f"sums are rounded to {module.policy.reduce}"
    return _EMULATED if module.how == "emulated" else ""


def _why_nowhere(piece: str, policy: Policy, hardware: Hardware, *, named: bool) -> str:
    """Say why no module of a piece can be fused on this machine, with this policy."""
    device = torch.device(hardware.device)
    missing = unsupported_reason(device)
    if policy.reduce != "fp32":
        return f"sums are rounded to {policy.reduce}"
    if missing and piece in _OF_WHOLE_MODELS and device.type == "cpu":
        return "" if named else "on CPU only if fuse names it"
    if missing and piece != "gelu":  # which is an operation of torch
        return missing
    if not named and policy.functional not in ("bf16", "fp16"):
        return f"products are {policy.functional}; name the piece in fuse to use it"
    return ""
