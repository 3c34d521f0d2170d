"""Policies by name, and how `auto` chooses among them."""

import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.policy import Policy, parse_policy


def _products(forward: str, **roles: Any) -> Policy:
    return Policy(**{"forward": forward, "grad_input": forward, "grad_weight": forward, **roles})


# e5m2 trades a digit for range, which gradients need more than activations do (the OCP
# recommendation); products that are not linear layers run in bf16 under every fp8 preset.
# Only outputs are summed the fast way: the field's habit, and 8 % faster on Hopper. The head stays
# in bf16: in fp8 it cost a GPT 1.2 % of its training loss, all other layers together nothing.
_HEAD = {"head": "bf16"}
_FP8 = {"grad_input": "e5m2", "grad_weight": "e5m2", "accumulator": "fast", **_HEAD}
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


_OF_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

AnyPolicy = str | Policy | torch.dtype
"""What a policy may be written as: text, the value, or the dtype of a preset as torch names it."""


def policy_from(text: AnyPolicy, hardware: Hardware | None = None) -> Policy:
    """Return the `Policy` for a text or a dtype.

    Args:
        text: A preset name, roles such as `compute=bf16, params=fp32`, or a torch dtype. Add
            exceptions after semicolons: `bf16; *.norm: fp32`.
        hardware: The device for which `auto` chooses. None: `auto` means `default`.

    Returns:
        The policy.

    Raises:
        ConfigError: The text is not a valid policy.

    Example:
        >>> nc.policy("bf16; head: fp32")
    """
    if isinstance(text, Policy):
        return text
    if isinstance(text, torch.dtype):
        if text not in _OF_DTYPES:
            raise ConfigError(
                f"precision policy: {text} matches no preset. Write torch.bfloat16, torch.float16 "
                f"or torch.float32, or a preset name: {', '.join(NAMES)}."
            )
        text = _OF_DTYPES[text]
    if not isinstance(text, str):
        raise ConfigError(_is_no_policy(text))
    known = dict(PRESETS)
    known[AUTO] = PRESETS[recommended(hardware)[0]] if hardware else PRESETS["default"]
    return parse_policy(text, presets=known)


def short_text(policy: Policy) -> str:
    """Write a policy so that it can be read again, with a preset's name where that is shorter."""
    roles = replace(policy, exceptions=())
    name = next((name for name, preset in PRESETS.items() if preset == roles), str(roles))
    return "; ".join([name, *(f"{glob}: {text}" for glob, text in policy.exceptions)])


def _is_no_policy(inputs: object) -> str:
    what = f"precision policy: must be text, a Policy or a torch dtype, got {inputs!r:.80}."
    if isinstance(inputs, Mapping):
        roles = ", ".join(f"{role}={value}" for role, value in inputs.items())
        return f'{what} Write its roles as text: policy="{roles}".'
    return f"{what} Write a preset name ({', '.join(NAMES)}) or roles as text, or leave it out."


def recommended(hardware: Hardware) -> tuple[str, str]:
    """Return the preset that suits a machine, and why.

    fp8 is never recommended here: whether it gains depends on the shapes of the model.
    """
    if hardware.support("bf16").how == "native":
        return "bf16", f"{hardware.name} has native bf16 matmuls, and bf16 needs no loss scale"
    if hardware.support("fp16").how == "native":
        return "fp16", f"{hardware.name} has native fp16 matmuls, but not bf16"
    return "fp32", f"{hardware.name} has no faster matmuls than fp32: narrower formats are slower"
