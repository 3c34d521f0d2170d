"""Results of a run for its report: metrics, curves, mutagenesis and samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from sklearn import metrics as sk
from torch import Tensor

from narrowcast.precision.dtensor import gathered_root
from narrowcast.runs import RunFolder
from narrowcast.workloads.genomics.baselines import PerSequence, choose_mix, compare
from narrowcast.workloads.genomics.data.examples import Batch, Examples, Ragged
from narrowcast.workloads.genomics.models.combined import Mix
from narrowcast.workloads.genomics.models.model import Network, generate
from narrowcast.workloads.genomics.sequences.operations import gc, kmer_counts
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.targets import (
    EveryLetter,
    Labels,
    OneClass,
    Predicted,
    Target,
    Value,
)

if TYPE_CHECKING:
    from narrowcast.workloads.genomics.build import Parts

FILE = "judged.json"
CURVES, CURVE_POINTS = 8, 200
"""Maximum curves in a figure, and points per curve."""
SHOWN_CLASSES = 20
"""Maximum classes of a confusion matrix; rarer ones share a row."""
TRACKS, SHOWN_LETTERS = 3, 2000
"""Rows drawn as tracks, and letters of each."""
SHOWN_POINTS = 2000
"""Maximum points of a scatter plot."""
OTHERS = "others"
VARIANTS = 4
"""Variants shown per set."""
REACH = 20
"""Letters on either side of a variant."""
MOST_LETTERS = 2**20
"""Letters the network reads for mutagenesis, about as many as an evaluation of 1,000 windows."""
MOST_CHANGED = 8
"""Maximum substituted letters; more mean an insertion or deletion, where nothing is aligned."""
Predict: TypeAlias = Callable[[Batch], Tensor]
"""Returns the outputs of a batch in fp32."""
SAMPLES, PROMPT_TOKENS, SAMPLE_TOKENS = 8, 16, 192
"""Number of samples, tokens of the prompts, and tokens to generate."""
SHOWN_SAMPLES = 4
"""Samples that the report shows; all count in the spectrum."""
MOST_KMERS = 64
"""Maximum k-mers of a spectrum: three bases, one residue."""
MOST_HELD_OUT = 2**22
"""Held-out letters that are counted."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """Predictions of examples with their metrics."""

    measured: dict[str, float]
    truth: list[Predicted]
    predicted: list[Predicted]
    names: Sequence[str] = ()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Classified:
    """Predictions of a classifier, of its network alone, and of its baselines."""

    judged: Judged
    network: Predicted
    baselines: dict[str, Predicted]
    mix: Mix

    def table(self, target: PerSequence, best: str) -> dict[str, Any]:
        """Return the metrics of each, and how the predictions compare with the best baseline."""
        truth, ours = np.stack(self.judged.truth), np.stack(self.judged.predicted)
        combined = self.mix != (1.0, 0.0)
        rows = {"network and linear model" if combined else "network": self.judged.measured}
        others = {"network alone": self.network} if combined else {}
        for name, predicted in {**others, **self.baselines}.items():
            rows[name] = target.measured(list(truth), list(predicted))
        if best not in self.baselines:
            return {}
        message = compare(truth, ours, self.baselines[best], target)
        metric = target.metrics[0].name
        return {"comparison": {"rows": rows, "metric": metric, "best": best, **message}}


def classified(
    network: Tensor,
    linear: Mapping[str, Tensor],
    examples: Examples,
    target: PerSequence,
    *,
    combined: str,
    mix: Mix | None,
) -> Classified:
    """Return predictions from the outputs of the network and of the linear models."""
    assert isinstance(examples.targets, np.ndarray)
    truth, outputs = torch.from_numpy(examples.targets), network
    if combined:
        mix = mix or choose_mix(network, linear[combined], truth, target)
        outputs = mix[0] * network + mix[1] * linear[combined]
    predicted = target.predicted(outputs, {})
    real = target.truth({"targets": truth})
    loss = float(target.loss(outputs, {"targets": truth}))
    return Classified(
        judged=Judged(
            measured=target.measured(real, predicted) | {"loss": loss},
            truth=real,
            predicted=predicted,
            names=examples.names,
        ),
        network=np.stack(target.predicted(network, {})),
        baselines={name: np.stack(target.predicted(each, {})) for name, each in linear.items()},
        mix=mix or (1.0, 0.0),
    )


def verdicts(sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return how each evaluated set compares with its baseline, for the terminal."""
    compared = {name: each["comparison"] for name, each in sets.items() if "comparison" in each}
    return [f"{name}: {verdict(comparison)}" for name, comparison in compared.items()]


def verdict(comparison: Mapping[str, Any]) -> str:
    """Return a comparison with the baseline as a sentence."""
    value, its, gain, low, high = (
        float(comparison[key]) for key in ("value", "baseline", "gain", "low", "high")
    )
    return (
        f"{comparison['verdict']} the baseline ({comparison['best']}): {comparison['metric']} "
        f"{value:.4f} against {its:.4f}, difference {gain:+.4f} "
        f"(95 % interval {low:+.4f} to {high:+.4f})"
    )


def write_judged(
    folder: Path,
    parts: "Parts",
    judged: Mapping[str, Judged],
    pictures: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the data of the report; `pictures` is what needed the network, by set."""
    info = {
        name: {**_result_data(parts, each), **pictures.get(name, {})}
        for name, each in judged.items()
    }
    RunFolder(folder).write_json(FILE, info)


def _result_data(parts: "Parts", judged: Judged) -> dict[str, Any]:
    message: dict[str, Any] = {"measured": judged.measured, "rows": len(judged.truth)}
    target = parts.target
    if isinstance(target, OneClass):
        truth, chances = np.array(judged.truth), np.stack(judged.predicted)
        message["confusion"] = _confusion(target.classes, truth, chances.argmax(1))
        message["curves"] = _curves(
            {name: (truth == at, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, Labels):
        truth, chances = np.stack(judged.truth), np.stack(judged.predicted)
        message["curves"] = _curves(
            {name: (truth[:, at] > 0, chances[:, at]) for at, name in enumerate(target.classes)}
        )
    elif isinstance(target, EveryLetter):
        truth, result = np.concatenate(judged.truth), np.concatenate(judged.predicted)
        message["confusion"] = _confusion(target.classes, truth, result)
        message["tracks"] = _tracks(target.classes, judged)
        message["unit"] = parts.unit
    elif isinstance(target, Value):
        picked = np.linspace(0, len(judged.truth) - 1, min(SHOWN_POINTS, len(judged.truth)))
        message["points"] = [
            [_digits(judged.truth[at]), _digits(judged.predicted[at])] for at in picked.astype(int)
        ]
    return message


def _confusion(classes: tuple[str, ...], truth: Predicted, chosen: Predicted) -> dict[str, Any]:
    """Return the confusion matrix of the classes that occur."""
    counts = np.bincount(np.concatenate([truth, chosen]), minlength=len(classes))
    present = np.flatnonzero(counts)
    if len(present) > SHOWN_CLASSES:
        frequent = np.argsort(-counts, kind="stable")[: SHOWN_CLASSES - 1]
        numbers = np.full(len(classes), SHOWN_CLASSES - 1)
        present = np.sort(frequent)
    else:
        numbers = np.zeros(len(classes), dtype=np.int64)
    numbers[present] = np.arange(len(present))
    rare = len(np.flatnonzero(counts)) - len(present)
    names = [classes[at] for at in present] + ([f"{rare:,} {OTHERS}"] if rare else [])
    # Not scikit-learn's, which warns of a single class.
    pairs = numbers[truth] * len(names) + numbers[chosen]
    table = np.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), -1)
    return {"classes": names, "counts": table.tolist()}


def _curves(of: Mapping[str, tuple[Predicted, Predicted]]) -> dict[str, Any]:
    """Return thinned precision-recall curves of frequent classes, and the others' mean area."""
    there = {name: pair for name, pair in of.items() if 0 < pair[0].sum() < len(pair[0])}
    frequent = set(sorted(there, key=lambda name: -int(there[name][0].sum()))[:CURVES])
    curves, rest = dict[str, Any](), list[float]()
    for name, (truth, score) in there.items():
        area = float(sk.average_precision_score(truth, score))
        if name not in frequent:
            rest.append(area)
            continue
        precision, recall, _ = sk.precision_recall_curve(truth, score)
        picked = np.linspace(0, len(recall) - 1, min(CURVE_POINTS, len(recall))).astype(int)
        curves[name] = {
            "area": area,
            "share": float(truth.mean()),
            "points": [
                [round(float(recall[at]), 4), round(float(precision[at]), 4)] for at in picked
            ],
        }
    more = {"classes": len(rest), "area": float(np.mean(rest))} if rest else None
    return {"classes": curves, "others": more}


def _tracks(classes: tuple[str, ...], judged: Judged) -> dict[str, Any]:
    """Return true and predicted classes along the rows with the most classes."""
    variety = np.array([len(np.unique(row)) for row in judged.truth])
    rows = np.sort(np.argsort(-variety, kind="stable")[:TRACKS])
    return {
        "classes": list(classes),
        "rows": [
            {
                "name": judged.names[row] if judged.names else "",
                "truth": _runs(judged.truth[row][:SHOWN_LETTERS]),
                "found": _runs(judged.predicted[row][:SHOWN_LETTERS]),
            }
            for row in rows
        ],
    }


def _runs(numbers: Predicted) -> list[list[int]]:
    """Return runs of equal numbers as [class, letters]."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    lengths = np.diff(starts, append=len(numbers))
    return [[int(numbers[at]), int(n)] for at, n in zip(starts, lengths, strict=True)]


def _digits(number: Any) -> float:
    return float(f"{float(number):.6g}")


def salient_variants(
    predict: Predict, examples: Examples, judged: Judged, tokenizer: Tokenizer, target: Target
) -> list[dict[str, Any]]:
    """Return in-silico mutagenesis of a few variants; at the variant, of the alternative alone.

    `adds` is the score minus its mean over the substitutions.
    """
    if examples.alternatives is None or not isinstance(target, OneClass | Labels | Value):
        return []
    shown = []
    for row in _chosen(examples, judged, target):
        pair = [
            tokenizer.decode(part[row].astype(np.int64))
            for part in (examples.tokens, examples.alternatives)
        ]
        if info := _tried(predict, pair, tokenizer, target, padding=examples.padding):
            name = examples.names[row] if examples.names else ""
            shown.append({"name": name, **_answer(judged, row, target), **info})
        if len(shown) == VARIANTS:
            break
    return shown


def _chosen(examples: Examples, judged: Judged, target: Target) -> list[int]:
    """Return rows, the most confident of each class first."""
    if isinstance(target, Value):
        return [int(at) for at in np.argsort(-np.array(judged.predicted), kind="stable")]
    chances = np.stack(judged.predicted)
    surest = np.argsort(-chances.max(1), kind="stable")
    seen: dict[int, int] = {}
    turns = list[tuple[int, int, int]]()
    for at in surest:
        kind = int(chances[at].argmax())
        turns.append((seen.get(kind, 0), len(turns), int(at)))
        seen[kind] = seen.get(kind, 0) + 1
    return [at for *_, at in sorted(turns)]


def _answer(judged: Judged, row: int, target: Target) -> dict[str, Any]:
    truth, result = judged.truth[row], judged.predicted[row]
    if isinstance(target, Value):
        return {"truth": f"{float(truth):.4g}", "found": f"{float(result):.4g}"}
    assert isinstance(target, OneClass | Labels)
    best = int(result.argmax())
    if isinstance(target, Labels):
        names = [name for name, has in zip(target.classes, truth, strict=True) if has > 0]
        said = ", ".join(names) or "none"
    else:
        said = target.classes[int(truth)]
    return {"truth": said, "found": target.classes[best], "chance": round(float(result[best]), 4)}


def _tried(
    predict: Predict, pair: Sequence[str], tokenizer: Tokenizer, target: Target, *, padding: int
) -> dict[str, Any] | None:
    """Return the mutagenesis of one pair; None if it is not a substitution."""
    reference, alternative = pair
    changed = [at for at, (a, b) in enumerate(zip(reference, alternative, strict=False)) if a != b]
    if len(reference) != len(alternative) or not 0 < len(changed) <= MOST_CHANGED:
        return None
    letters = tokenizer.alphabet.letters
    trials = MOST_LETTERS // (2 * VARIANTS * (len(letters) - 1) * len(reference))
    reach = min(REACH, (trials - (changed[-1] - changed[0] + 1)) // 2)
    if reach < 0:
        return None
    first, last = max(changed[0] - reach, 0), min(changed[-1] + reach, len(reference) - 1)
    pairs, places = [(reference, alternative)], list[int]()
    for at in range(first, last + 1):
        for letter in letters.replace(alternative[at], ""):
            other = _exchanged(alternative, at, letter)
            pairs.append((reference if at in changed else _exchanged(reference, at, letter), other))
            places.append(at)
    scores = _scores(predict, pairs, tokenizer, target, padding=padding)
    if not np.isfinite(scores).all():
        return None
    means = [scores[1:][np.array(places) == at].mean() for at in range(first, last + 1)]
    return {
        "start": first,
        "reference": reference[first : last + 1],
        "alternative": alternative[first : last + 1],
        "adds": [round(float(scores[0] - mean), 5) for mean in means],
    }


def _exchanged(sequence: str, at: int, letter: str) -> str:
    return f"{sequence[:at]}{letter}{sequence[at + 1 :]}"


def _scores(
    predict: Predict,
    pairs: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    target: Target,
    *,
    padding: int,
) -> Predicted:
    """Return scores: values, or log-odds of the class predicted for the first pair."""
    examples = Examples(
        tokens=Ragged.joined([tokenizer.encode(one) for one, _ in pairs], np.int64),
        alternatives=Ragged.joined([tokenizer.encode(two) for _, two in pairs], np.int64),
        targets=None,
        padding=padding,
    )
    size = max(1, 2**15 // examples.common_width)
    matched = torch.cat([predict(batch).double().cpu() for batch in examples.batches(size)])
    if isinstance(target, Value):
        scores = matched[:, 0] * target.spread + target.centre
    elif isinstance(target, Labels):
        scores = matched[:, matched[0].argmax()]
    else:
        best = int(matched[0].argmax())
        rest = torch.cat([matched[:, :best], matched[:, best + 1 :]], dim=1)
        scores = matched[:, best] - rest.logsumexp(1)
    out: Predicted = scores.numpy()
    return out


def written_samples(
    network: Network, held_out: Examples, tokenizer: Tokenizer, *, seed: int
) -> dict[str, Any] | None:
    """Return samples that continue held-out sequences and k-mer spectra; None if all are short."""
    lengths = np.diff(held_out.tokens.ends, prepend=0)
    rows = np.flatnonzero(lengths > PROMPT_TOKENS)[:SAMPLES]
    if not len(rows):
        return None
    device = next(network.parameters()).device
    prompts = np.stack([held_out.tokens[int(row)][:PROMPT_TOKENS].astype(np.int64) for row in rows])
    with gathered_root(network):
        tokens = generate(
            network.backbone,
            network.head,
            torch.from_numpy(prompts).to(device),
            count=SAMPLE_TOKENS,
            allowed=torch.tensor(ids_of_letters(tokenizer), device=device),
            generator=torch.Generator(device).manual_seed(seed),
        )
    texts = [tokenizer.decode(row) for row in tokens.cpu().numpy()]
    begun = [tokenizer.decode(row) for row in prompts]
    own = [text[len(prompt) :] for text, prompt in zip(texts, begun, strict=True)]
    real = list(_texts(held_out, tokenizer))
    names = [held_out.names[row] if held_out.names else "" for row in rows[:SHOWN_SAMPLES]]
    info: dict[str, Any] = {
        "samples": [
            {"name": name, "prompt": prompt, "written": text}
            for name, prompt, text in zip(names, begun, own, strict=False)
        ],
        "spectrum": _spectrum(own, real, tokenizer),
    }
    if tokenizer.alphabet.complement is not None:
        info["gc"] = {"written": gc("".join(own)), "held_out": gc("".join(real))}
    return info


def ids_of_letters(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are letters."""
    return [at for at, token in enumerate(tokenizer.tokens) if not token.startswith("[")]


def _texts(examples: Examples, tokenizer: Tokenizer) -> Iterable[str]:
    """Yield sequences up to MOST_HELD_OUT letters."""
    letters = 0
    for row in range(len(examples)):
        text = tokenizer.decode(examples.tokens[row].astype(np.int64))
        yield text
        letters += len(text)
        if letters > MOST_HELD_OUT:
            return


def _spectrum(own: list[str], real: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return k-mer frequencies of samples and of held-out sequences."""
    alphabet = tokenizer.alphabet
    k = next(k for k in (3, 2, 1) if k == 1 or len(alphabet.letters) ** k <= MOST_KMERS)
    names = ["".join(letters) for letters in product(sorted(alphabet.letters), repeat=k)]
    shares = {}
    for key, texts in (("written", own), ("held_out", real)):
        counts = Counter[str]()
        for text in texts:
            counts.update(kmer_counts(text, k, alphabet))
        total = max(1, counts.total())
        shares[key] = [round(counts[name] / total, 6) for name in names]
    return {"k": k, "kmers": names, **shares}
