"""Policies with wider formats for a module or for the whole model: what advice is made of."""

from dataclasses import replace

from narrowcast.precision.plan.policy import Policy

WHOLE = ""
"""The model itself, whose own products, and those of the loss, have the policy's format."""

KEPT = ("params", "reduce")
"""Roles of an exception that have nothing to do with products."""


def widened(policy: Policy, name: str, wider: str) -> Policy:
    """Return a policy in which a module, or all that no exception names, has another format."""
    if name == WHOLE:
        return replace(in_one_format(policy, wider), head="")
    _, exception = policy.exception_for(name)
    return policy.with_exceptions({name: ", ".join([wider, *_kept(exception)])})


def in_one_format(policy: Policy, one: str) -> Policy:
    """Return a policy with all three products in a format that needs no scale."""
    return replace(
        policy,
        forward=one,
        grad_input=one,
        grad_weight=one,
        scaling="none",
        accumulate="fp32",
        output="",
    )


def in_fp32(policy: Policy) -> Policy:
    """Return a policy with every product in fp32, and weights kept as they are."""
    kept = [(glob, ", ".join(_kept(text))) for glob, text in policy.exceptions]
    exceptions = tuple((glob, text) for glob, text in kept if text)
    return replace(widened(policy, WHOLE, "fp32"), exceptions=exceptions)


def _kept(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    return [word for word in words if word.partition("=")[0].strip() in KEPT]
