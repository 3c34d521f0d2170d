"""`narrowcast genomics`: pretrain, predict, score variants, generate sequences."""

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import click

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs.writing import written_atomically

LINE_SECONDS = 2.0
"""Seconds between two progress lines, and before the first."""

_Item = TypeVar("_Item")
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


@click.group()
def genomics() -> None:
    """Pretrain on genomes, predict, score variants, generate sequences."""


_RUN = click.argument("run")
_USED = (
    click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:N."),
    click.option(
        "--policy", default="fp32", show_default=True, help="Precision policy to compute in."
    ),
)
_TABLE = (
    click.option("-o", "--output", default="-", help="Output file.  [default: stdout]"),
    click.option(
        "--format",
        "kind",
        type=click.Choice(["csv", "tsv", "jsonl", "gff", "bed"]),
        help="Output format.  [default: by the suffix of the output file, else csv]",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        default=32,
        show_default=True,
        help="Sequences per batch.",
    ),
    click.option(
        "--position",
        default="pos",
        show_default=True,
        help="Column with the position, counted from 1.",
    ),
)


def _with(*groups: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds groups of options."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed([each for group in groups for each in group]):
            command = option(command)
        return command

    return add


@genomics.command()
@click.argument("overrides", nargs=-1, metavar="FASTA... [KEY=VALUE]...")
@click.option("-o", "--out", metavar="DIR", help="Run folder.  [default: runs/pretrain]")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.pass_context
def pretrain(ctx: click.Context, overrides: tuple[str, ...], out: str | None, quiet: bool) -> None:
    """Pretrain a network on FASTA, FASTQ or GenBank files by next-letter prediction.

    This runs the recipe genomics/pretrain. KEY=VALUE words override its settings, and resume,
    watch, report and compare work on its folder. Pass the folder to model.path= of other recipes,
    and to `score` and `generate`.
    """
    settings = parse_overrides(overrides)
    # The verb that trains is the command line's own: this command is below it.
    root = ctx.find_root().command
    train = root.get_command(ctx, "train") if isinstance(root, click.Group) else None
    if train is None:
        raise click.UsageError("pretrain must be run as narrowcast genomics pretrain.")
    ctx.invoke(train, recipe="genomics/pretrain", overrides=settings, out=out, quiet=quiet)


@genomics.command()
@_RUN
@click.argument("file")
@_with(_TABLE, _USED)
@click.option("--reference", help="Reference FASTA, if FILE has variants.")
@click.option("--sequence", default="sequence", show_default=True, help="Column with the sequence.")
@click.option(
    "--alternative",
    default="alternative",
    show_default=True,
    help="Column with the sequence that has the variant.",
)
@click.option("--name", help="Column with the name.  [default: row number]")
@click.option(
    "--weights",
    "weights_format",
    type=click.Choice(["full", "int8", "e4m3"]),
    default="full",
    show_default=True,
    help="Store weights in int8 or e4m3, one byte each; prints the error against fp32.",
)
def predict(run: str, file: str, reference: str | None, output: str, **options: Any) -> None:
    """Predict for every sequence in FILE with a finished RUN, and write a table.

    FILE is FASTA, FASTQ, GenBank, csv, tsv, json or jsonl, plain or gzip. It has the same kind of
    input as the training data: sequences, pairs, or variants of a --reference. Labels are not
    needed. Annotation runs write one row per interval, also as GFF or BED.
    """
    path = _output_path(output, reads=[file, reference])
    from narrowcast.workloads.genomics.inference.finished import finished, require_target
    from narrowcast.workloads.genomics.inference.predict import (
        format_named,
        letter_predictions,
        lines,
        predictions,
    )
    from narrowcast.workloads.genomics.inference.quantize import quantization_note
    from narrowcast.workloads.genomics.inference.reading import Columns, Reader

    requested = finished(
        run,
        device=options["device"],
        policy=options["policy"],
        weights_format=options["weights_format"],
    )
    require_target(requested, writes=False, instead="Use `genomics generate` or `genomics score`.")
    along = requested.target.per_letter
    kind = format_named(options["kind"], output, along=along)
    columns = Columns(
        **{key: options[key] for key in ("sequence", "alternative", "name", "position")}
    )
    genome = None if reference is None else expand_path(reference)
    if requested.quantized:
        first = Reader(requested, columns).rows(expand_path(file), genome)
        if sample := list(itertools.islice(first, options["batch_size"])):
            full = finished(run, device=options["device"])
            click.echo(quantization_note(requested, full, sample), err=True)
    reader = Reader(requested, columns)
    if along:
        result = letter_predictions(
            requested, reader.whole(expand_path(file)), batch_size=options["batch_size"]
        )
    else:
        rows = reader.rows(expand_path(file), genome)
        result = predictions(requested, rows, batch_size=options["batch_size"])
    meter = _Meter("records")
    _write(path, lines(meter.counted(result), requested.target, kind), meter)
    if note := reader.skipped.note:
        click.echo(note, err=True)
    if reader.cut:
        length = requested.info.max_length
        click.echo(
            f"{reader.cut:,} sequences were longer than {length:,} letters and were cut", err=True
        )


@genomics.command()
@_RUN
@click.argument("variants")
@_with(_TABLE, _USED)
@click.option("--reference", required=True, help="Reference FASTA of the variants.")
@click.option("--labels", metavar="COLUMN", help="Compare the scores with this column.")
@click.option("--positive", metavar="LABEL", help="The label that should have high scores.")
def score(
    run: str,
    variants: str,
    reference: str,
    output: str,
    labels: str | None,
    positive: str | None,
    **options: Any,
) -> None:
    """Score every variant in VARIANTS: a VCF, or a table with chrom, pos, ref and alt.

    With a pretrained RUN, the score is the log-likelihood ratio of alternative and reference,
    below 0 if the alternative is less likely. With a RUN trained on variants, the score comes from
    its class probabilities or its predicted value.
    """
    path = _output_path(output, reads=[variants, reference])
    if positive is not None and labels is None:
        raise click.UsageError("--positive needs --labels, the column with the labels.")
    from narrowcast.workloads.genomics.inference.finished import finished
    from narrowcast.workloads.genomics.inference.predict import format_named, table
    from narrowcast.workloads.genomics.inference.reading import Columns, Reader
    from narrowcast.workloads.genomics.inference.score import (
        Labelled,
        require_scores,
        score_row,
        scores,
    )

    request = finished(run, device=options["device"], policy=options["policy"])
    require_scores(request)
    kind = format_named(options["kind"], output, along=False)
    reader = Reader(request, Columns(position=options["position"]))
    known = None if labels is None else Labelled(labels, positive)
    if known is not None:
        known.check_labels(reader.listed(expand_path(variants)))
    pairs = reader.variants(expand_path(variants), expand_path(reference))

    def rows() -> Iterator[dict[str, Any]]:
        for scored in meter.counted(scores(request, pairs, batch_size=options["batch_size"])):
            if known is not None:
                known.add(scored.variant, scored.score)
            yield score_row(scored)

    meter = _Meter("variants")
    _write(path, table(rows(), kind), meter)
    if note := reader.skipped.note:
        click.echo(note, err=True)
    for line in () if known is None else known.lines():
        click.echo(line, err=path is None)


@genomics.command()
@_RUN
@click.option("--prompt", default="", help="Letters to continue.  [default: one random letter]")
@click.option(
    "--length", type=click.IntRange(1), default=500, show_default=True, help="Letters to generate."
)
@click.option(
    "--count", type=click.IntRange(1), default=1, show_default=True, help="Sequences to generate."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0: greedy.",
)
@click.option("--top-k", type=click.IntRange(1), help="Sample from the k likeliest letters.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample from the likeliest letters with this total probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Random seed of the samples.",
)
@_with(_USED)
def generate(run: str, device: str, policy: str, **options: Any) -> None:
    """Generate sequences with a pretrained RUN, and print them as FASTA."""
    from narrowcast.workloads.genomics.inference.finished import finished, require_target
    from narrowcast.workloads.genomics.inference.write import Wish, fasta, sequences

    requested = finished(run, device=device, policy=policy)
    require_target(requested, writes=True, instead="Use a run of `narrowcast genomics pretrain`.")
    wish, meter = Wish(**options), _Meter("letters")
    bases = requested.alphabet.complement is not None
    written = sequences(requested, wish, meter.at)
    for number, sequence in enumerate(written, 1):
        meter.clear()
        click.echo(fasta(sequence, number, wish, bases=bases), nl=False)
    meter.clear()


def parse_overrides(overrides: Sequence[str]) -> list[str]:
    """Return recipe overrides from files and KEY=VALUE words."""
    settings = [
        word for word in overrides if _SETTING.match(word) and not expand_path(word).is_file()
    ]
    files = [word for word in overrides if word not in settings]
    if not files:
        raise ConfigError(
            "pretrain needs sequences. Give one or more FASTA, FASTQ or GenBank files."
        )
    if clash := [word for word in settings if word.startswith(("data.path=", "data.more="))]:
        raise ConfigError(f"{clash[0]} is set by the files on the command line. Leave it out.")
    first, *more = (json.dumps(name, ensure_ascii=False) for name in files)
    also = [f"data.more=[{', '.join(more)}]"] if more else []
    return [f"data.path={first}", *also, *settings]


def _output_path(name: str, *, reads: Sequence[str | None]) -> Path | None:
    """Check that the output can be written before anything is computed; None is stdout."""
    if name == "-":
        return None
    path = expand_path(name)
    if not name.strip() or path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{name} cannot be written: {why}. Write a file in an existing folder.")
    for read in (expand_path(each) for each in reads if each is not None):
        if path.exists() and read.exists() and path.samefile(read):
            raise ConfigError(
                f"The output {shown_path(path)} is also an input. Write another file with -o."
            )
    return path


def _write(path: Path | None, lines: Iterable[str], meter: "_Meter") -> None:
    """Write lines to stdout as they come, or to a file that appears when it is complete."""
    if path is None:
        for line in lines:
            meter.clear()
            click.echo(line, nl=False)
        meter.clear()
        return
    with (
        written_atomically(path, hint="or name another file with -o") as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        file.writelines(lines)
    meter.clear()
    click.echo(f"wrote {path}")


@final
class _Meter:
    """Progress on stderr: one updated line on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._said = what, time.monotonic()
        self._live = sys.stderr.isatty()
        self._drawn = False

    def at(self, done: int) -> None:
        """Print the count if it is time to."""
        now = time.monotonic()
        if now - self._said < (0.2 if self._drawn and self._live else LINE_SECONDS):
            return
        self._said, self._drawn = now, True
        text = f"{done:,} {self._what}"
        click.echo(f"\r{text}" if self._live else text, err=True, nl=not self._live)

    def counted(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items and count them."""
        for done, item in enumerate(items, 1):
            yield item
            self.at(done)

    def clear(self) -> None:
        if self._live and self._drawn:
            click.echo(f"\r{' ' * 40}\r", err=True, nl=False)
            self._drawn = False
