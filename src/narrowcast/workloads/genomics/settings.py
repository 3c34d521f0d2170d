"""Recipe sections of the genomics workload."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.section import Section, check_conflicts
from narrowcast.config.sections import DataSection, Sections

MOST_CLASSES = 10_000

TASK_LABELS: Mapping[str, tuple[str, ...]] = {
    "annotation": (
        "intergenic", "gene", "exon", "intron", "promoter", "enhancer", "silencer",
        "transcription_start_site", "transcription_end_site", "splice_site",
    ),
    "variant_effect": (
        "benign", "likely_benign", "uncertain_significance", "likely_pathogenic", "pathogenic",
    ),
    "protein_function_go": (
        "molecular_function", "biological_process", "cellular_component", "catalytic_activity",
        "binding", "transporter_activity", "enzyme_regulator_activity",
    ),
    "protein_function_ec": (
        "oxidoreductase", "transferase", "hydrolase", "lyase", "isomerase", "ligase",
        "translocase",
    ),
}  # fmt: skip


MADE = "made"
"""data.path of synthetic sequences."""
LONGEST = 2**24
MOST_FILES = 10_000

TaskName = Literal[
    "annotation",
    "variant_effect",
    "protein_function",
    "generation",
    "domain_adaptation",
    "classify",
]
Text = Annotated[str, Field(max_length=4096)]
Column = Annotated[str, Field(min_length=1, max_length=1024)]
Share = Annotated[float, Field(ge=0, lt=1)]


class GenomicData(DataSection):
    """Which sequences to train on, and how they become tokens."""

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
        description="file of training sequences: csv, tsv, json, jsonl, FASTA, FASTQ, GenBank or "
        f"VCF, plain or gzip; {MADE}: synthetic sequences drawn from the seed",
    )
    more: tuple[Text, ...] = Field(
        default=(), max_length=MOST_FILES, description="further training files"
    )
    validation: Text = Field(default="", description="validation file; empty: a share of path")
    test: Text = Field(
        default="", description="test file, evaluated once after training; empty: none"
    )
    validation_share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of path held out for validation, drawn by the seed",
    )
    test_share: Share = Field(
        default=0.0,
        description="share of path held out for the test, drawn by the seed, if there is no test "
        "file; 0: none",
    )
    alphabet: Literal["dna", "rna", "protein"] = Field(
        default="dna", description="kind of sequence"
    )
    strict: bool = Field(
        default=False, description="raise an error for ambiguous letters instead of reading N or X"
    )
    tokenizer: Literal["byte", "kmer"] = Field(
        default="byte", description="one token per letter (byte) or per k letters (kmer)"
    )
    kmer: int = Field(default=3, ge=1, le=8, description="letters per token (tokenizer=kmer)")
    overlap: int = Field(
        default=1, ge=0, le=7, description="letters that neighbouring tokens share (tokenizer=kmer)"
    )
    max_length: int = Field(
        default=1024,
        ge=1,
        le=LONGEST,
        description="maximum letters per sequence; longer ones are cut",
    )
    stride: int | None = Field(
        default=None,
        ge=1,
        le=LONGEST,
        description="letters from one window of a long sequence to the next (annotation, "
        "generation); none: max_length",
    )
    sequence: Column = Field(default="sequence", description="column with the sequence")
    alternative: Column = Field(
        default="alternative", description="column with the sequence that has the variant"
    )
    label: Column = Field(default="label", description="column with the label to predict")
    reference: Text = Field(
        default="",
        description="reference FASTA for variants given as chrom, pos, ref and alt",
    )
    position: Column = Field(
        default="pos", description="column with the position of a variant, counted from 1"
    )
    features: Text = Field(
        default="",
        description="GFF with the features of the FASTA (annotation); empty: path has them",
    )
    source: Text = Field(
        default="",
        description="file of source-domain sequences (domain_adaptation); leave empty if "
        "model.path was trained on them",
    )
    reverse_complement: bool | Literal["auto"] = Field(
        default=False,
        description="train on both strands of every sequence (dna, rna); auto: if k-mers of both "
        "strands together predict better (classify)",
    )
    mutate: Share | Literal["auto"] = Field(
        default=0.0,
        description="share of letters replaced at random in every training batch; auto: 0.05, or "
        "0.1 where letters by position predict better than k-mers, and 0 for proteins and values "
        "(classify)",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check settings against the alphabet and the tokenizer."""
        if self.alphabet == "protein" and self.reverse_complement is True:
            text = "proteins have no reverse complement. Leave reverse_complement out"
            check_conflicts([(("reverse_complement", "alphabet"), text)])
        if self.tokenizer == "kmer" and self.overlap >= self.kmer:
            text = f"overlap must be below kmer={self.kmer}, got {self.overlap}. Write overlap=1"
            check_conflicts([(("overlap", "kmer"), text)])
        if self.tokenizer == "kmer" and self.mutate:
            text = "mutate needs one letter per token. Write tokenizer=byte, or leave mutate out"
            check_conflicts([(("mutate", "tokenizer"), text)])
        if self.reference and self.alphabet != "dna":
            text = "variants of a reference are DNA. Write alphabet=dna, or leave reference out"
            check_conflicts([(("reference", "alphabet"), text)])
        for name in ("more", "reference", "features"):
            if self.path == MADE and getattr(self, name):
                text = f"{name} needs sequences from a file. Write data.path, or leave {name} out"
                check_conflicts([((name, "path"), text)])
        return self


class GenomicModelSection(Section):
    """The network: a pretrained one, or a new one by its size."""

    path: Text = Field(
        default="",
        description="weights to start from: folder of a finished run, or a published checkpoint "
        "(HyenaDNA; with classify ESM-2, Nucleotide Transformer, DNABERT-2) as a folder or "
        "owner/name on the Hugging Face Hub; empty: a new network",
    )
    tune: Literal["full", "lora"] = Field(
        default="full",
        description="train all weights of the network in path (full), or LoRA adapters on it and "
        "the head (lora)",
    )
    preset: Literal["mini", "tiny", "small", "base", "large", "long"] = Field(
        default="tiny", description="size of a new network"
    )
    backbone: Literal["hyena", "attention", "cnn", "motif", "auto"] = Field(
        default="hyena",
        description="layer type that mixes positions; motif: wide filters, then dilated "
        "convolutions of what they find; auto: motif, and hyena for long sequences (classify)",
    )
    width: int | None = Field(
        default=None,
        ge=8,
        le=2**16,
        description="hidden size; none: the preset's",
    )
    layers: int | None = Field(
        default=None, ge=1, le=1024, description="number of blocks; none: the preset's"
    )
    order: int = Field(default=2, ge=2, le=8, description="order of the Hyena operator")
    patching: Literal["none", "static", "entropy"] = Field(
        default="none",
        description="group letters into patches: fixed length (static) or by entropy",
    )
    patch_size: int = Field(
        default=8, ge=1, le=1024, description="letters per patch; the mean with patching=entropy"
    )
    reverse_complement: bool = Field(
        default=False, description="make the network equivariant to the reverse complement"
    )
    dropout: Share = Field(default=0.1, description="dropout probability")
    pool: Literal["mean", "max", "cls", "attention", "position", "all"] = Field(
        default="mean",
        description="how token states become one vector per sequence; position: one weight per "
        "position, for aligned sequences; all: max and mean, and position if all sequences have "
        "one length",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that adapters have a base, and that pooling does not depend on the strand."""
        if self.tune == "lora" and not self.path:
            text = "tune=lora needs a trained network. Write model.path, or leave tune out"
            check_conflicts([(("tune", "path"), text)])
        if self.reverse_complement and self.pool in ("cls", "position"):
            text = f"pool={self.pool} depends on the strand. Write mean, max or attention"
            check_conflicts([(("pool", "reverse_complement"), text)])
        return self


class Objective(Section):
    """What the network predicts."""

    task: TaskName = Field(description="what to predict")
    target: Literal["class", "labels", "value"] = Field(
        default="class",
        description="one class, any number of labels (joined with ;), or a number",
    )
    function: Literal["go", "ec"] = Field(
        default="go", description="default classes of protein_function: GO terms or EC classes"
    )
    labels: tuple[Column, ...] = Field(
        default=(),
        max_length=MOST_CLASSES,
        description="class names; none: the task's classes, or those of the data",
    )
    baseline: Literal["none", "compared", "combined"] = Field(
        default="none",
        description="linear model of k-mers and positions (classify): compared with the network, "
        "or also combined with it in predictions",
    )
    label_smoothing: Share = Field(
        default=0.0, description="share of the target spread evenly over all classes"
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that the task has the target."""
        if self.task in ("annotation", "generation") and self.target != "class":
            text = f"{self.task} predicts a class for every letter. Leave target out"
            check_conflicts([(("target", "task"), text)])
        if self.baseline != "none" and self.task != "classify":
            text = "only classify has a baseline. Write baseline=none"
            check_conflicts([(("baseline", "task"), text)])
        if self.target != "class" and self.label_smoothing:
            text = f"target={self.target} has no classes to smooth. Write label_smoothing=0"
            check_conflicts([(("label_smoothing", "target"), text)])
        if len(set(self.labels)) != len(self.labels):
            check_conflicts([(("labels",), "a class occurs twice. Name each class once")])
        return self

    @property
    def reads_genomes(self) -> bool:
        """Whether letters are predicted, so long sequences become windows instead of being cut."""
        return self.task in ("annotation", "generation")

    @property
    def known_labels(self) -> tuple[str, ...]:
        """Classes named in the recipe, or the defaults of the task."""
        name = f"{self.task}_{self.function}" if self.task == "protein_function" else self.task
        return self.labels or TASK_LABELS.get(name, ())


class Tuning(Section):
    """Learning rate and freezing per stage of the network."""

    layerwise_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="learning rate factor from each stage to the one below it; 1: the same rate",
    )
    base_lr_factor: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = Field(
        default="auto",
        description="learning rate factor of the network below the head; auto: 1, but all "
        "weights of a published checkpoint train at 1e-4 at most",
    )
    freeze: bool = Field(default=False, description="train the head only")
    unfreeze_over: Share = Field(
        default=0.0,
        description="share of the run over which stages are unfrozen, last stage first; 0: at once",
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check that freeze and unfreeze_over are not combined."""
        if self.freeze and self.unfreeze_over:
            text = "freeze=true keeps the backbone frozen to the end. Leave one of them out"
            check_conflicts([(("unfreeze_over", "freeze"), text)])
        return self

    @property
    def depends_on_steps(self) -> bool:
        """Whether stages are unfrozen during the run."""
        return self.unfreeze_over > 0


class GenomicLora(Section):
    """LoRA adapters (peft), used with model.tune=lora."""

    lora_r: int = Field(default=16, ge=1, le=2**16, description="rank of each adapter")
    lora_alpha: float = Field(
        default=32, gt=0, le=1e6, description="adapter outputs are scaled by lora_alpha / lora_r"
    )
    lora_dropout: Share = Field(
        default=0.05, description="dropout on adapter inputs during training"
    )
    lora_target_modules: tuple[Column, ...] = Field(
        default=(),
        max_length=1000,
        description="layers that get an adapter; none: every linear layer below the head",
    )


SECTIONS = Sections(
    data=GenomicData,
    model=GenomicModelSection,
    objective=Objective,
    tuning=Tuning,
    lora=GenomicLora,
)
