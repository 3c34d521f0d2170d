"""What each component of a decomposed language model does, measured on its text."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.runs.writing import explain_write_error, replace_file
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.loading import Decomposed
from narrowcast.workloads.decompose.settings import EvalTasksSection
from narrowcast.workloads.decompose.targets.language import Language, next_token_losses

BEFORE, AFTER = 20, 8
"""Tokens of an example before and after the position of the largest importance."""
SHOWN_TOKENS = 8
LEAST_OCCURRENCES = 3
"""A token that occurs less often has no mean importance worth ranking."""
MOST_SOURCES = 5
ATTRIBUTED_ROWS = 512
MOST_ROWS, MOST_NUMBERS = 8192, 2**25
"""Positions, and numbers of the widest tensor, in one pass."""
FILE, PAGE = "harvest.json", "harvest.html"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class HarvestSettings:
    """How much text is read, and what is measured."""

    tokens: int = 16384
    """Tokens to read, in windows from everywhere in the text."""
    examples: int = 6
    """Contexts per component, each from another window."""
    effect_windows: int = 2
    """Windows per component to measure its effect on; 0: none."""
    attributed: int = 256
    """Components whose sources are measured, those of the highest mean importance; 0: none."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("examples", 1), ("effect_windows", 0),
                            ("attributed", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.effect_windows > self.examples:
            raise ConfigError(
                f"effect_windows must be at most examples ({self.examples}), got "
                f"{self.effect_windows}. The effect is measured on windows of the examples."
            )


@final
@dataclass(kw_only=True, eq=False)
class _SiteCounts:
    """Sums over positions of a site's importances, and the windows of the largest ones."""

    fired: Tensor
    total: Tensor
    by_token: Tensor
    """(tokens that occur, C)"""
    best: Tensor
    """Largest importance per window, (examples, C), descending."""
    window: Tensor
    position: Tensor

    def add(self, importance: Tensor, slots: Tensor, *, first: int, threshold: float) -> None:
        """Add (windows, length, C); `slots` are the rows of `by_token`, (windows, length)."""
        self.fired += (importance > threshold).sum((0, 1))
        self.total += importance.sum((0, 1), dtype=torch.float64)
        self.by_token.index_add_(0, slots.flatten(), importance.flatten(0, 1))
        largest, position = importance.max(1)
        numbers = torch.arange(first, first + len(largest), device=largest.device)
        every = torch.cat([self.best, largest])
        windows = torch.cat([self.window, numbers[:, None].expand_as(position)])
        positions = torch.cat([self.position, position])
        self.best, order = every.topk(len(self.best), dim=0)
        self.window, self.position = windows.gather(0, order), positions.gather(0, order)


def harvest(
    decomposed: Decomposed,
    settings: HarvestSettings | None = None,
    *,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Return what each component does, as written to `harvest.json`.

    Args:
        decomposed: A decomposed language model.
        settings: How much is measured.
        on_progress: Called with a phase, how much of it is done, and its size.

    Raises:
        ConfigError: The target is a toy.
    """
    subject = decomposed.subject
    if not isinstance(subject, Language):
        raise ConfigError(
            f"harvest needs a decomposed language model, got the toy {subject.name}. The report "
            "shows what the components of a toy are."
        )
    return _Harvest(
        decomposed, subject, settings or HarvestSettings(), on_progress or (lambda *_: None)
    ).run()


def write_harvest(folder: Path, result: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `harvest.json` and a page to browse it; return both paths."""
    text = json.dumps(result, ensure_ascii=False)
    written = {FILE: text, PAGE: harvest_page(text, target=Path(str(result["target"])).name)}
    for name, content in written.items():
        try:
            replace_file(folder / name, content.encode("utf-8", errors="replace"))
        except OSError as error:
            raise ConfigError(
                f"{shown_path(folder / name)} cannot be written: {explain_write_error(error)}."
            ) from error
    return folder / FILE, folder / PAGE


def harvest_page(text: str, *, target: str) -> str:
    """Return the page, with everything it needs inside; `text` is the JSON."""
    room = files("narrowcast.workloads.decompose.report")
    script = (room / "harvest.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (room / "harvest.html").read_text(encoding="utf-8")
    page = page.replace("@HASH@", digest).replace("@TARGET@", escape(target))
    before, after = page.split("@DATA@")
    # No "<" in the data: it could end the script, or begin a comment.
    return before + text.replace("<", "\\u003c") + after.replace("@SCRIPT@", script)


@final
class _Harvest:
    """The windows that are read, and the passes over them."""

    def __init__(
        self, run: Decomposed, subject: Language, settings: HarvestSettings, progress: Progress
    ) -> None:
        self.run_, self.subject, self.settings, self.progress = run, subject, settings, progress
        self.sites = run.model.decomposition.sites
        self.threshold = run.recipe.section(EvalTasksSection).alive
        there, wanted = len(subject.windows), -(-settings.tokens // subject.length)
        count = min(there, wanted)
        numbers = [(2 * each + 1) * there // (2 * count) for each in range(count)]
        self.windows = subject.windows.__getitems__(numbers).to(subject.device)
        self.occurring, self.slots, self.occurrences = self.windows.unique(
            return_inverse=True, return_counts=True
        )
        self.texts = {each: subject.token_text(each) for each in self.occurring.tolist()}

    def run(self) -> dict[str, Any]:
        with torch.no_grad():
            counts, losses = self._count()
            examples = self._examples(counts)
            effects = self._effects(counts, losses)
        sources = self._sources(counts)
        components = [
            self._component(site, number, counts[site], examples, effects, sources)
            for site in range(len(self.sites))
            for number in range(self.sites[site].components)
        ]
        return {
            "target": self.subject.name,
            "positions": self.windows.numel(),
            "length": self.subject.length,
            "alive_threshold": self.threshold,
            "loss": float(losses.double().mean()),
            "settings": asdict(self.settings),
            "sites": self.run_.sites,
            "components": components,
        }

    def _batches(self, widest: int) -> Iterator[slice]:
        size = self._rows(widest) // self.subject.length or 1
        for first in range(0, len(self.windows), size):
            yield slice(first, first + size)

    def _rows(self, widest: int) -> int:
        return min(MOST_ROWS, MOST_NUMBERS // max(widest, self.subject.vocabulary))

    def _importances(self, x: Tensor) -> list[Tensor]:
        return [*self.run_.importances(x).values()]

    def _count(self) -> tuple[list[_SiteCounts], Tensor]:
        """Return the sums of each site, and the loss of the target at each position."""
        device, examples = self.subject.device, min(self.settings.examples, len(self.windows))
        counts = []
        for site in self.sites:
            shape = (examples, site.components)
            counts.append(_SiteCounts(
                fired=torch.zeros(site.components, dtype=torch.int64, device=device),
                total=torch.zeros(site.components, dtype=torch.float64, device=device),
                by_token=torch.zeros(len(self.occurring), site.components, device=device),
                best=torch.full(shape, -1.0, device=device),
                window=torch.zeros(shape, dtype=torch.int64, device=device),
                position=torch.zeros(shape, dtype=torch.int64, device=device),
            ))  # fmt: skip
        losses = []
        for batch in self._batches(sum(site.components for site in self.sites)):
            x = self.windows[batch]
            step = self.run_.model(x)
            losses.append(next_token_losses(step.target, x))
            for each, lower in zip(counts, step.lower, strict=True):
                importance = lower.reshape(*x.shape, -1)
                each.add(importance, self.slots[batch], first=batch.start, threshold=self.threshold)
            self.progress("activations", min(batch.stop, len(self.windows)), len(self.windows))
        return counts, torch.cat(losses)

    def _examples(self, counts: Sequence[_SiteCounts]) -> dict[tuple[int, int], list[Any]]:
        """Return the contexts of the largest importances of each component."""
        wanted: dict[int, list[tuple[int, int, int, int]]] = {}
        for site, each in enumerate(counts):
            best, window, position = (t.tolist() for t in (each.best, each.window, each.position))
            for rank, row in enumerate(best):
                for number, largest in enumerate(row):
                    if largest > self.threshold:
                        place = (site, number, rank, position[rank][number])
                        wanted.setdefault(window[rank][number], []).append(place)
        result: dict[tuple[int, int], list[Any]] = {}
        for batch in self._batches(sum(site.components for site in self.sites)):
            importances = [each.cpu() for each in self._importances(self.windows[batch])]
            for index, tokens in enumerate(self.windows[batch].tolist()):
                for site, number, rank, peak in wanted.get(batch.start + index, ()):
                    part = slice(max(peak - BEFORE, 0), peak + AFTER + 1)
                    strengths = importances[site][index, part, number].tolist()
                    example = {
                        "window": batch.start + index,
                        "position": peak,
                        "tokens": [self.texts[each] for each in tokens[part]],
                        "peak": peak - part.start,
                        "importances": [round(each, 3) for each in strengths],
                    }
                    result.setdefault((site, number), []).append((rank, example))
        return {
            key: [example for _, example in sorted(every, key=lambda pair: pair[0])]
            for key, every in result.items()
        }

    def _effects(
        self, counts: Sequence[_SiteCounts], losses: Tensor
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """Return how the loss changes in the windows of a component when it alone is off."""
        count = min(self.settings.effect_windows, len(self.windows))
        if not count or self.subject.length < 2:
            return {}
        result: dict[tuple[int, int], dict[str, Any]] = {}
        total, done = sum(int((each.fired > 0).sum()) for each in counts), 0
        for site, each in enumerate(counts):
            alive = (each.fired > 0).nonzero().flatten()
            size = max(self._rows(self.sites[site].components) // (self.subject.length * count), 1)
            for numbers in alive.split(size) if len(alive) else ():
                windows = each.window[:count, numbers].T  # (components, windows)
                change = self._loss_when_off(site, numbers, windows) - losses[windows]
                worst, place = change.flatten(1).max(1)
                where = windows.flatten()[
                    torch.arange(len(numbers), device=place.device) * count
                    + place // change.shape[2]
                ]
                following = self.windows[where, place % change.shape[2] + 1]
                for number, mean, most, token in zip(
                    numbers.tolist(), change.mean((1, 2)).tolist(), worst.tolist(),
                    following.tolist(), strict=True,
                ):  # fmt: skip
                    largest = {"token": self.texts[token], "loss_change": most}
                    result[site, number] = {"loss_change": mean, "largest": largest}
                done += len(numbers)
                self.progress("effects", done, total)
        return result

    def _loss_when_off(self, site: int, numbers: Tensor, windows: Tensor) -> Tensor:
        """Return the losses (components, windows, length - 1), each with its component off."""
        x = self.windows[windows.flatten()]
        mask = torch.ones(len(x), x.shape[1], self.sites[site].components, device=x.device)
        off = numbers.repeat_interleave(windows.shape[1])
        mask[torch.arange(len(x), device=x.device), :, off] = 0.0
        masks: list[SiteMask | None] = [None] * len(self.sites)
        masks[site] = SiteMask(mask.flatten(0, 1).unsqueeze(0), 0.0, 1.0)
        output = self.run_.model.decomposition(x, masks=masks).output
        return next_token_losses(output, x).reshape(*windows.shape, -1)

    def _sources(self, counts: Sequence[_SiteCounts]) -> dict[tuple[int, int], list[Any]]:
        """Return which components the activations of the most important components come from.

        The share of a source is the derivative of the activation by the mask of the source, in
        the target's own pass and weighted by importance, relative to the activation's size.
        """
        if not self.settings.attributed or len(self.sites) < 2:
            return {}
        x = self.windows[: max(ATTRIBUTED_ROWS // self.subject.length, 1)]
        decomposition = self.run_.model.decomposition
        importances = [each.flatten(0, 1) for each in self._importances(x)]
        masks = [torch.ones_like(each).unsqueeze(0).requires_grad_() for each in importances]
        passed = decomposition(x, masks=[SiteMask(mask, 0.0, 1.0) for mask in masks], cache="acts")
        ranked = [
            (float(mean), site, number)
            for site, each in enumerate(counts)
            for number, mean in enumerate(each.total.tolist())
            if mean > 0
        ]
        ranked.sort(reverse=True)
        result: dict[tuple[int, int], list[Any]] = {}
        wanted = min(self.settings.attributed, len(ranked))
        for _, site, number in ranked:
            weight, activation = importances[site][:, number], passed.acts[site][0, :, number]
            size = (weight * activation.detach().abs()).sum()
            if not activation.requires_grad or not size > 0:  # no component comes before it
                continue
            value = (weight * activation.detach().sign() * activation).sum() / size
            slopes = torch.autograd.grad(value, masks, retain_graph=True, allow_unused=True)
            every = [
                (share, other, source)
                for other, slope in enumerate(slopes)
                if slope is not None
                for share, source in zip(*_largest(slope.sum((0, 1))), strict=True)
                if share != 0
            ]
            every.sort(key=lambda each: -abs(each[0]))
            result[site, number] = [
                {"name": f"{self.sites[other].name}:{source}", "share": share}
                for share, other, source in every[:MOST_SOURCES]
            ]
            self.progress("attributions", len(result), wanted)
            if len(result) == wanted:
                break
        return result

    def _component(
        self,
        site: int,
        number: int,
        counts: _SiteCounts,
        examples: dict[tuple[int, int], list[Any]],
        effects: dict[tuple[int, int], dict[str, Any]],
        sources: dict[tuple[int, int], list[Any]],
    ) -> dict[str, Any]:
        positions = self.windows.numel()
        key = (site, number)
        return {
            "name": f"{self.sites[site].name}:{number}",
            "site": self.sites[site].name,
            "active": int(counts.fired[number]) / positions,
            "importance": float(counts.total[number]) / positions,
            "effect": effects.get(key),
            "tokens": self._tokens(counts.by_token[:, number]),
            "examples": examples.get(key, []),
            "sources": sources.get(key, []),
        }

    def _tokens(self, sums: Tensor) -> list[dict[str, Any]]:
        """Return the tokens with the highest mean importance."""
        means = (sums / self.occurrences).masked_fill(self.occurrences < LEAST_OCCURRENCES, 0.0)
        best, slots = means.topk(min(SHOWN_TOKENS, len(means)))
        return [
            {
                "token": self.texts[int(self.occurring[slot])],
                "importance": round(mean, 4),
                "count": int(self.occurrences[slot]),
            }
            for mean, slot in zip(best.tolist(), slots.tolist(), strict=True)
            if mean > self.threshold
        ]


def _largest(shares: Tensor) -> tuple[list[float], list[int]]:
    _, order = shares.abs().topk(min(MOST_SOURCES, len(shares)))
    return shares[order].tolist(), order.tolist()
