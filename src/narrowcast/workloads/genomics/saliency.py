"""Which letters around a variant count: each is exchanged for every other one, and the answer read.

In-silico mutagenesis needs no gradient, so that it says what the network in its formats does. The
letter is exchanged in both sequences of a pair, so that the variant stays what it is; at the
variant itself, in the alternative alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from narrowcast.workloads.genomics.data.examples import Batch, Examples, Ragged
from narrowcast.workloads.genomics.results import Judged
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer
from narrowcast.workloads.genomics.targets import Labels, OneClass, Predicted, Target, Value

VARIANTS = 4
"""Shown of a set."""
REACH = 20
"""Letters on either side of a variant."""
MOST_LETTERS = 2**20
"""That the network reads for it, all together; about what judging a thousand windows takes."""
MOST_CHANGED = 8
"""Letters of a variant; more are an insertion or a deletion, behind which nothing is aligned."""

Predict: TypeAlias = Callable[[Batch], Tensor]
"""What a network makes of a batch, in fp32."""


def salient_variants(
    predict: Predict, examples: Examples, judged: Judged, tokenizer: Tokenizer, target: Target
) -> list[dict[str, Any]]:
    """Return for a few variants how much each letter around them adds to what was found.

    `adds` is the score less the mean of the scores with other letters there; the score is the value
    that is predicted, or the log-odds of the class that was found.
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
    """Return rows in the order they are worth a look: the surest of each class first."""
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
    """Return the letters around a variant with what each adds; None where it is no exchange."""
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
    """Return the score of each pair: a value, or the log-odds of what the first is taken for."""
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
