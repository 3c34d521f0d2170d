"""Baselines of a classifier: logistic or ridge regression of k-mers, and of letters by position.

They also tell whether labels depend on the strand, and can predict together with the network.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from narrowcast.workloads.genomics.data.examples import Examples
from narrowcast.workloads.genomics.models.combined import Mix
from narrowcast.workloads.genomics.models.linear import Features, Linear
from narrowcast.workloads.genomics.targets import Labels, OneClass, Predicted, Value

Matrix: TypeAlias = Any
"""A sparse matrix of scipy."""
PerSequence: TypeAlias = OneClass | Labels | Value

MOST_LETTERS = 10_000_000
"""Training letters that a baseline is fitted on."""
MOST_LABELS = 64
"""Labels per sequence with a baseline; each is a fit of its own."""
FEWEST_JUDGED = 50
"""Validation sequences that decide on the strands and on the weight of the baseline."""
SMALLEST_VARIANCE = 1e-3
"""Rarer k-mers are not scaled up further."""
KMER_STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
POSITION_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Inverse of the L2 penalty of a logistic regression."""
PENALTIES = (1000.0, 100.0, 10.0, 1.0)
"""L2 penalty of a ridge regression."""
READ_ROWS = 1024
MIXES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Weights that are tried for the network and for the linear model."""
RESAMPLES = 300
"""Bootstrap samples of an interval."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline:
    """A fitted linear model, and its loss on the validation data."""

    linear: Linear
    loss: float

    @property
    def name(self) -> str:
        return self.linear.features.name


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Baselines:
    """The best linear model of each kind."""

    kmers: Baseline
    positions: Baseline | None
    both_strands: bool
    """Whether k-mers predict better if both strands count the same."""
    aligned: bool
    """Whether letters by position predict better than k-mers."""

    def __iter__(self) -> Iterator[Baseline]:
        yield from (each for each in (self.kmers, self.positions) if each is not None)

    @property
    def best(self) -> Baseline:
        """The one with the lowest validation loss."""
        return self.positions if self.aligned and self.positions is not None else self.kmers

    def to(self, device: torch.device) -> "Baselines":
        """Move the linear models to a device."""
        for each in self:
            each.linear.to(device)
        return self

    def strongest_kmers(self, count: int) -> list[list[int]]:
        """Return the longest k-mers with the largest weights, as letter numbers."""
        linear = self.kmers.linear
        k, letters = linear.features.k, linear.features.letters
        weights = linear.weight[:-1][-(letters**k) :].abs().amax(1)
        codes = weights.topk(min(count, len(weights))).indices
        places = letters ** torch.arange(k - 1, -1, -1)
        matches: list[list[int]] = (codes[:, None] // places % letters).tolist()
        return matches


def fit_baselines(
    train: Examples,
    validation: Examples,
    target: PerSequence,
    *,
    letters: int,
    first: int,
    complement: Sequence[int] = (),
) -> Baselines:
    """Fit every kind of linear model; the validation data selects penalty and longest k-mer.

    `complement` lists the complement of each letter, for sequences that have two strands.
    """
    train = _sample(train)
    longest = (4, 6) if letters <= 4 else (2, 3)
    common = Features(letters=letters, first=first)
    one = [_fit(replace(common, k=k), train, validation, target) for k in longest]
    both = list[Baseline]()
    if complement:
        features = replace(common, k=longest[-1], complement=tuple(complement))
        both = [_fit(features, train, validation, target)]
    positions = None
    if length := equal_length(train):
        positions = _fit(replace(common, length=length), train, validation, target)
    single = min(one, key=lambda each: each.loss)
    aligned = positions is not None and positions.loss < min(e.loss for e in (*one, *both))
    kmers = min((*one, *both), key=lambda each: each.loss)
    symmetric = bool(both) and both[0].loss < single.loss and len(validation) >= FEWEST_JUDGED
    return Baselines(
        kmers=kmers, positions=positions, both_strands=symmetric and not aligned, aligned=aligned
    )


def equal_length(examples: Examples) -> int:
    """Return the length of all sequences; 0 if they differ."""
    lengths = np.diff(examples.tokens.ends, prepend=0)
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0


def _sample(train: Examples) -> Examples:
    """Return a random sample of the rows if they have more than MOST_LETTERS."""
    rows = int(np.searchsorted(train.tokens.ends, MOST_LETTERS, side="right"))
    if rows >= len(train):
        return train
    picked = np.random.default_rng(0).permutation(len(train))[: max(rows, 1)]
    return train.rows(np.sort(picked))


def _fit(
    features: Features, train: Examples, validation: Examples, target: PerSequence
) -> Baseline:
    """Return the model with the best penalty."""
    counts, judged = _counts(features, train), _counts(features, validation)
    scale = np.ones(features.size, dtype=np.float32)
    if features.k:
        mean = np.asarray(counts.mean(0)).ravel()
        variance = np.asarray(counts.multiply(counts).mean(0)).ravel() - mean**2
        scale = (1 / np.sqrt(np.maximum(variance, SMALLEST_VARIANCE))).astype(np.float32)
    scaled = counts @ sparse.diags(scale)
    assert isinstance(train.targets, np.ndarray)
    assert isinstance(validation.targets, np.ndarray)
    truth = {"targets": torch.from_numpy(validation.targets)}
    plain = replace(target, smoothing=0.0) if isinstance(target, OneClass) else target
    best: tuple[float, npt.NDArray[Any], npt.NDArray[Any]] | None = None
    for weight, bias in _candidates(scaled, train.targets, target, by_kmer=bool(features.k)):
        weight = weight * scale[:, None]
        outputs = torch.from_numpy(np.asarray(judged @ weight + bias, dtype=np.float32))
        loss = float(plain.loss(outputs, truth))
        if best is None or loss < best[0]:
            best = loss, weight, bias
    assert best is not None
    linear = Linear(features, target.outputs())
    linear.weight[:-1] = torch.from_numpy(best[1].astype(np.float32))
    linear.bias.copy_(torch.from_numpy(best[2].astype(np.float32)))
    return Baseline(linear=linear, loss=best[0])


def _counts(features: Features, examples: Examples) -> Matrix:
    """Return how often each row has each feature."""
    parts = []
    for batch in examples.batches(READ_ROWS):
        indices = features.indices(batch["tokens"])
        row = torch.arange(len(indices))[:, None].expand_as(indices)
        known = indices < features.size
        place = row[known].numpy(), indices[known].numpy()
        ones = np.ones(len(place[0]), dtype=np.float32)
        parts.append(sparse.csr_matrix((ones, place), shape=(len(indices), features.size)))
    return sparse.vstack(parts).tocsr()


def _candidates(
    counts: Matrix, targets: npt.NDArray[Any], target: PerSequence, *, by_kmer: bool
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield weights, (features, outputs), and biases, one per strength of the penalty."""
    if isinstance(target, Value):
        from sklearn.linear_model import Ridge  # takes a while to import

        standard = (targets.astype(np.float64) - target.centre) / target.spread
        for penalty in PENALTIES:
            ridge = Ridge(alpha=penalty).fit(counts, standard)
            yield ridge.coef_[:, None], np.array([ridge.intercept_])
        return
    outputs = target.outputs()
    for strength in KMER_STRENGTHS if by_kmer else POSITION_STRENGTHS:
        if isinstance(target, OneClass):
            yield _logistic(counts, targets, strength, outputs)
            continue
        fits = [_logistic(counts, targets[:, at] > 0, strength, 2) for at in range(outputs)]
        weights = [weight[:, 1] - weight[:, 0] for weight, _ in fits]
        yield np.stack(weights, 1), np.array([bias[1] - bias[0] for _, bias in fits])


def _logistic(
    counts: Matrix, classes: npt.NDArray[Any], strength: float, outputs: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return weights and biases of all classes; one that does not occur is very unlikely."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((counts.shape[1], outputs)), np.full(outputs, -15.0)
    present = np.unique(classes.astype(np.int64))
    if len(present) == 1:
        bias[present] = 0.0
        return weight, bias
    model = LogisticRegression(C=strength, max_iter=300, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of a penalty that is too weak
        model.fit(counts, classes)
    if len(present) == 2:
        weight[:, present[1]], bias[present] = model.coef_[0], (0.0, model.intercept_[0])
    else:
        weight[:, present], bias[present] = model.coef_.T, model.intercept_
    return weight, bias


def choose_mix(outputs: Tensor, linear: Tensor, truth: Tensor, target: PerSequence) -> Mix:
    """Return the weights of network and linear model with the lowest loss on validation data."""
    if len(truth) < FEWEST_JUDGED:
        return 0.5, 0.5
    plain = replace(target, smoothing=0.0) if isinstance(target, OneClass) else target
    pairs = [(ours, its) for ours in MIXES for its in MIXES if ours + its]
    batch = {"targets": truth}
    losses = [float(plain.loss(ours * outputs + its * linear, batch)) for ours, its in pairs]
    return pairs[int(np.nanargmin(losses))] if np.isfinite(losses).any() else (1.0, 0.0)


def compare(
    truth: Predicted, ours: Predicted, theirs: Predicted, target: PerSequence
) -> dict[str, Any]:
    """Return both headline metrics, their difference, and its 95 % bootstrap interval over rows."""
    drawn = np.random.default_rng(0).integers(len(truth), size=(RESAMPLES, len(truth)))
    gains = [
        target.headline(truth[rows], ours[rows]) - target.headline(truth[rows], theirs[rows])
        for rows in drawn
    ]
    low, high = np.quantile(gains, (0.025, 0.975))
    mine, its = target.headline(truth, ours), target.headline(truth, theirs)
    said = "beats" if low > 0 else "is worse than" if high < 0 else "does not beat"
    return {
        "value": mine, "baseline": its, "gain": mine - its, "low": float(low), "high": float(high),
        "verdict": said,
    }  # fmt: skip
