"""Scores of variants: what a base finds likelier, or what a run that was trained on them says.

With a base, the log-likelihood of the window with the alternative less that of the reference, in
nats: below 0 the alternative is what such genomes seldom have. Of DNA it is the mean of both
strands. The first token is given, and unknown letters do not count. Where a contig ends within the
window, the longer of both loses letters far from the variant, so that as many count in each.

With a trained run, its value, or the mean number of its class between 0, surely the first, and 1,
surely the last: of two classes the chance of the second.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.inference.finished import Finished
from narrowcast.workloads.genomics.inference.predict import batched, predictions
from narrowcast.workloads.genomics.inference.writing import rounded
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.operations import reverse_complement
from narrowcast.workloads.genomics.sequences.readers.vcf import Variant
from narrowcast.workloads.genomics.sequences.variants import VariantPair
from narrowcast.workloads.genomics.targets import Labels, NextToken, OneClass


class Scored(NamedTuple):
    """A variant, its score, and what else the run says of it."""

    variant: Variant
    score: float
    more: dict[str, Any]


def require_scores(run: Finished) -> None:
    """Refuse a run that has nothing to say of variants."""
    if run.info.alphabet == "protein":
        raise ConfigError(
            f"{run.name} was trained on proteins, but variants are DNA. Use another run."
        )
    if isinstance(run.target, NextToken):
        return
    if not run.info.pairs:
        raise ConfigError(
            f"{run.name} was trained for {run.info.task} on single sequences, which gives no "
            "variant score. Use a run of `narrowcast genomics pretrain`, or one trained on pairs."
        )
    if isinstance(run.target, Labels):
        raise ConfigError(
            f"{run.name} predicts several labels per variant, which gives no single score. Use "
            "`narrowcast genomics predict`."
        )


def scores(run: Finished, pairs: Iterable[VariantPair], *, batch_size: int) -> Iterator[Scored]:
    """Yield a score for each variant, in order."""
    for batch in batched(pairs, batch_size):
        if isinstance(run.target, NextToken):
            texts = [list(each) for each in zip(*map(evened, batch), strict=True)]
            places = [pair.variant.location for pair in batch]
            before, after = (log_likelihoods(run, each, places) for each in texts)
            for pair, ratio in zip(batch, after - before, strict=True):
                yield Scored(pair.variant, float(ratio), {})
        else:
            yield from _judged(run, batch)


def evened(pair: VariantPair) -> tuple[str, str]:
    """Return both windows with as many known letters, where there are enough around the variant.

    Within a contig they have: an insertion pushes letters out of the window. At its end there is
    nothing to push out, and every letter more would cost as much as an unlikely one.
    """
    texts = [pair.reference, pair.alternative]
    known = [len(text) - text.count(DNA.unknown) for text in texts]
    longer, more = int(known[1] > known[0]), abs(known[1] - known[0])
    allele = len((pair.variant.reference, pair.variant.alternative)[longer])
    letters = list(texts[longer])
    there = [at for at, letter in enumerate(letters) if letter != DNA.unknown]
    left = [at for at in there if at < pair.at]
    right = [at for at in there if at >= pair.at + allele][::-1]
    for at in max(left, right, key=len)[:more]:
        letters[at] = DNA.unknown
    texts[longer] = "".join(letters)
    return texts[0], texts[1]


def log_likelihoods(
    run: Finished, sequences: Sequence[str], places: Sequence[str]
) -> npt.NDArray[np.float64]:
    """Return the log-likelihood of sequences in nats; of DNA, the mean of both strands."""
    strands = [sequences]
    if run.info.alphabet == "dna":
        strands.append([reverse_complement(text) for text in sequences])
    of_each = np.stack([_one_strand(run, texts, places) for texts in strands])
    mean: npt.NDArray[np.float64] = of_each.mean(0)
    return mean


def _one_strand(
    run: Finished, sequences: Sequence[str], places: Sequence[str]
) -> npt.NDArray[np.float64]:
    rows = [
        Row(sequence=text, location=location)
        for text, location in zip(sequences, places, strict=True)
    ]
    answers, tokens = run.answers(rows)
    out = np.empty(len(rows))
    for at, ids in enumerate(tokens):
        chances = answers[at, : len(ids) - 1].double().log_softmax(-1)
        following = torch.from_numpy(ids[1:])
        likelihood = chances.gather(1, following[:, None])[:, 0]
        out[at] = likelihood[following != run.tokenizer.unknown_id].sum().item()
    return out


def _judged(run: Finished, batch: Sequence[VariantPair]) -> Iterator[Scored]:
    rows = [
        Row(sequence=pair.reference, alternative=pair.alternative, location=pair.variant.location)
        for pair in batch
    ]
    result = predictions(run, rows, batch_size=len(rows))
    for pair, prediction in zip(batch, result, strict=True):
        if not isinstance(run.target, OneClass):
            yield Scored(pair.variant, float(prediction.values[0]), {})
            continue
        ranks = np.linspace(0, 1, len(run.target.classes))
        best = run.target.classes[int(prediction.values.argmax())]
        numbers = [rounded(float(each)) for each in prediction.values]
        chances = dict(zip(run.target.classes, numbers, strict=True))
        score = float(prediction.values @ ranks)
        yield Scored(pair.variant, score, {"class": best, "chance": chances})


def score_row(scored: Scored) -> dict[str, Any]:
    """Return a row of the table of scores."""
    variant = scored.variant
    return {
        "chrom": variant.chrom,
        "pos": variant.position,
        "ref": variant.reference,
        "alt": variant.alternative,
        "score": rounded(scored.score),
        **scored.more,
    }
