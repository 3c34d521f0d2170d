"""What is asked of each study: data, settings to choose among, the measure, and what to beat.

A question is one table of results: a recipe of the workload on one set of files. Its candidates
are chosen among on the part that is judged on (`--choose`, where the tested part is not even
read); what is reported is the chosen one, trained anew for every seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from genomics_studies.preparing import EXON_FOLDS, FOLDS, GB1

BY_TASK = "by task"
"""The policy that the recipe's `precision.task` picks for the machine."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8-delayed")

Settings = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A recipe on one set of files, and how good its answer is."""

    name: str
    study: str
    recipe: str
    files: str
    """Folder of the prepared parts; {fold} is the number of a fold."""
    settings: Settings
    candidates: Mapping[str, Settings]
    metric: str
    cost: float
    """Seconds that a run takes on a GPU with others beside it, roughly: the longest come first."""
    folds: int = 1
    refit: bool = False
    """Whether, once settings are chosen, what they were judged on is learnt as well: `rest`."""
    choosing_seeds: int = 1
    """With how many seeds each candidate is tried."""
    policies: Sequence[str] = (BY_TASK,)
    suffix: str = "csv.gz"
    at_least: float | None = None
    """What its mean is asked to reach."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Published results on the same test."""
    percent: bool = False
    """Whether results are told times 100."""


COMMON = ("lr_schedule.name=cosine", "lr_schedule.warmup_ratio=0.05", "health.every=0")
SEQUENCE = (*COMMON, "eval.patience=0", "eval.keep_best=true", "objective.label_smoothing=0")

_GUE_DATA = ("batch_size=128", "optimizer.weight_decay=0.1", "ema.decay=0.99")


def _network(
    backbone: str, pool: str, size: str, *, dropout: float, mutate: float, lr: float
) -> Settings:
    """Return the settings of a network of `size` width x layers."""
    width, layers = size.split("x")
    return (
        f"model.backbone={backbone}", f"model.pool={pool}", f"model.width={width}",
        f"model.layers={layers}", f"model.dropout={dropout}", f"data.mutate={mutate}",
        f"optimizer.lr={lr}",
    )  # fmt: skip


_GUE: Mapping[str, Mapping[str, Settings]] = {
    "cnn": {
        "position 64x3": _network("cnn", "position", "64x3", dropout=0.2, mutate=0.05, lr=1e-3),
        "position 64x4": _network("cnn", "position", "64x4", dropout=0.3, mutate=0.15, lr=1e-3),
        "position 48x3": _network("cnn", "position", "48x3", dropout=0.3, mutate=0.1, lr=2e-3),
        "attention 64x4": _network("cnn", "attention", "64x4", dropout=0.2, mutate=0.05, lr=2e-3),
        "max 96x3": _network("cnn", "max", "96x3", dropout=0.3, mutate=0.1, lr=1e-3),
    },
    "hyena": {
        "position 64x2": _network("hyena", "position", "64x2", dropout=0.2, mutate=0.05, lr=1e-3),
        "position 64x3": _network("hyena", "position", "64x3", dropout=0.3, mutate=0.15, lr=2e-3),
        "attention 96x3": _network("hyena", "attention", "96x3", dropout=0.2, mutate=0.1, lr=1e-3),
        "max 128x2": _network("hyena", "max", "128x2", dropout=0.2, mutate=0.1, lr=6e-4),
    },
}


def _long_cnn(size: str, *, dropout: float, mutate: float, lr: float, epochs: int) -> Settings:
    """Return the settings of a CNN that reads 300 letters, which are learnt by heart sooner."""
    network = _network("cnn", "position", size, dropout=dropout, mutate=mutate, lr=lr)
    return (*network, f"epochs={epochs}", "optimizer.weight_decay=0.3")


_SMOOTHED = ("objective.label_smoothing=0.1",)
_GUE_300_CNN: Mapping[str, Settings] = {
    "position 48x3": _GUE["cnn"]["position 48x3"],
    "position 32x3": _long_cnn("32x3", dropout=0.3, mutate=0.2, lr=3e-3, epochs=40),
    "position 48x3, 50": _long_cnn("48x3", dropout=0.4, mutate=0.2, lr=2e-3, epochs=50),
    "position 48x4, 50": _long_cnn("48x4", dropout=0.4, mutate=0.2, lr=2e-3, epochs=50),
    "position 64x4, 50": _long_cnn("64x4", dropout=0.3, mutate=0.3, lr=2e-3, epochs=50),
    "position 32x4, 50": _long_cnn("32x4", dropout=0.3, mutate=0.15, lr=3e-3, epochs=50),
    "position 96x3, 50": _long_cnn("96x3", dropout=0.5, mutate=0.25, lr=1e-3, epochs=50),
    "position 48x3, smoothed": (
        *_long_cnn("48x3", dropout=0.3, mutate=0.25, lr=3e-3, epochs=50),
        *_SMOOTHED,
    ),
}

GUE_BESIDE = {
    "prom_core_tata": {
        "DNABERT 3-mer": 78.15, "DNABERT 6-mer": 76.06, "NT-500M-human": 71.34,
        "NT-2500M-multi": 72.97, "DNABERT-2": 74.17, "DNABERT-2 further trained": 76.18,
    },
    "prom_300_tata": {
        "DNABERT 3-mer": 69.83, "DNABERT 6-mer": 61.56, "NT-500M-human": 78.07,
        "NT-2500M-multi": 79.43, "DNABERT-2": 71.59, "DNABERT-2 further trained": 68.79,
    },
    "prom_core_all": {
        "DNABERT 3-mer": 70.92, "DNABERT 6-mer": 68.90, "NT-500M-human": 63.45,
        "NT-2500M-multi": 70.33, "DNABERT-2": 69.37, "DNABERT-2 further trained": 67.50,
    },
}  # fmt: skip
"""MCC × 100 on the test part, Table 4 of DNABERT-2 (Zhou et al., ICLR 2024)."""
GB1_BESIDE = {
    "one_vs_rest": {"FLIP ridge": 0.28, "FLIP CNN": 0.17, "ESM-1b": 0.310},
    "two_vs_rest": {"FLIP ridge": 0.59, "FLIP CNN": 0.32, "ESM-1b": 0.646},
    "three_vs_rest": {"FLIP ridge": 0.76, "FLIP CNN": 0.83, "ESM-1b": 0.878},
    "low_vs_high": {"FLIP ridge": 0.34, "FLIP CNN": 0.51, "ESM-1b": 0.433},
    "sampled": {},
}
"""Spearman on the test part, FLIP (Dallago et al., NeurIPS 2021)."""


def _gue_candidates(task: str, backbone: str) -> Mapping[str, Settings]:
    if task == "prom_core_all":  # ten times the sequences: what costs most is not tried
        return dict(list(_GUE[backbone].items())[:2])
    return _GUE_300_CNN if (task, backbone) == ("prom_300_tata", "cnn") else _GUE[backbone]


def _gue(task: str, backbone: str) -> Question:
    large = task == "prom_core_all"
    long = task == "prom_300_tata"
    steps_an_epoch = 370 if large else 38
    return Question(
        name=f"{task} {backbone}",
        study="gue",
        recipe="genomics/variant_effect",
        files=f"gue/{task}",
        settings=(
            *SEQUENCE,
            *_GUE_DATA,
            f"epochs={8 if large else 25}",
            f"data.max_length={300 if long else 70}",
            f"eval.every={steps_an_epoch // (2 if large else 1)}",
        ),
        candidates=_gue_candidates(task, backbone),
        metric="mcc",
        cost=(90 if large else 50 if long else 30) * (1.5 if backbone == "hyena" else 1),
        choosing_seeds=3 if long and backbone == "cnn" else 1,
        policies=(BY_TASK,) if large else PRECISIONS,
        at_least={"prom_core_tata": 0.76, "prom_300_tata": 0.79}.get(task),
        beside=GUE_BESIDE[task] if backbone == "cnn" else {},
        percent=True,
    )


_DECAY = ("optimizer.weight_decay=0.1",)
_GB1: Mapping[str, Settings] = {
    "position 64x1": _network("cnn", "position", "64x1", dropout=0.3, mutate=0, lr=2e-3),
    "position 64x2": _network("cnn", "position", "64x2", dropout=0.1, mutate=0, lr=2e-3),
    "position 128x1": (
        *_network("cnn", "position", "128x1", dropout=0.2, mutate=0, lr=1e-3), *_DECAY,
    ),
    "mean 64x2": _network("cnn", "mean", "64x2", dropout=0.1, mutate=0, lr=2e-3),
}  # fmt: skip


def _gb1(split: str) -> Question:
    # Of few sequences an epoch has few steps: all train for about as many.
    epochs = {"one_vs_rest": 600, "two_vs_rest": 200, "three_vs_rest": 40}.get(split, 24)
    small = split == "one_vs_rest"
    return Question(
        name=f"GB1 {split}",
        study="gb1",
        recipe="genomics/variant_effect",
        files=f"gb1/{split}",
        settings=(
            *SEQUENCE,
            "data.alphabet=protein",
            "data.max_length=20",
            "objective.target=value",
            f"batch_size={16 if small else 128}",
            f"epochs={epochs}",
            f"eval.every={300 if small else 100}",
            "ema.decay=0.99",
            # Three sequences tell nothing of which step or which network was best.
            f"eval.keep_best={str(not small).lower()}",
        ),
        candidates=dict([*_GB1.items()][:1]) if small else _GB1,
        metric="spearman",
        cost=20,
        at_least={"three_vs_rest": 0.80, "low_vs_high": 0.45}.get(split),
        beside=GB1_BESIDE[split],
    )  # fmt: skip


_PAIRS = ("data.tokenizer=kmer", "data.kmer=2", "data.overlap=1")
_TRIPLETS = ("data.tokenizer=kmer", "data.kmer=3", "data.overlap=2")
"""A token for every two neighbours, or three."""


def _splice(size: str, *more: str, dropout: float, decay: float, lr: float) -> Settings:
    """Return the settings of a CNN whose letters stay as they are: two letters decide, and what
    exchanges letters at random takes away what is to be learnt."""
    network = _network("cnn", "position", size, dropout=dropout, mutate=0, lr=lr)
    return (*network, f"optimizer.weight_decay={decay}", *more)


_SPLICE = Question(
    name="UCI splice",
    study="splice",
    recipe="genomics/variant_effect",
    files="splice/fold{fold}",
    settings=(
        # The step that is best on 320 sequences is best by chance: the last one is kept.
        *SEQUENCE, "data.max_length=60", "batch_size=128", "epochs=15", "eval.every=0",
        "ema.decay=0.99", "eval.keep_best=false",
    ),
    candidates={
        "letters 16x1": _splice("16x1", dropout=0.3, decay=1.0, lr=3e-3),
        "pairs 16x1": _splice("16x1", *_PAIRS, dropout=0.2, decay=3.0, lr=3e-3),
        "pairs 16x1, more dropped": _splice("16x1", *_PAIRS, dropout=0.3, decay=3.0, lr=3e-3),
        "pairs 16x1, smoothed": _splice(
            "16x1", *_PAIRS, *_SMOOTHED, dropout=0.3, decay=3.0, lr=3e-3
        ),
        "triplets 16x1, smoothed": _splice(
            "16x1", *_TRIPLETS, *_SMOOTHED, "epochs=20", dropout=0.4, decay=3.0, lr=4e-3
        ),
    },
    metric="accuracy",
    cost=15,
    folds=FOLDS,
    refit=True,
    at_least=0.965,
    beside={
        "one-hot logistic regression": 95.8, "small CNN": 96.9,
        "KBANN (UCI's notes, recalled)": 93.7,
    },
    percent=True,
)  # fmt: skip

_BRCA1 = Question(
    name="BRCA1 by exon",
    study="brca1",
    recipe="genomics/variant_effect",
    files="brca1/fold{fold}",
    settings=(
        *SEQUENCE, "data.reference={data}/brca1/reference.fa.gz", "batch_size=64", "epochs=12",
        "eval.every=35", "ema.decay=0.99", 'objective.labels=["other","LOF"]',
        "optimizer.weight_decay=0.1",
    ),
    candidates={
        "position 64x3, 64": (
            *_network("cnn", "position", "64x3", dropout=0.4, mutate=0.05, lr=1e-3),
            "data.max_length=64",
        ),
        "max 64x3, 64": (
            *_network("cnn", "max", "64x3", dropout=0.3, mutate=0.05, lr=1e-3),
            "data.max_length=64",
        ),
        "max 64x4, 128": (
            *_network("cnn", "max", "64x4", dropout=0.3, mutate=0.05, lr=1e-3),
            "data.max_length=128",
        ),
        "hyena 64x2, 128": (
            *_network("hyena", "max", "64x2", dropout=0.2, mutate=0.05, lr=1e-3),
            "data.max_length=128",
        ),
    },
    metric="auroc",
    cost=20,
    folds=len(EXON_FOLDS),
)  # fmt: skip

_STRUCTURE = Question(
    name="FLIP secondary structure",
    study="structure",
    recipe="genomics/annotation",
    files="structure",
    settings=(
        *COMMON, "data.alphabet=protein", 'objective.labels=["C","E","H"]', "data.max_length=512",
        "batch_size=32", "gradient_accumulation_steps=1", "epochs=12", "eval.every=300",
        "eval.keep_best=true",
        "ema.decay=0.99", "optimizer.weight_decay=0.1",
    ),
    candidates={
        "cnn 96x4": _network("cnn", "mean", "96x4", dropout=0.2, mutate=0.05, lr=2e-3),
        "cnn 96x6": _network("cnn", "mean", "96x6", dropout=0.3, mutate=0.1, lr=1e-3),
        "hyena 128x4": _network("hyena", "mean", "128x4", dropout=0.2, mutate=0.05, lr=2e-3),
    },
    metric="accuracy",
    cost=120,
    percent=True,
)  # fmt: skip

_GENES = Question(
    name="genes of Leptospira",
    study="genes",
    recipe="genomics/annotation",
    files="genes",
    settings=(
        *COMMON, 'objective.labels=["intergenic","gene"]', "batch_size=16",
        "gradient_accumulation_steps=1",
        "eval.every=200", "eval.keep_best=true", "ema.decay=0.99", "optimizer.weight_decay=0.1",
        "data.reverse_complement=true", "data.max_length=2048", "epochs=10",
    ),
    candidates={
        "cnn 64x8": _network("cnn", "mean", "64x8", dropout=0.1, mutate=0, lr=2e-3),
        "hyena 128x4": _network("hyena", "mean", "128x4", dropout=0.1, mutate=0, lr=2e-3),
        "hyena 64x6": _network("hyena", "mean", "64x6", dropout=0.0, mutate=0, lr=3e-3),
    },
    metric="mcc",
    cost=120,
    percent=True,
)  # fmt: skip

_GENERATION = Question(
    name="next base of E. coli",
    study="generation",
    recipe="genomics/generation",
    files="generation",
    settings=(
        *COMMON, "data.max_length=2048", "batch_size=16", "gradient_accumulation_steps=1",
        "eval.every=200",
        "eval.keep_best=true", "ema.decay=0.99", "optimizer.weight_decay=0.1",
        "data.reverse_complement=true", "epochs=8",
    ),
    candidates={
        "hyena 128x4": _network("hyena", "mean", "128x4", dropout=0, mutate=0, lr=2e-3),
        "cnn 128x3": _network("cnn", "mean", "128x3", dropout=0, mutate=0, lr=2e-3),
    },
    metric="perplexity",
    cost=150,
    suffix="fa.gz",
)  # fmt: skip

QUESTIONS: Sequence[Question] = (
    *(
        _gue(task, backbone)
        for task in ("prom_core_tata", "prom_300_tata", "prom_core_all")
        for backbone in ("cnn", "hyena")
    ),
    *(_gb1(split) for split in GB1),
    _SPLICE,
    _BRCA1,
    _STRUCTURE,
    _GENES,
    _GENERATION,
)
STUDIES = tuple(dict.fromkeys(question.study for question in QUESTIONS))
LOWER_IS_BETTER = frozenset({"perplexity", "loss"})
