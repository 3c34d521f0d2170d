"""Readers of sequences beside biopython and pysam, and how fast tokens are made.

Run: python benchmarks/sequences.py [--genome FASTA] [--json PATH]

Files are made: one record of five million bases in lines of 70 (or `--genome`, plain or gzip), and
200,000 records of 100 bases as FASTA and FASTQ. narrowcast's times include that every letter is
looked at; `biopython, cleaned` is biopython with the same look at each of its sequences. Times are
seconds on the processor, the best of three. The second table is what a reader does with files that
are damaged: an error, or as many records as it made of them. Whoever is not installed is left out.
"""

import argparse
import gzip
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.runs import describe_machine
from narrowcast.workloads.genomics.sequences.alphabets import DNA
from narrowcast.workloads.genomics.sequences.operations import kmer_counts, reverse_complement
from narrowcast.workloads.genomics.sequences.readers.reading import read_records
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer

BASES, RECORDS, LENGTH = 5_000_000, 200_000, 100

DAMAGED = {
    "a letter that is none": (".fa", b">a\nACGT\n>b\nAC!T\n"),
    "a name twice": (".fa", b">a\nACGT\n>a\nGGTT\n"),
    "DNA, then protein": (".fa", b">a\nACGT\n>b\nMKVLEW\n"),
    "a gzip that is cut off": (".fa.gz", gzip.compress(b">a\n" + b"ACGT" * 9 + b"\n")[:-12]),
    "qualities shorter than letters": (".fq", b"@a\nACGT\n+\nIIII\n@b\nACGT\n+\nII\n"),
    "a FASTQ that ends within a record": (".fq", b"@a\nACGT\n+\nIIII\n@b\nACGT\n"),
}


def write_files(folder: Path, genome: Path | None) -> dict[str, Path]:
    chance = np.random.default_rng(0)
    files = {name: folder / name for name in ("one record", "FASTA", "FASTQ")}
    if genome is None:
        letters = np.frombuffer(b"ACGT", np.uint8)[chance.integers(0, 4, BASES)].tobytes()
        lines = [letters[at : at + 70] for at in range(0, BASES, 70)]
        files["one record"].write_bytes(b">genome\n" + b"\n".join(lines) + b"\n")
    else:
        files["one record"] = genome
    bases = np.frombuffer(b"ACGT", np.uint8)[chance.integers(0, 4, (RECORDS, LENGTH))]
    with files["FASTA"].open("wb") as fasta, files["FASTQ"].open("wb") as fastq:
        for number, row in enumerate(bases):
            sequence = row.tobytes()
            fasta.write(b">r%d\n%s\n" % (number, sequence))
            fastq.write(b"@r%d\n%s\n+\n%s\n" % (number, sequence, b"I" * LENGTH))
    return files


def by_narrowcast(path: Path, kind: str) -> Iterable[Any]:
    return read_records(path, alphabet=DNA)


def by_biopython(path: Path, kind: str) -> Iterable[Any]:
    from Bio import SeqIO

    packed = path.read_bytes()[:2] == b"\x1f\x8b"
    with gzip.open(path, "rt") if packed else path.open() as file:
        yield from SeqIO.parse(file, kind)


def by_biopython_cleaned(path: Path, kind: str) -> Iterable[Any]:
    return (DNA.clean(bytes(record.seq)) for record in by_biopython(path, kind))


def by_pysam(path: Path, kind: str) -> Iterable[Any]:
    import pysam

    with pysam.FastxFile(str(path)) as file:
        yield from file


READERS = {
    "narrowcast": by_narrowcast,
    "biopython": by_biopython,
    "biopython, cleaned": by_biopython_cleaned,
    "pysam": by_pysam,
}


def seconds(work: Callable[[], Any]) -> float:
    """Return the best of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return round(min(times), 4)


def reading(files: dict[str, Path]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for reader, read in READERS.items():
        try:
            rows[reader] = {
                name: seconds(
                    lambda: sum(1 for _ in read(path, "fastq" if name == "FASTQ" else "fasta"))  # noqa: B023
                )
                for name, path in files.items()
            }
        except ModuleNotFoundError as error:
            print(f"{reader} is left out: {error}")
    return rows


def damage(folder: Path, readers: Iterable[str]) -> dict[str, dict[str, str]]:
    told: dict[str, dict[str, str]] = {}
    for what, (suffix, content) in DAMAGED.items():
        path = folder / f"damaged{suffix}"
        path.write_bytes(content)
        for reader in readers:
            kind = "fastq" if ".fq" in suffix else "fasta"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    answer = f"{len(list(READERS[reader](path, kind)))} records"
            except Exception as error:  # noqa: BLE001  # what others raise is the question
                answer = f"{type(error).__name__}: {error}".replace(str(path), path.name)
            told.setdefault(what, {})[reader] = answer
    return told


def tokens(sequence: str) -> dict[str, float]:
    byte, kmer, dense = Tokenizer(DNA), Tokenizer(DNA, 3, 1), Tokenizer(DNA, 6, 5)
    works = {
        "encode, a letter a token": lambda: byte.encode(sequence),
        "encode, k=3 overlap=1": lambda: kmer.encode(sequence),
        "encode, k=6 overlap=5": lambda: dense.encode(sequence),
        "reverse complement": lambda: reverse_complement(sequence),
        "6-mer counts": lambda: kmer_counts(sequence, 6),
    }
    return {name: seconds(work) for name, work in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--genome", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_files(folder, options.genome)
        read = reading(files)
        damaged = damage(folder, [reader for reader in read if "cleaned" not in reader])
        sequence = next(iter(read_records(files["one record"], alphabet=DNA))).sequence
        made = tokens(sequence)
    print("| seconds | " + " | ".join(files) + " |\n|---|" + "---|" * len(files))
    for reader, times in read.items():
        print(f"| {reader} | " + " | ".join(f"{each:.3f}" for each in times.values()) + " |")
    for what, answers in damaged.items():
        print(f"\n{what}")
        for reader, answer in answers.items():
            print(f"  {reader}: {answer}")
    print(f"\n| {len(sequence):,} bases | seconds |\n|---|---|")
    for work, took in made.items():
        print(f"| {work} | {took:.3f} |")
    if options.json:
        figures = {"environment": environment, "bases": len(sequence), "records": RECORDS}
        figures |= {"length": LENGTH, "reading": read, "damaged": damaged, "tokens": made}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
