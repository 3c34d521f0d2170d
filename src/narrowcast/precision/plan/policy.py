"""A policy: which number format each role of a run uses, as a value, as text, and as presets."""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.numerics import FORMATS

Master = Literal["none", "fp32", "split", "kahan", "stochastic"]
Scaling = Literal["none", "tensor", "row", "block", "delayed"]

PRODUCTS = ("forward", "grad_input", "grad_weight")
STORAGE_FORMATS = ("fp32", "bf16", "fp16")
MOMENT_FORMATS = ("fp32", "bf16", "int8")
HEADS = frozenset({"head", "lm_head"})
"""What a model's output layer is called: here, and in transformers."""
FP8_FORMATS = ("e4m3", "e5m2")
"""Formats whose operands need a scale."""
# Block formats carry their own scales; a product of them is e4m3 or e2m1 with one scale a block.
COMPUTE_FORMATS = ("fp32", "tf32", "bf16", "fp16", *FP8_FORMATS, "mxfp8", "nvfp4")


ITSELF = "."
"""What names the model itself in an exception: its own weights and products."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """Number formats by role. See `policy` for the text form.

    Example:
        >>> nc.Policy(forward="bf16", grad_input="bf16", grad_weight="bf16", params="bf16")
    """

    forward: str = "fp32"
    """Format of the operands of output = input · weight."""
    grad_input: str = "fp32"
    """Format of grad_output in grad_input = grad_output · weight."""
    grad_weight: str = "fp32"
    """Format of grad_output in grad_weight = grad_outputᵀ · input."""
    scaling: Scaling = "none"
    """How operands of fp8 products are scaled: one scale per tensor, per row, per block of 128
    (128 × 128 for a weight), or one per tensor from the maxima of past steps (delayed)."""
    accumulator: str = "fp32"
    """How products are summed: `fp32`, or `fast` for the native fp8 accumulation of tensor cores
    (14 bits on Hopper). Gradients are always summed in fp32."""
    output: str = ""
    """Format of a product's output. Empty: the forward format, or bf16 if that is narrower."""
    params: str = "fp32"
    """Format in which the weights are stored."""
    grads: str = ""
    """Format in which gradients of weights are stored and summed. Empty: same as `params`."""
    master: Master | Literal[""] = ""
    """How the digits that `params` lacks are stored. Empty: fp32 if there are any."""
    moments: str = ""
    """Format of the optimizer's moments. Empty: fp32, or same as `params` without a master. bf16
    and int8 use stochastic rounding and need the fused optimizer."""
    reduce: str = "fp32"
    """Format of normalisations, softmax, losses and reductions."""
    head: str = ""
    """Format of the products of the output layer, a module named `head` or `lm_head`. Empty:
    same as other layers."""
    exceptions: tuple[tuple[str, str], ...] = field(default=())
    """Pairs of a module glob and the roles it changes, in their text form; the last match wins."""

    def __post_init__(self) -> None:
        if not self.master:
            # Sixteen-bit weights without a master lose small updates: never by omission.
            object.__setattr__(self, "master", "none" if self.params == "fp32" else "fp32")
        stripped = tuple((glob.strip(), text.strip()) for glob, text in self.exceptions)
        object.__setattr__(self, "exceptions", stripped)
        if problems := _find_problems(self):
            raise ConfigError("precision policy: " + " ".join(problems))

    def __str__(self) -> str:
        return "; ".join(
            [_roles_text(self), *(f"{glob}: {text}" for glob, text in self.exceptions)]
        )

    def __repr__(self) -> str:
        return f"narrowcast.policy({str(self)!r})"

    @property
    def output_format(self) -> str:
        """The format a product returns."""
        if self.output:
            return self.output
        if self.forward == "tf32":
            return "fp32"
        return self.forward if self.forward in STORAGE_FORMATS else "bf16"

    @property
    def grads_format(self) -> str:
        """The format in which gradients of weights are stored."""
        return self.grads or self.params

    @property
    def moments_format(self) -> str:
        """The format in which the optimizer's moments are stored."""
        return self.moments or (self.params if self.master == "none" else "fp32")

    @property
    def needs_fused_optimizer(self) -> bool:
        """Whether the moments have a format that only the fused optimizer stores."""
        return self.moments not in ("", self.params if self.master == "none" else "fp32")

    @property
    def functional(self) -> str:
        """The format of products outside any module that has its own: attention, `@`, einsum."""
        return self.forward if self.forward in ("fp32", "tf32", "bf16", "fp16") else "bf16"

    @property
    def needs_loss_scale(self) -> bool:
        """True where gradients pass through fp16, whose smallest number is 6e-8."""
        everything = [self, *(self.for_module(glob) for glob, _ in self.exceptions)]
        return any(
            "fp16"
            in (
                p.forward,
                p.grad_input,
                p.grad_weight,
                p.params,
                p.grads,
                p.output,
                p.reduce,
                p.head,
            )
            for p in everything
        )

    def for_module(self, name: str) -> "Policy":
        """Return the policy of one module, exceptions applied.

        An exception for a module also applies to everything inside it, and takes precedence over
        `head`.
        """
        whole = replace(self, exceptions=(), head="")
        glob, text = self.exception_for(name)
        if text:
            return _with_roles(whole, text, where=f"exception {glob}")
        if self.head and name.rpartition(".")[2] in HEADS:
            return _with_roles(whole, self.head, where="head")
        return whole

    def exception_for(self, name: str) -> tuple[str, str]:
        """Return glob and text of the last exception that matches a module, or empty strings."""
        prefixes = _prefixes(name)
        for glob, text in reversed(self.exceptions):
            if name == glob or any(matches(prefix, glob) for prefix in prefixes):
                return glob, text
        return "", ""

    def with_exceptions(self, more: Mapping[str, str]) -> "Policy":
        """Return this policy with more exceptions, which take precedence."""
        stored = [(glob, text) for glob, text in self.exceptions if glob not in more]
        return replace(self, exceptions=(*stored, *more.items()))


def parse_policy(text: str, *, presets: Mapping[str, Policy]) -> Policy:
    """Read a policy from its text form."""
    head, *rest = [part.strip() for part in text.split(";")]
    overrides = _split_terms(head)
    if not overrides:
        raise ConfigError(
            f"precision policy: the text is empty. Write a preset ({', '.join(presets)}) or roles "
            "such as `compute=bf16, params=fp32`."
        )
    policy = Policy()
    if "=" not in overrides[0]:
        if overrides[0] not in presets:
            raise ConfigError(
                "precision policy: there is no preset "
                f"{overrides[0][:60]!r}{suggestion(overrides[0], presets)}. The presets are "
                f"{', '.join(presets)}."
            )
        policy, overrides = presets[overrides[0]], overrides[1:]
    policy = (
        _with_roles(policy, ", ".join(overrides), where="precision policy") if overrides else policy
    )
    exceptions = dict(policy.exceptions)
    for part in filter(None, rest):
        glob, colon, roles = part.partition(":")
        if not colon or not glob.strip() or not roles.strip():
            raise ConfigError(
                f"precision policy: an exception must be `glob: format`, got {part!r}. Write for "
                "example `*.norm: fp32`."
            )
        exceptions.pop(glob.strip(), None)
        exceptions[glob.strip()] = roles.strip()
    return replace(policy, exceptions=tuple(exceptions.items()))


# The roles an exception may change; the others belong to the optimizer and hold for all weights.
_PER_MODULE = ("compute", *PRODUCTS, "scaling", "output", "params", "reduce")
_ROLES = {f.name for f in fields(Policy)} - {"exceptions"} | {"compute"}


def _with_roles(policy: Policy, text: str, *, where: str) -> Policy:
    changes: dict[str, str] = {}
    for word in _split_terms(text):
        role, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            # A bare format is what the module computes in, all its products alike.
            role, value = "compute", role
            if value in STORAGE_FORMATS:
                changes["output"] = value
        role = role.removeprefix("compute.").replace("-", "_")
        if role not in _ROLES:
            raise ConfigError(
                f"{where}: there is no role {role!r}{suggestion(role, _ROLES)}. The roles are "
                f"{', '.join(sorted(_ROLES))}."
            )
        if where.startswith("exception") and role not in _PER_MODULE:
            raise ConfigError(
                f"{where}: {role} applies to the whole model, not to one module. Write "
                f"{role}={value} before the first semicolon."
            )
        if (
            where.startswith("exception")
            and role == "params"
            and value not in ("fp32", policy.params)
        ):
            raise ConfigError(
                f"{where}: an exception can only widen params to fp32, got params={value}. Write "
                "params=fp32, or set params for the whole model."
            )
        if role == "compute":
            changes |= dict.fromkeys(PRODUCTS, value)
            if value not in FP8_FORMATS:
                # What belongs to fp8 products goes with them, a head of its own too.
                changes |= {"scaling": "none", "accumulator": "fp32", "head": "", **changes}
            elif policy.scaling == "none":
                changes.setdefault("scaling", "tensor")
        else:
            changes[role] = value
    if where.startswith("exception") and changes.get("params") == "fp32":
        # These belong to 16-bit weights, which the module does not have then.
        changes |= {"master": "none", "grads": "", "moments": ""}
    if changes.get("params", policy.params) != policy.params:
        changes.setdefault("master", "")
    return replace(policy, **changes)  # type: ignore[arg-type]  # checked by __post_init__


@lru_cache(maxsize=1024)
def _find_problems(policy: Policy) -> tuple[str, ...]:
    """Return what is wrong with a policy; a plan asks it of each of thousands of modules."""
    return tuple(_problems(policy))


def _problems(policy: Policy) -> Iterable[str]:
    for role in PRODUCTS:
        yield from _check_choice(role, getattr(policy, role), COMPUTE_FORMATS)
    yield from _check_choice("scaling", policy.scaling, get_args(Scaling))
    yield from _check_choice("master", policy.master, get_args(Master))
    yield from _check_choice("params", policy.params, STORAGE_FORMATS)
    yield from _check_choice("reduce", policy.reduce, STORAGE_FORMATS)
    yield from _check_choice("accumulator", policy.accumulator, ("fp32", "fast"))
    for role in ("output", "grads", "head"):
        yield from _check_choice(role, getattr(policy, role), ("", *STORAGE_FORMATS))
    yield from _check_choice("moments", policy.moments, ("", *MOMENT_FORMATS))
    fp8 = [role for role in PRODUCTS if getattr(policy, role) in FP8_FORMATS]
    if fp8 and policy.scaling == "none":
        yield f"{fp8[0]}={getattr(policy, fp8[0])} needs a scale. Write scaling=tensor."
    if policy.params == "fp32" and policy.master in ("split", "kahan", "stochastic"):
        yield f"master={policy.master} needs 16-bit weights. Write params=bf16 or drop master."
    if policy.params == "fp16" and policy.master == "none":
        yield (
            "params=fp16 with master=none makes the optimizer compute in fp16, where squared "
            "gradients overflow and eps is zero. Write master=fp32, kahan or stochastic."
        )
    if policy.master == "split" and policy.params == "fp16":
        yield "master=split needs bf16 weights. Write params=bf16 or master=fp32."
    if policy.grads not in ("", "fp32", policy.params):
        yield (
            f"grads={policy.grads} does not work with params={policy.params}. Write grads=fp32 or "
            "leave grads out."
        )
    if policy.moments == "fp32" and policy.params != "fp32" and policy.master == "none":
        yield (
            f"moments=fp32 is of no use for {policy.params} weights with master=none. Write "
            "moments=bf16 or int8, or choose a master."
        )
    for glob, text in policy.exceptions:
        if not glob or not text or set(glob) & set(":;") or ";" in text:
            yield f"an exception must be `glob: format`, got {f'{glob}: {text}'!r}."
            continue
        try:
            _with_roles(replace(policy, exceptions=()), text, where=f"exception {glob}")
        except ConfigError as error:
            yield str(error)


def _check_choice(role: str, value: str, allowed: tuple[str, ...]) -> Iterable[str]:
    if value not in allowed:
        known = " (a format, but not for this role)" if value in FORMATS else ""
        choices = ", ".join(filter(None, allowed))
        yield f"{role} must be one of {choices}, got {value}{known}{suggestion(value, allowed)}."


def _roles_text(policy: Policy) -> str:
    default = Policy()
    changed = {
        f.name: getattr(policy, f.name)
        for f in fields(Policy)
        if f.name != "exceptions" and getattr(policy, f.name) != getattr(default, f.name)
    }
    products = {getattr(policy, role) for role in PRODUCTS}
    if len(products) == 1:
        for role in PRODUCTS:
            changed.pop(role, None)
        changed = {"compute": products.pop(), **changed}
    if changed.get("params", "fp32") != "fp32":
        changed.setdefault("master", policy.master)
    return ", ".join(f"{role}={value}" for role, value in changed.items())


def matches(name: str, glob: str) -> bool:
    """Return whether a glob names a module; `.` is the model itself, without what is inside it."""
    return fnmatchcase(name, glob) or (not name and glob == ITSELF)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _split_terms(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean …?)` if a known name is spelled similarly, else nothing."""
    names = list(known)
    close = [name for name in names if name.endswith(f".{word}")][:1]  # a wrapper adds a prefix
    close = close or difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


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
            exceptions after semicolons: `bf16; *.norm: fp32`. `@policy.yaml` reads a policy file.
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
    if text.lstrip().startswith("@"):
        from narrowcast.config.policy_file import policy_text  # only for files

        text = policy_text(text)
    known = dict(PRESETS)
    known[AUTO] = PRESETS[recommended(hardware)[0]] if hardware else PRESETS["default"]
    return parse_policy(text, presets=known)


def short_text(policy: Policy) -> str:
    """Write a policy as text that parses to the same policy, with a preset's name if shorter."""
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
    """Return the preset that suits a machine, and why; never fp8, whose gain depends on shapes."""
    if hardware.support("bf16").how == "native":
        return "bf16", f"{hardware.name} has native bf16 matmuls, and bf16 needs no loss scale"
    if hardware.support("fp16").how == "native":
        return "fp16", f"{hardware.name} has native fp16 matmuls, but not bf16"
    return "fp32", f"{hardware.name} has no faster matmuls than fp32: narrower formats are slower"
