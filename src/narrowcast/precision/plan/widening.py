"""Policies with wider formats, for a module or for the whole model: advice, and what adapts."""

from dataclasses import replace

from narrowcast.hardware import Hardware
from narrowcast.precision.plan.policy import PRODUCTS, Policy

WHOLE = ""
"""The model itself, whose own products, and those of the loss, have the policy's format."""

KEPT = ("params", "reduce")
"""Roles of an exception that have nothing to do with products."""


def widened(policy: Policy, name: str, wider: str) -> Policy:
    """Return a policy in which a module, or all that no exception names, has another format."""
    if name == WHOLE:
        return replace(in_one_format(policy, wider), head="")
    _, exception = policy.exception_for(name)
    return policy.with_exceptions({name: ", ".join([wider, *_narrow_roles(exception)])})


def in_one_format(policy: Policy, one: str) -> Policy:
    """Return a policy with all three products in a format that needs no scale."""
    return replace(
        policy,
        forward=one,
        grad_input=one,
        grad_weight=one,
        scaling="none",
        accumulator="fp32",
        output="",
    )


def in_fp32(policy: Policy) -> Policy:
    """Return a policy with every product in fp32, and weights kept as they are."""
    stored = [(glob, ", ".join(_narrow_roles(text))) for glob, text in policy.exceptions]
    exceptions = tuple((glob, text) for glob, text in stored if text)
    return replace(widened(policy, WHOLE, "fp32"), exceptions=exceptions)


def rungs(policy: Policy, hardware: Hardware) -> tuple[Policy, ...]:
    """Return a policy and the wider ones above it: in bf16, then in fp32.

    bf16 is left out where it would be emulated and what is multiplied now is not: fp32 has its
    range, and is faster there.
    """
    matches = [policy]
    native = {one: hardware.support(one).how == "native" for one in (policy.forward, "bf16")}
    for one in ("bf16", "fp32"):
        wider = _nowhere_below(matches[-1], one)
        emulated = one == "bf16" and native[policy.forward] and not native["bf16"]
        if wider != matches[-1] and not emulated:
            matches.append(wider)
    return tuple(matches)


_WIDTHS = {"bf16": 1, "tf32": 1, "fp32": 2}
"""All others have less range."""


def _nowhere_below(policy: Policy, one: str) -> Policy:
    """Return a policy whose products are in no format narrower than this, and nothing is fp16.

    What weights, gradients and sums are kept in needs the range of bf16, and no more digits.
    """
    wider = replace(
        policy,
        params=_in_range(policy.params),
        grads=_in_range(policy.grads),
        reduce=_in_range(policy.reduce),
        exceptions=(),
    )
    if not _is_wide(policy, one):
        head = policy.head if _WIDTHS.get(policy.head, 0) > _WIDTHS[one] else ""
        output = policy.output if policy.output == "fp32" else ""
        wider = replace(in_one_format(wider, one), head=head, output=output)
    exceptions = []
    for glob, text in policy.exceptions:
        inputs = replace(policy, exceptions=((glob, text),)).for_module(glob)
        terms = text if _is_wide(inputs, one) else ", ".join([one, *_narrow_roles(text)])
        exceptions.append((glob, _in_range(terms)))
    return replace(wider, exceptions=tuple(exceptions))


def _is_wide(policy: Policy, one: str) -> bool:
    least = min(_WIDTHS.get(getattr(policy, role), 0) for role in PRODUCTS)
    return least >= _WIDTHS[one]


def _in_range(text: str) -> str:
    return text.replace("fp16", "bf16")


def _narrow_roles(text: str) -> list[str]:
    overrides = [word.strip() for word in text.split(",")]
    return [word for word in overrides if word.partition("=")[0].strip() in KEPT]
