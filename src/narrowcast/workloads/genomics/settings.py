"""The sections of a recipe for sequences of DNA, RNA and protein; names are the field's."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection, Sections
from narrowcast.workloads.genomics.labels import MOST_CLASSES, TASK_LABELS

MADE = "made"
"""Data that needs no file: made from the seed, with something to find in it."""
LONGEST = 2**24
MOST_FILES = 10_000

TaskName = Literal[
    "annotation", "variant_effect", "protein_function", "generation", "domain_adaptation"
]
Text = Annotated[str, Field(max_length=4096)]
Column = Annotated[str, Field(min_length=1, max_length=1024)]
Share = Annotated[float, Field(ge=0, lt=1)]


class GenomicData(DataSection):
    """Which sequences are learnt, and how they become tokens."""

    places: ClassVar[tuple[str, ...]] = (
        "path",
        "more",
        "validation",
        "test",
        "source",
        "reference",
        "features",
    )

    path: Text = Field(
        default=MADE,
        description="a file of sequences to train on: csv, tsv, json, jsonl, FASTA, FASTQ, GenBank "
        f"or VCF, plain or gzip; {MADE}: sequences that are made from the seed",
    )
    more: tuple[Text, ...] = Field(
        default=(), max_length=MOST_FILES, description="further files to train on, beside path"
    )
    validation: Text = Field(
        default="", description="a file to judge on while training; empty: a share of path"
    )
    test: Text = Field(
        default="", description="a file that is judged once, when training is over; empty: none"
    )
    validation_share: float = Field(
        default=0.1, gt=0, lt=1, description="share of path that is judged on, chosen by the seed"
    )
    alphabet: Literal["dna", "rna", "protein"] = Field(
        default="dna", description="which letters sequences have"
    )
    strict: bool = Field(
        default=False, description="refuse letters beyond the alphabet instead of reading N or X"
    )
    tokenizer: Literal["byte", "kmer"] = Field(
        default="byte", description="a token a letter, or one for k letters"
    )
    kmer: int = Field(default=3, ge=1, le=8, description="letters of a token (tokenizer=kmer)")
    overlap: int = Field(
        default=1, ge=0, le=7, description="letters that neighbours share (tokenizer=kmer)"
    )
    max_length: int = Field(
        default=1024, ge=1, le=LONGEST, description="letters of a sequence at most; more are cut"
    )
    stride: int | None = Field(
        default=None,
        ge=1,
        le=LONGEST,
        description="letters between two windows of a long sequence (annotation, generation); "
        "none: max_length",
    )
    sequence: Column = Field(default="sequence", description="column of the sequences")
    alternative: Column = Field(
        default="alternative", description="column of the sequences with the variant"
    )
    label: Column = Field(default="label", description="column of what is to be predicted")
    reference: Text = Field(
        default="",
        description="FASTA that variants given by chrom, pos, ref and alt are variants of",
    )
    position: Column = Field(
        default="pos", description="column of the position of a variant, counted from 1"
    )
    features: Text = Field(
        default="", description="GFF with the features of a FASTA (annotation); empty: in path"
    )
    source: Text = Field(
        default="",
        description="a file of the domain that is adapted from (domain_adaptation), where "
        "model.path has not learnt it already",
    )
    reverse_complement: bool = Field(
        default=False, description="learn every sequence from both strands (dna, rna)"
    )
    mutate: Share = Field(
        default=0.0, description="share of letters drawn anew, at random, in every training batch"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse what an alphabet does not have, and tokens that never end."""
        if self.alphabet == "protein" and self.reverse_complement:
            text = "a protein has one strand; leave reverse_complement out"
            check_conflicts([(("reverse_complement", "alphabet"), text)])
        if self.tokenizer == "kmer" and self.overlap >= self.kmer:
            text = f"tokens of {self.kmer} letters cannot share {self.overlap}; write overlap=1"
            check_conflicts([(("overlap", "kmer"), text)])
        if self.tokenizer == "kmer" and self.mutate:
            text = "tokens of several letters share those that are exchanged; write tokenizer=byte"
            check_conflicts([(("mutate", "tokenizer"), text)])
        if self.reference and self.alphabet != "dna":
            text = "variants of a reference are read as DNA; write alphabet=dna"
            check_conflicts([(("reference", "alphabet"), text)])
        for name in ("more", "reference", "features"):
            if self.path == MADE and getattr(self, name):
                text = "made sequences have none; name the first file with path"
                check_conflicts([((name, "path"), text)])
        return self


class GenomicModelSection(Section):
    """The network: a base that was trained before, or a new one by its size."""

    path: Text = Field(
        default="",
        description="folder of a run whose network is gone on with; empty: a new one",
    )
    preset: Literal["mini", "tiny", "small", "base", "large", "long"] = Field(
        default="tiny", description="size of a new network"
    )
    backbone: Literal["hyena", "attention", "cnn"] = Field(
        default="hyena", description="what carries letters to one another"
    )
    width: int | None = Field(
        default=None,
        ge=8,
        le=2**16,
        description="numbers a token is carried in; none: the preset's",
    )
    layers: int | None = Field(
        default=None, ge=1, le=1024, description="blocks; none: the preset's"
    )
    order: int = Field(default=2, ge=2, le=8, description="gates of a Hyena operator")
    patching: Literal["none", "static", "entropy"] = Field(
        default="none", description="letters joined to patches that the blocks work on"
    )
    patch_size: int = Field(
        default=8, ge=1, le=1024, description="letters of a patch; on average with patching=entropy"
    )
    reverse_complement: bool = Field(
        default=False, description="compute the same for both strands, by construction"
    )
    dropout: Share = Field(default=0.1, description="share of numbers dropped in training")
    pool: Literal["mean", "max", "cls", "attention", "position"] = Field(
        default="mean",
        description="how the tokens of a sequence become one vector; position: by weights for each "
        "of data.max_length positions, where sequences are aligned",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse vectors that depend on which strand comes first."""
        if self.reverse_complement and self.pool in ("cls", "position"):
            text = f"pool={self.pool} reads a strand from its beginning; write mean, max, attention"
            check_conflicts([(("pool", "reverse_complement"), text)])
        return self


class Objective(Section):
    """What is predicted."""

    task: TaskName = Field(description="what the network is for")
    target: Literal["class", "labels", "value"] = Field(
        default="class",
        description="one class of several, any number of labels (joined with ;), or a number",
    )
    function: Literal["go", "ec"] = Field(
        default="go", description="which classes protein_function has unless labels says"
    )
    labels: tuple[Column, ...] = Field(
        default=(),
        max_length=MOST_CLASSES,
        description="names of the classes; none: those of the data, in the task's own order",
    )
    label_smoothing: Share = Field(
        default=0.0, description="share of a class that is spread over all classes"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse targets a task does not have."""
        if self.task in ("annotation", "generation") and self.target != "class":
            text = f"{self.task} predicts a class for every letter; leave target out"
            check_conflicts([(("target", "task"), text)])
        if self.target != "class" and self.label_smoothing:
            text = f"target={self.target} has no classes to smooth; leave label_smoothing out"
            check_conflicts([(("label_smoothing", "target"), text)])
        if len(set(self.labels)) != len(self.labels):
            check_conflicts([(("labels",), "a class is named twice; name each once")])
        return self

    @property
    def reads_genomes(self) -> bool:
        """Whether letters are judged: long sequences are then learnt in windows, not cut off."""
        return self.task in ("annotation", "generation")

    @property
    def known_labels(self) -> tuple[str, ...]:
        """Classes of the task that need not be named."""
        name = f"{self.task}_{self.function}" if self.task == "protein_function" else self.task
        return self.labels or TASK_LABELS.get(name, ())


class Tuning(Section):
    """Who learns how fast, and from when."""

    layerwise_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the learning rate from each stage to the one below it; 1: all alike",
    )
    freeze: bool = Field(default=False, description="train the head only")
    unfreeze_over: Share = Field(
        default=0.0,
        description="share of the run over which stages are unfrozen, the last first; 0: at once",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse to thaw what stays frozen."""
        if self.freeze and self.unfreeze_over:
            text = "freeze keeps the base as it is to the end; leave one of them out"
            check_conflicts([(("unfreeze_over", "freeze"), text)])
        return self

    @property
    def depends_on_steps(self) -> bool:
        """Whether stages are unfrozen at shares of the run."""
        return self.unfreeze_over > 0


SECTIONS = Sections(data=GenomicData, model=GenomicModelSection, objective=Objective, tuning=Tuning)
