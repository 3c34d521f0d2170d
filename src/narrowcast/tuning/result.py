"""The result of a search: the policy, a reason per line, and everything it was compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from narrowcast.precision.plan.policy import Policy, short_text
from narrowcast.runs.writing import replace_file
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.updates import UpdateError

Verdict = Literal["confirmed", "withdrawn"]


@dataclass(frozen=True, kw_only=True)
class OptionCost:
    """What one option of a group costs."""

    name: str
    lost: float
    """Share of a step's progress that is lost."""
    seconds: float | None
    """Time of the group's products per micro-batch; None where nobody knows."""
    bytes: int
    error: UpdateError | None = None
    """Error of the update as measured; None if it is the sum of its products' errors."""
    by_product: Mapping[str, float] = field(default_factory=dict)
    """Share lost by each product in 8 bits."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "lost": self.lost if self.lost < float("inf") else None,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "update": None if self.error is None else self.error.to_json(),
            "by_product": dict(self.by_product),
        }


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """A group of layers, its options, and the one that was chosen."""

    label: str
    layers: tuple[str, ...]
    sensitive: bool
    """Whether it was taken out of its kind because it loses much more than the others."""
    options: tuple[OptionCost, ...]
    chosen: str
    reason: str

    @property
    def cost(self) -> OptionCost:
        """The chosen option."""
        return next(option for option in self.options if option.name == self.chosen)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "label": self.label,
            "layers": list(self.layers),
            "sensitive": self.sensitive,
            "chosen": self.chosen,
            "reason": self.reason,
            "options": [option.to_json() for option in self.options],
        }


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A whole policy with its predicted costs."""

    policy: str
    seconds: float | None
    lost: float
    bytes: int
    fits: bool
    """Whether it is within the budget."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "lost": self.lost if self.lost < float("inf") else None,
            "bytes": self.bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A short training run of the check."""

    policy: str
    steps: int
    loss: float
    """Mean loss on held-out batches after `steps`."""
    equal_time_steps: int | None = None
    """Steps in the time that the best preset takes for `steps`."""
    equal_time_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        finite = self.loss if abs(self.loss) < float("inf") else None
        return {
            "policy": self.policy,
            "steps": self.steps,
            "loss": finite,
            "equal_time_steps": self.equal_time_steps,
            "equal_time_loss": self.equal_time_loss,
        }


@dataclass(frozen=True, kw_only=True)
class Check:
    """What the check run says about the choice."""

    verdict: Verdict
    reason: str
    runs: tuple[CheckedRun, ...]
    time_source: str
    instead: str = ""
    """The preset that replaces a choice that was withdrawn."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "runs": [run.to_json() for run in self.runs],
            "time_source": self.time_source,
            "instead": self.instead or None,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult:
    """The policy that `tune` chose, and why. Print it, or `save` it as a policy file."""

    policy: Policy
    preset: str
    """Name of the preset that the policy is; empty if no preset is as good."""
    budget: Budget
    hardware: str
    time_source: str
    """Where the times come from; empty if there are none."""
    groups: tuple[GroupChoice, ...]
    predicted: Candidate
    measured: UpdateError | None
    """Error of the update under the whole policy, measured on the batches; None for the preset
    that replaced a choice after the check run."""
    presets: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    """The policies that no other beats, the fastest first."""
    notes: tuple[str, ...]
    check: Check | None = None
    title: str = ""
    """How the search was called; the first line of a policy file."""

    def __repr__(self) -> str:
        """Return a table with one line per group."""
        rows = [("layers", "formats", "loses", "time", "reason")]
        rows += [
            (
                f"{group.label} ×{len(group.layers)}" if len(group.layers) > 1 else group.label,
                group.chosen,
                percent(group.cost.lost),
                milliseconds(group.cost.seconds),
                group.reason,
            )
            for group in self.groups
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = [
            "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)),
                       row[4]]).rstrip()
            for row in rows
        ]  # fmt: skip
        return "\n".join([short_text(self.policy), "", *table, "", *self.lines])

    __str__ = __repr__

    @property
    def lines(self) -> list[str]:
        """What to know about the result, in sentences."""
        time = milliseconds(self.predicted.seconds)
        lost = self.predicted.lost if self.measured is None else self.measured.lost
        text = f"Steps lose {percent(lost)} of their progress (budget {str(self.budget) or 'none'})"
        if self.measured is not None:
            text += (
                f"; the update has a relative error of {self.measured.relative:.3g} and a cosine "
                f"of {self.measured.cosine:.6f}"
            )
        lines = [f"{text}."]
        if self.predicted.seconds is not None:
            lines.append(
                f"Products of linear layers take {time} per micro-batch on {self.hardware}."
            )
        if self.preset:
            lines.append(f"A preset is best: {self.preset}.")
        lines += self.notes
        if self.check is not None:
            did = "confirmed" if self.check.verdict == "confirmed" else "withdrew"
            lines.append(f"The check run {did} the choice: {self.check.reason}")
        return lines

    def titled(self, title: str) -> "TuneResult":
        """Return the result with another first line of its policy file."""
        return replace(self, title=title)

    def save(self, path: str | Path) -> Path:
        """Write the policy file, which `policy="@FILE"` reads.

        Args:
            path: The file.

        Returns:
            The path.
        """
        target = Path(path).expanduser()
        replace_file(target, self.file_text().encode())
        return target

    def file_text(self) -> str:
        """Return the policy file: the policy, and its exceptions with a reason per line."""
        whole, *exceptions = _terms(self.policy)
        head = [self.title or "narrowcast tune", *self.lines]
        lines = [f"# {line}" for line in head]
        lines += [f"policy: {_quoted(whole)}"]
        by_layer = {layer: group for group in self.groups for layer in group.layers}
        reasons = [_reason(glob, by_layer) for glob, _ in exceptions]
        terms = [f"  {_quoted(glob)}: {_quoted(roles)}" for glob, roles in exceptions]
        width = max(map(len, terms), default=0)
        if terms:
            lines.append("exceptions:")
        lines += [
            f"{term.ljust(width)}  # {reason}" if reason else term
            for term, reason in zip(terms, reasons, strict=True)
        ]
        named = {glob for glob, _ in exceptions}
        others = [g for g in self.groups if not any(_matches(glob, g) for glob in named)]
        lines += [f"# {group.label}: {group.reason}" for group in others]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "policy": short_text(self.policy),
            "preset": self.preset or None,
            "budget": str(self.budget),
            "hardware": self.hardware,
            "time_source": self.time_source,
            "groups": [group.to_json() for group in self.groups],
            "predicted": self.predicted.to_json(),
            "measured": None if self.measured is None else self.measured.to_json(),
            "presets": [each.to_json() for each in self.presets],
            "front": [each.to_json() for each in self.front],
            "notes": list(self.notes),
            "check": None if self.check is None else self.check.to_json(),
        }


def percent(share: float) -> str:
    """Write a share as a percentage with two significant digits."""
    if not share < float("inf"):
        return "overflows"
    return "0 %" if share < 5e-7 else f"{share * 100:.2g} %"


def milliseconds(seconds: float | None) -> str:
    """Write a time in milliseconds."""
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _terms(policy: Policy) -> Sequence[Any]:
    whole, _, _ = short_text(policy).partition(";")
    return [whole, *policy.exceptions]


def _matches(glob: str, group: GroupChoice) -> bool:
    probe = Policy(exceptions=((glob, "fp32"),))
    return any(probe.exception_for(layer)[0] for layer in group.layers)


def _reason(glob: str, by_layer: Mapping[str, GroupChoice]) -> str:
    probe = Policy(exceptions=((glob, "fp32"),))
    groups = [group for layer, group in by_layer.items() if probe.exception_for(layer)[0]]
    # A glob may also match layers that a later exception takes out.
    best = max(groups, key=lambda group: len(group.layers), default=None)
    if best is None:
        return ""
    return best.reason if best.label == glob else f"{best.label}: {best.reason}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
