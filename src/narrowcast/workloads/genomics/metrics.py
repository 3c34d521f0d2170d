"""Metrics of the tasks, by scikit-learn and scipy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from sklearn import metrics as sk

from narrowcast.runs import Metric

Array = npt.NDArray[Any]

LOSS = Metric(name="loss")
MCC = Metric(name="mcc", better="higher", text=".4f")
ACCURACY = Metric(name="accuracy", better="higher", text=".2%")
F1 = Metric(name="f1", better="higher", text=".4f")
AUROC = Metric(name="auroc", better="higher", text=".4f")
AUPRC = Metric(name="auprc", better="higher", text=".4f")
SPEARMAN = Metric(name="spearman", better="higher", text=".4f")
PEARSON = Metric(name="pearson", better="higher", text=".4f")
RMSE = Metric(name="rmse")
PERPLEXITY = Metric(name="perplexity")
LETTER_ACCURACY = Metric(name="letter_accuracy", better="higher", text=".2%")
SEQUENCE_ACCURACY = Metric(name="sequence_accuracy", better="higher", text=".2%")

OF_CLASSES = (MCC, ACCURACY, F1, AUROC, AUPRC, LOSS)
OF_LETTERS = (MCC, ACCURACY, F1, SEQUENCE_ACCURACY, LOSS)
OF_LABELS = (AUPRC, F1, AUROC, LOSS)
OF_VALUES = (SPEARMAN, PEARSON, RMSE, LOSS)
OF_NEXT = (LOSS, PERPLEXITY, LETTER_ACCURACY)


def of_classes(truth: Array, chances: Array) -> dict[str, float]:
    """Return metrics of (rows, classes) probabilities; F1 and areas are means over classes."""
    if not np.isfinite(chances).all():
        return _nan_metrics(OF_CLASSES)
    chosen = chances.argmax(1)
    present = [each for each in np.unique(truth).tolist() if (truth != each).any()]
    if chances.shape[1] == 2 and len(present) == 2:
        present = [1]
    return {
        "mcc": mcc(truth, chosen),
        "accuracy": float((chosen == truth).mean()),
        "f1": float(sk.f1_score(truth, chosen, average="macro", zero_division=0)),
        **areas([(truth == each, chances[:, each]) for each in present]),
    }


def of_labels(truth: Array, chances: Array) -> dict[str, float]:
    """Return multi-label metrics of (rows, labels) probabilities."""
    if not np.isfinite(chances).all():
        return _nan_metrics(OF_LABELS)
    present = [at for at in range(truth.shape[1]) if 0 < truth[:, at].sum() < len(truth)]
    return {
        "f1": _f1_of_labels(truth > 0, chances > 0.5),
        **areas([(truth[:, at] > 0, chances[:, at]) for at in present]),
    }


def of_values(truth: Array, predicted: Array) -> dict[str, float]:
    """Return regression metrics; the correlation with a constant is 0."""
    if not np.isfinite(predicted).all():
        return _nan_metrics(OF_VALUES)
    moves = len(truth) > 1 and np.ptp(predicted) > 0 and np.ptp(truth) > 0
    return {
        "spearman": spearman(truth, predicted),
        "pearson": float(stats.pearsonr(truth, predicted).statistic) if moves else 0.0,
        "rmse": float(np.sqrt(((truth - predicted) ** 2).mean())),
    }


def spearman(truth: Array, predicted: Array) -> float:
    """Return the rank correlation; 0 with a constant."""
    moves = len(truth) > 1 and np.ptp(predicted) > 0 and np.ptp(truth) > 0
    return float(stats.spearmanr(truth, predicted).statistic) if moves else 0.0


def label_precision(truth: Array, chances: Array) -> float:
    """Return the mean average precision over labels, fast enough for a bootstrap."""
    varied = truth.any(0) & ~truth.all(0)
    precisions = [_average_precision(truth[:, at], chances[:, at]) for at in np.flatnonzero(varied)]
    return float(np.mean(precisions)) if precisions else 0.0


def _average_precision(truth: Array, scores: Array) -> float:
    """Return the area under the precision-recall steps, with one step per distinct score."""
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(truth[order])
    last = np.flatnonzero(np.diff(scores[order], append=np.inf) != 0)
    precision = right[last] / (last + 1)
    gained = np.diff(right[last], prepend=0) / right[-1]
    return float((precision * gained).sum())


def of_letters(truth: Sequence[Array], chosen: Sequence[Array]) -> dict[str, float]:
    """Return metrics over all letters of all rows."""
    all_truth, all_chosen = np.concatenate(list(truth)), np.concatenate(list(chosen))
    whole = [bool((a == b).all()) for a, b in zip(truth, chosen, strict=True)]
    return {
        "mcc": mcc(all_truth, all_chosen),
        "accuracy": float((all_truth == all_chosen).mean()),
        "f1": float(sk.f1_score(all_truth, all_chosen, average="macro", zero_division=0)),
        "sequence_accuracy": float(np.mean(whole)),
    }


def mcc(truth: Array, chosen: Array) -> float:
    """Return Matthews' coefficient; 0 if there is one class only, where scikit-learn warns."""
    alike = (truth == truth[0]).all() and (chosen == truth[0]).all()
    return 0.0 if alike else float(sk.matthews_corrcoef(truth, chosen))


def _f1_of_labels(truth: Array, chosen: Array) -> float:
    """Return the mean F1 over labels; scikit-learn treats a single label as binary."""
    right, wrong = (truth & chosen).sum(0), (truth != chosen).sum(0)
    return float((2 * right / np.maximum(2 * right + wrong, 1)).mean())


def _nan_metrics(metrics: Sequence[Metric]) -> dict[str, float]:
    """Return NaN for every metric, for a network that has diverged."""
    return {metric.name: float("nan") for metric in metrics if metric is not LOSS}


def areas(of: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """Return mean AUROC and AUPRC; empty without two classes."""
    if not of:
        return {}
    return {
        "auroc": float(np.mean([sk.roc_auc_score(truth, score) for truth, score in of])),
        "auprc": float(np.mean([sk.average_precision_score(truth, score) for truth, score in of])),
    }
