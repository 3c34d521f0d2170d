"""Policies by name, and how `auto` chooses among them."""

import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrowcast.hardware import Hardware
from narrowcast.precision.plan.policy import Policy, parse_policy


def _products(forward: str, **roles: Any) -> Policy:
    return Policy(**{"forward": forward, "grad_input": forward, "grad_weight": forward, **roles})


# e5m2 trades a digit for range, which gradients need more than activations do (the OCP
# recommendation); products that are not linear layers run in bf16 under every fp8 preset.
# Only outputs are summed the fast way: the field's habit, and 8 % faster on Hopper. The head stays
# in bf16: in fp8 it cost a GPT 1.2 % of its training loss, all other layers together nothing.
_HEAD = {"head": "bf16"}
_FP8 = {"grad_input": "e5m2", "grad_weight": "e5m2", "accumulate": "fast", **_HEAD}
_BF16 = _products("bf16")

PRESETS: Mapping[str, Policy] = types.MappingProxyType(
    {
        "fp32": Policy(),
        "tf32": _products("tf32"),
        "bf16": _BF16,
        "fp16": _products("fp16"),
        "bf16-pure": _products("bf16", params="bf16", master="none"),
        "fp8-tensor": _products("e4m3", scaling="tensor", **_FP8),
        "fp8-row": _products("e4m3", scaling="row", **_FP8),
        # So local that e5m2's range is not needed.
        "fp8-block": _products("e4m3", scaling="block", **_HEAD),
        "fp8-delayed": _products("e4m3", scaling="delayed", **_FP8),
        "conservative": Policy(),
        "default": _BF16,
        "aggressive": _products("e4m3", scaling="tensor", params="bf16", master="split", **_FP8),
    }
)

AUTO = "auto"
NAMES = (*PRESETS, AUTO)


def policy_from(text: "str | Policy", hardware: Hardware | None = None) -> Policy:
    """Return the policy a text stands for; `auto` needs to know the hardware."""
    if isinstance(text, Policy):
        return text
    known = dict(PRESETS)
    known[AUTO] = PRESETS[recommended(hardware)[0]] if hardware else PRESETS["default"]
    return parse_policy(text, presets=known)


def short_text(policy: Policy) -> str:
    """Write a policy so that it can be read again, with a preset's name where that is shorter."""
    roles = replace(policy, exceptions=())
    name = next((name for name, preset in PRESETS.items() if preset == roles), str(roles))
    return "; ".join([name, *(f"{glob}: {text}" for glob, text in policy.exceptions)])


def recommended(hardware: Hardware) -> tuple[str, str]:
    """Return the preset that suits a machine, and why.

    fp8 is never recommended here: whether it gains depends on the shapes of the model.
    """
    if hardware.support("bf16").how == "native":
        return "bf16", f"{hardware.name} multiplies bf16 natively, and bf16 needs no loss scale"
    if hardware.support("fp16").how == "native":
        return "fp16", f"{hardware.name} multiplies fp16 natively, but not bf16"
    return "fp32", f"{hardware.name} has no faster products than fp32: a narrower format is slower"
