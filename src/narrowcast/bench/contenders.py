"""The contenders of `bench step`: policies of this library, and peers by name."""

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from narrowcast.errors import ConfigError

POLICY_SEPARATOR = "|"
"""Separates policies in one text: a policy itself has commas, semicolons and colons."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table."""

    name: str
    kind: str
    """Name of the builder in `peers`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: Sequence[str] = ()
    """Modules of which one must be importable; empty if torch is enough."""
    distribution: str = ""
    """Package whose version is reported."""
    note: str = ""
    """What a reader must know to compare it."""

    @property
    def missing(self) -> str:
        """Why it cannot run here, or an empty string."""
        if not self.requires or any(importlib.util.find_spec(m) for m in self.requires):
            return ""
        return f"{self.distribution or self.requires[0]} is not installed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"options": dict(self.options), "requires": list(self.requires)}


_NO_MASTER = "16-bit weights without master weights: loses small updates"
_TORCH: dict[str, dict[str, Any]] = {
    "torch-fp32": {"compute": "fp32"},
    "torch-fp32-compiled": {"compute": "fp32", "compiled": True},
    "torch-tf32": {"compute": "tf32"},
    "torch-amp-bf16": {"compute": "bf16"},
    "torch-amp-bf16-compiled": {"compute": "bf16", "compiled": True},
    "torch-amp-fp16": {"compute": "fp16"},
    "torch-amp-fp16-compiled": {"compute": "fp16", "compiled": True},
    "torch-bf16-compiled": {"compute": "bf16", "weights": "bf16", "compiled": True},
}
_TORCHAO: dict[str, dict[str, Any]] = {
    f"torchao-{recipe}{'-bf16-weights' if weights == 'bf16' else ''}": {
        "compute": "bf16",
        "compiled": True,
        "weights": weights,
        "float8": recipe,
    }
    for weights in ("fp32", "bf16")
    for recipe in ("tensorwise", "rowwise")
}
_LOOPS: Mapping[str, tuple[str, Sequence[str]]] = {
    "accelerate": ("accelerate", ("accelerate",)),
    "lightning": ("lightning-fabric", ("lightning_fabric", "lightning")),
}
"""Libraries that bring a loop: their distribution, and the modules of which one is needed."""

PEERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        *(
            Contender(
                name=name,
                kind="torch",
                options=options,
                requires=("torchao",) if "float8" in options else (),
                distribution="torchao" if "float8" in options else "",
                note=_NO_MASTER if options.get("weights") == "bf16" else "",
            )
            for name, options in (_TORCH | _TORCHAO).items()
        ),
        *(
            Contender(
                name=f"{library}-{precision}",
                kind=library,
                options={"precision": precision, "compiled": precision == "bf16"},
                requires=modules,
                distribution=distribution,
            )
            for library, (distribution, modules) in _LOOPS.items()
            for precision in ("bf16", "fp32")
        ),
    )
}

# The first peer is the baseline. Those that compile longest come next, so that they start first.
_DEFAULT_PEERS = {
    "cuda": "torch-amp-bf16-compiled,torchao-tensorwise,torchao-rowwise,"
    "torchao-tensorwise-bf16-weights,torchao-rowwise-bf16-weights,accelerate-bf16,lightning-bf16,"
    "torch-amp-fp16-compiled,torch-bf16-compiled,torch-amp-bf16,torch-amp-fp16,torch-tf32",
    # Native 16-bit products may be 90 times slower than fp32 on a CPU, or end the process.
    "cpu": "torch-fp32,accelerate-fp32,lightning-fp32",
}
_DEFAULT_POLICIES = {
    "cuda": "bf16 | bf16, params=bf16, master=split | fp16 | fp16, params=fp16, master=fp32 | "
    "fp8-tensor | fp8-delayed | aggressive",
    "cpu": "fp32 | bf16",
}


def select_contenders(
    *, peers: str | None, policies: str | None, device_type: str
) -> tuple[Contender, ...]:
    """Return the contenders; None means the default of the device.

    `peers` is `a,b,…`, `all` or `none`. `policies` is `bf16 | bf16, params=bf16` or `none`.
    """
    device_type = "cuda" if device_type == "cuda" else "cpu"
    peers = _DEFAULT_PEERS[device_type] if peers is None else peers
    policies = _DEFAULT_POLICIES[device_type] if policies is None else policies
    contenders = (
        *(
            _named(name, PEERS)
            for name in _split_names(",".join(PEERS) if peers == "all" else peers)
        ),
        *(
            Contender(name=f"narrowcast {policy}", kind="narrowcast", options={"policy": policy})
            for policy in _split_names(policies, separator=POLICY_SEPARATOR)
        ),
    )
    if not contenders:
        raise ConfigError("--peers and --policies are both none. Name at least one contender.")
    names = [contender.name for contender in contenders]
    return tuple(
        replace(each, name=f"{each.name} ({times})") if times > 1 else each
        for index, each in enumerate(contenders)
        for times in [names[: index + 1].count(each.name)]
    )


def select_baseline(contenders: Sequence[Contender], requested: str | None) -> Contender:
    """Return the contender with the requested name or policy, or the first that can run here."""
    if requested is None:
        return next((c for c in contenders if not c.missing), contenders[0])
    by_name = {c.name: c for c in contenders}
    policy = f"narrowcast {requested}"
    return by_name[policy] if policy in by_name else _named(requested, by_name)


def _split_names(text: str, *, separator: str = ",") -> list[str]:
    names = [word.strip() for word in text.split(separator) if word.strip()]
    return [] if names == ["none"] else names


def _named(word: str, known: Mapping[str, Contender]) -> Contender:
    if word in known:
        return known[word]
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
    raise ConfigError(f"no contender is called {word!r}. {hint}")
