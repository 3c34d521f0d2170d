"""The file `decomposition.json`, which a finished decomposition writes for its report.

Lists are in the order of the seeds; pictures are of one seed (`drawn_seed`). A number that was not
measured is None. Trajectories are not in the file: the report takes them from the evaluations.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from narrowcast.plain_files import read_plain
from narrowcast.runs import RunFolder, strict_json
from narrowcast.workloads.decompose.report.matrices import MOST_CELLS, Histogram, Picture

FILE = "decomposition.json"
LARGEST = 2**24
"""Bytes of that file."""
MOST_SITES, MOST_SEEDS = 1024, 4096
MOST_DRAWN, MOST_COMPARED = 24, 6
"""Components drawn per site, and sites drawn: the matrices of a site take some 70 kB."""

TRAJECTORIES: Mapping[str, str] = {
    "l0": "Active components per position (L0)",
    "alive": "Alive components",
    "identity_error": "Identity error (wrong importances)",
    "right": "Share of correct seeds",
    "stochastic": "Divergence with random masks",
    "unmasked": "Divergence without masks",
    "faithfulness": "Faithfulness loss (weight residual)",
    "kl": "KL divergence from the target",
    "ce": "Cross-entropy",
}
"""Kinds of curves, and what each is called; an evaluation's `l0/linear1` is a line in the first."""

Numbers = tuple[float | None, ...]
Counts = tuple[int | None, ...]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Component(_Value):
    """A rank-one matrix U_c V_c of one site, beside what it should be where that is known."""

    number: int = Field(ge=0)
    """Which component of the site: its column of V and row of U."""
    learned: Picture
    """The matrix, outputs x inputs, as the target's weight is (`matrices.component_picture`)."""
    truth: Picture | None = None
    """The part of the target's weight that this component stands for."""
    name: str = ""
    """Of that part: "feature 3"."""
    cosine: float | None = None
    norm_ratio: float | None = None
    """Norm of what was found over that of the truth."""
    density: float | None = None
    """Share of positions at which it is in use."""


class Site(_Value):
    """One matrix of the target, and what its components became."""

    name: str
    kind: str = "linear"
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)
    components: int = Field(ge=1)
    """C."""
    expected: int | None = None
    """Components that the ground truth has; None where nobody knows."""
    shape: Literal["identity", "dense", ""] = ""
    """Of the right importance matrix: one component a feature, or `expected` that all share."""

    alive: Counts
    """Components in use anywhere, of each seed; with `expected`, those that any probe needs."""
    l0: Numbers
    """Components in use at a position, on average, of each seed."""
    identity_error: Counts = ()
    """Entries of the importance matrix that are wrong, of each seed."""
    cosine: Numbers = ()
    """The least over the columns of the truth, of its largest alive component; of each seed."""
    mean_cosine: Numbers = ()
    """The mean of the same."""
    norm_ratio: Numbers = ()
    """Norms of the same over those of the columns, the mean."""

    importance: Picture | None = None
    """Probe inputs x components, 0 to 1, of the drawn seed (`matrices.importance_picture`)."""
    importance_order: tuple[int, ...] = Field(default=(), max_length=MOST_CELLS)
    """Which component each of its columns is."""
    largest: tuple[Component, ...] = Field(default=(), max_length=MOST_DRAWN)
    """Components with the largest norms among those alive, of the drawn seed."""
    densities: Histogram | None = None
    """How many components are in use how often, of the drawn seed."""


class MaskedLoss(_Value):
    """The loss of a language model with one kind of mask: a row of the published table."""

    mask: str
    """target, unmasked, stochastic, ci, rounded, random or zero."""
    cross_entropy: float | None = None
    kl: float | None = None
    """From the target's predictions, per position."""
    ce_difference: float | None = None
    """Cross-entropy less the target's."""
    ce_unrecovered: float | None = None
    """The same as a share of what zero masks lose."""


class SeedResult(_Value):
    """What became of one seed, in a line."""

    seed: int
    right: bool | None = None
    """Whether the components are those of the ground truth; None where there is none."""
    said: str


class Decomposition(_Value):
    """All of `decomposition.json`."""

    target: str
    """What was decomposed, in words: "TMS 5-2"."""
    seeds: tuple[int, ...] = Field(min_length=1, max_length=MOST_SEEDS)
    drawn_seed: int
    alive_threshold: float
    """A component is in use where its importance is beyond this."""
    probe: str = ""
    """What the rows of the importance matrices are: "features one by one, at 0.75"."""
    sites: tuple[Site, ...] = Field(max_length=MOST_SITES)
    verdicts: tuple[SeedResult, ...] = ()
    language: tuple[MaskedLoss, ...] = ()
    pgd: tuple[tuple[int, float], ...] = ()
    """The quality bar: steps of the adversary, and the divergence it reached."""

    @model_validator(mode="after")
    def _a_number_for_each_seed(self) -> Self:
        for site in self.sites:
            lines = (site.alive, site.l0, site.identity_error, site.cosine, site.mean_cosine)
            lengths = {len(values) for values in (*lines, site.norm_ratio)}
            if not lengths <= {0, len(self.seeds)}:
                raise ValueError(
                    f"{site.name} must have one number for each of {len(self.seeds)} seeds"
                )
        return self


def write(folder: Path, result: Decomposition) -> None:
    """Write the file into a run folder, whole or not at all."""
    RunFolder(folder).write_json(FILE, result.model_dump(exclude_defaults=True))


def read(folder: Path) -> Decomposition:
    """Read the file; raise OSError where there is none, ValueError where it is not one."""
    message = strict_json.loads(read_plain(folder / FILE, most=LARGEST).decode())
    return Decomposition.model_validate(message)
