"""The choice: the exact search under a budget, and the policy that says what it found."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import PRESETS, Policy, policy_from, short_text
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.groups import LayerGroup, globs_for
from narrowcast.tuning.measuring import GroupMeter, MeasuredGroup, Progress, layer_formats
from narrowcast.tuning.options import Option, Rates, option_bytes
from narrowcast.tuning.result import (
    Candidate,
    GroupChoice,
    TuneResult,
    milliseconds,
    percent,
)
from narrowcast.tuning.search import Cost, FrontPoint, pareto_front
from narrowcast.tuning.updates import UpdateError, UpdateMeter

NO_GAIN = 0.99
"""Above this share of a preset's time a policy gains too little to replace the preset."""
ROUNDS = 10
"""Searches at most. Each assumes the loss that the last policy really had."""
SPLIT = "params=bf16, master=split"
MOST_POINTS = 200
"""Points of the front in a result."""


@final
class Chooser:
    """Chooses the best policy from measured groups."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[MeasuredGroup],
        meter: GroupMeter,
        *,
        budget: Budget,
        rates: Rates,
        lost_outside: float,
        lost_by_storage: float | None,
        peak: Callable[[Policy], int] | None,
    ) -> None:
        """`lost_by_storage` is what 16-bit weights lose; None leaves the weights in fp32.

        `peak` predicts the memory of a step under a policy; without it, weights, optimizer state
        and the saved inputs of linear layers count.
        """
        self._model, self._groups, self._meter = model, groups, meter
        self._budget, self._rates, self._outside = budget, rates, lost_outside
        self._storage = {"fp32": 0.0}
        if lost_by_storage is not None:
            self._storage["bf16"] = lost_by_storage
        self._peak, self._excess = peak, 0
        sizes = [[cost.bytes for cost in each.costs] for each in groups]
        self._bytes_span = sum(max(some) - min(some) for some in sizes)
        self._weights = {params: self._weights_bytes(params) for params in self._storage}
        self._timed = bool(rates.source)

    def choose(self, updates: UpdateMeter, *, tell: Progress) -> TuneResult:
        """Search until the chosen policy is within the budget when it is measured as a whole."""
        limit, factor, least = self._budget.loss, 1.0, 0
        for _ in range(ROUNDS):
            tell("searching")
            chosen = self._search(factor)
            tell(f"measuring {short_text(chosen.policy)[:60]}")
            measured = updates.error(chosen.policy)
            if limit is not None and measured.lost > limit:
                # Stricter than the last time, also where a whole loses less than its parts.
                factor *= 1.05 * max(measured.lost / max(chosen.point.loss, 1e-12), 1.0)
                continue
            needed = 0
            if self._peak is not None and self._budget.memory is not None:
                tell("predicting the memory of a step")
                needed = self._peak(chosen.policy)
                if needed > self._budget.memory:
                    # The bytes of options are estimates: what is saved per group comes close.
                    self._excess += max(needed - self._budget.memory, self._bytes_span // 8)
                    least = min(needed, least or needed)
                    continue
            result = self._result(chosen, measured)
            if result.policy != chosen.policy:
                return replace(result, measured=updates.error(result.policy))
            if not needed:
                return result
            return replace(result, predicted=replace(result.predicted, bytes=needed))
        if limit is None or measured.lost <= limit:
            raise ConfigError(self._impossible(least, math.inf))
        lost_percent = math.ceil(measured.lost * 1e5) / 1e3
        raise ConfigError(
            f"No policy keeps the budget {self._budget}: the best one loses "
            f"{percent(measured.lost)}. Write loss={lost_percent:g}%."
        )

    def _search(self, factor: float) -> "_Chosen":
        """Return the best policy if everything loses `factor` times what was measured."""
        most_loss = math.inf if self._budget.loss is None else self._budget.loss / factor
        most_seconds = self._most_seconds()
        least_bytes: float = math.inf
        # Without times 16 bits gain nothing.
        for outside, params in itertools.product((True, False)[not self._timed :], self._storage):
            fixed = (self._outside if outside else 0.0) + self._storage[params]
            costs = [self._costs(each, params) for each in self._groups]
            most_bytes = math.inf
            if self._budget.memory is not None:
                most_bytes = self._budget.memory - self._weights[params] - self._excess
                least = sum(min(cost.bytes for cost in row) for row in costs)
                least_bytes = min(least_bytes, least + self._weights[params])
            front = [
                point._replace(loss=point.loss + fixed)
                for point in pareto_front(costs, most_loss=most_loss - fixed, most_bytes=most_bytes)
            ]
            within = [point for point in front if point.seconds <= most_seconds]
            if within:
                best = min(within, key=self._order)
                policy = self._policy(best, params=params, outside=outside)
                return _Chosen(policy, best, front, params, fixed)
        raise ConfigError(self._impossible(least_bytes, most_seconds))

    def _order(self, point: FrontPoint) -> tuple[float, float]:
        fastest = self._timed and (self._budget.loss is not None or not self._budget.limits_time)
        return (point.seconds, point.loss) if fastest else (point.loss, point.seconds)

    def _costs(self, each: MeasuredGroup, params: str) -> list[Cost]:
        return [
            Cost(
                seconds=cost.seconds or 0.0,
                loss=math.inf if self._timed and cost.seconds is None else cost.lost,
                bytes=self._bytes(each.group, option, params),
            )
            for option, cost in zip(each.options, each.costs, strict=True)
        ]

    def _most_seconds(self) -> float:
        budget = self._budget
        if budget.time_share is None:
            return math.inf if budget.seconds is None else budget.seconds
        name = self._meter.sixteen.name
        return budget.time_share * sum(each.cost(name).seconds or 0.0 for each in self._groups)

    def _bytes(self, group: LayerGroup, option: Option, params: str) -> int:
        return option_bytes(group, option, rows=self._rates.rows, params=params)

    def _weights_bytes(self, params: str) -> int:
        """Return the bytes that the options of groups are added to.

        With a prediction, they are those with which all groups in 16 bits have that peak.
        """
        if self._peak is not None:
            sixteen = self._meter.sixteen
            text = sixteen.name if params == "fp32" else f"{sixteen.name}, {SPLIT}"
            return self._peak(policy_from(text)) - sum(
                self._bytes(each.group, sixteen, params) for each in self._groups
            )
        text = "fp32" if params == "fp32" else f"fp32, {SPLIT}"
        plan = make_plan(self._model, text, hardware=self._rates.hardware, fuse="none")
        return sum(plan.bytes.values())

    def _impossible(self, least_bytes: float, most_seconds: float) -> str:
        """Return why no policy is within the budget, and what to write."""
        budget = self._budget
        if budget.memory is not None and least_bytes > budget.memory:
            gib = math.ceil(least_bytes / 2**30 * 100) / 100
            return (
                f"No policy fits the budget {budget}: a step needs at least {gib:.2f} GiB. Write "
                f"memory={gib:.2f}GiB, use a smaller batch, or set "
                "memory.activation_checkpointing=blocks."
            )
        if most_seconds < math.inf:
            return (
                f"No policy fits the budget {budget}: the products of the linear layers take "
                f"longer than {milliseconds(most_seconds)} in all formats within the other "
                "limits. Allow more time or more loss."
            )
        more = "more loss" if budget.memory is None else "more loss or more memory"
        return f"No policy fits the budget {budget}. Allow {more}."

    def _policy(self, point: FrontPoint, *, params: str, outside: bool) -> Policy:
        """Return the policy of a point: the base that needs the fewest exceptions, and those."""
        chosen = [
            (each.group, each.options[choice])
            for each, choice in zip(self._groups, point.choices, strict=True)
        ]
        bases = [option.name for option in self._meter.wide]
        if outside:
            bases = [self._meter.sixteen.name]
            bases += [f"fp8-{scaling}" for scaling in self._rates.scalings()]
        stored = f", {SPLIT}" if params == "bf16" else ""
        policies = [self._with_base(policy_from(f"{base}{stored}"), chosen) for base in bases]
        return min(policies, key=lambda policy: len(policy.exceptions))

    def _with_base(self, base: Policy, chosen: Sequence[tuple[LayerGroup, Option]]) -> Policy:
        exceptions: dict[str, str] = {}
        # Sensitive layers come last, so that the glob of their kind does not cover them.
        ordered = sorted(chosen, key=lambda each: each[0].sensitive)
        for number, (group, option) in enumerate(ordered):
            current = base.with_exceptions(exceptions)
            if all(layer_formats(current, name) == option.formats for name in group.names):
                continue
            later = [name for other, _ in ordered[number + 1 :] for name in other.names]
            for glob in globs_for(group, self._meter.names, later=later):
                exceptions[glob] = option.roles
        whole = base.with_exceptions(exceptions)
        missed = {
            name: option.roles
            for group, option in chosen
            for name in sorted(group.names)
            if layer_formats(whole, name) != option.formats
        }
        return whole.with_exceptions(missed)

    def _candidate(
        self, text: str, names: Sequence[str], *, lost: float, params: str = "fp32"
    ) -> Candidate:
        """Return a policy with the sums of its groups' costs and what is lost elsewhere."""
        costs = [each.cost(name) for each, name in zip(self._groups, names, strict=True)]
        known = self._timed and all(cost.seconds is not None for cost in costs)
        seconds = sum(cost.seconds or 0.0 for cost in costs) if known else None
        lost += sum(cost.lost for cost in costs)
        options = [
            next(option for option in each.options if option.name == name)
            for each, name in zip(self._groups, names, strict=True)
        ]
        taken = self._weights[params] + sum(
            self._bytes(each.group, option, params)
            for each, option in zip(self._groups, options, strict=True)
        )
        budget = self._budget
        fits = (
            (budget.loss is None or lost <= budget.loss)
            and (budget.memory is None or taken <= budget.memory)
            and (not budget.limits_time or (known and (seconds or 0.0) <= self._most_seconds()))
        )
        return Candidate(policy=text, seconds=seconds, lost=lost, bytes=taken, fits=fits)

    def _options_under(self, preset: str) -> list[str]:
        """Return the option of each group under a preset.

        A plan keeps layers in 16 bits that gain nothing in 8.
        """
        other = self._meter.sixteen.name
        return [each.option_under(PRESETS[preset], otherwise=other) for each in self._groups]

    def _presets(self) -> list[Candidate]:
        """Return what the presets cost in this model."""
        names = [option.name for option in (*self._meter.wide, self._meter.sixteen)]
        names += [f"fp8-{scaling}" for scaling in self._rates.scalings()]
        return [
            self._candidate(
                name,
                self._options_under(name),
                lost=0.0 if PRESETS[name].functional in ("fp32", "tf32") else self._outside,
            )
            for name in names
        ]

    def _result(self, chosen: "_Chosen", measured: UpdateError) -> TuneResult:
        names = [
            each.options[choice].name
            for each, choice in zip(self._groups, chosen.point.choices, strict=True)
        ]
        presets = self._presets()
        predicted = self._candidate(
            short_text(chosen.policy), names, lost=chosen.fixed_loss, params=chosen.params
        )
        preset = self._equal_preset(presets, predicted)
        result = TuneResult(
            policy=chosen.policy,
            preset="" if preset is None else preset.policy,
            budget=self._budget,
            hardware=self._rates.hardware.name,
            time_source=self._rates.source,
            groups=tuple(
                self._group_choice(each, name)
                for each, name in zip(self._groups, names, strict=True)
            ),
            predicted=predicted,
            measured=measured,
            presets=tuple(presets),
            front=tuple(self._front_candidates(chosen)),
            notes=self._notes(),
        )
        if preset is None or preset.policy == predicted.policy:
            return result
        return self.with_preset(result, preset.policy)

    def with_preset(self, result: TuneResult, name: str) -> TuneResult:
        """Return a result with a preset in place of its policy."""
        predicted = next(each for each in result.presets if each.policy == name)
        choices = zip(self._groups, self._options_under(name), strict=True)
        return replace(
            result,
            policy=PRESETS[name],
            preset=name,
            predicted=predicted,
            measured=None,
            groups=tuple(self._group_choice(each, option) for each, option in choices),
        )

    def _equal_preset(self, presets: Sequence[Candidate], chosen: Candidate) -> Candidate | None:
        """Return the preset that the policy is, or the fastest one that is as good."""
        same = [preset for preset in presets if preset.policy == chosen.policy]
        if same or chosen.seconds is None or self._budget.loss is None:
            return same[0] if same else None
        known = [each for each in presets if each.fits and each.seconds is not None]
        best = min(known, key=lambda each: (each.seconds or 0.0, each.lost), default=None)
        if best is None or chosen.seconds < NO_GAIN * (best.seconds or 0.0):
            return None
        return best

    def _front_candidates(self, chosen: "_Chosen") -> list[Candidate]:
        front = chosen.front
        if len(front) > MOST_POINTS:
            last = len(front) - 1
            front = [front[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
        return [
            replace(
                self._candidate(
                    ", ".join(
                        f"{each.group.label}: {each.options[choice].name}"
                        for each, choice in zip(self._groups, point.choices, strict=True)
                    ),
                    [
                        each.options[choice].name
                        for each, choice in zip(self._groups, point.choices, strict=True)
                    ],
                    lost=chosen.fixed_loss,
                    params=chosen.params,
                ),
                fits=True,
            )
            for point in front
        ]

    def _group_choice(self, each: MeasuredGroup, name: str) -> GroupChoice:
        return GroupChoice(
            label=each.group.label,
            layers=tuple(layer.name for layer in each.group.layers),
            sensitive=each.group.sensitive,
            options=each.costs,
            chosen=name,
            reason=self._reason(each, name),
        )

    def _reason(self, each: MeasuredGroup, name: str) -> str:
        """Return in a few words why a group has its formats."""
        cost, sixteen = each.cost(name), each.cost(self._meter.sixteen.name)
        before = "sensitive: " if each.group.sensitive else ""
        if cost.by_product and cost.seconds and sixteen.seconds:
            shares = ", ".join(f"{role} {percent(lost)}" for role, lost in cost.by_product.items())
            gain = f"{sixteen.seconds / cost.seconds:.2f} × {sixteen.name}"
            return f"{before}{gain}, loses {percent(cost.lost)} ({shares})"
        narrow = [one for one in each.costs if one.by_product]
        if not narrow and not self._rates.scalings():
            return f"loses {percent(cost.lost)}"
        if not narrow:
            fits = self._meter.fits_fp8(each.group)
            return "fp8 gains no time" if fits else "its shape does not fit fp8"
        whole = max(narrow, key=lambda one: (len(one.by_product), -one.lost))
        text = f"{before}loses {percent(cost.lost)}; {whole.name} would lose {percent(whole.lost)}"
        if self._timed and whole.seconds and sixteen.seconds:
            text += f" and gain {sixteen.seconds / whole.seconds:.2f} ×"
        return text

    def _notes(self) -> tuple[str, ...]:
        name = self._rates.hardware.name
        if not self._timed:
            emulated = self._rates.hardware.support("bf16").how != "native"
            why = "formats are emulated" if emulated else "no rates are known"
            return (
                f"No time can be gained here: {why} on {name}. Write hardware=h200 or another GPU "
                "to tune for it.",
            )
        if not self._rates.scalings() and self._rates.hardware.support("e4m3").how == "native":
            return (
                f"fp8 was left out, because no speeds of {name} were measured. Run `narrowcast "
                "doctor --measure` on it.",
            )
        return ()


class _Chosen(NamedTuple):
    """A policy, its point on the front, and what both depend on."""

    policy: Policy
    point: FrontPoint
    front: list[FrontPoint]
    params: str
    fixed_loss: float
    """What is lost outside the groups."""
