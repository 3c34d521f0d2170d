"""Predictions of `narrowcast genomics predict` against the network called by itself."""

import csv
import json

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

from narrowcast.cli.entry import run_command
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.inference.finished import finished as loaded
from narrowcast.workloads.genomics.inference.predict import Prediction, intervals, lines
from narrowcast.workloads.genomics.inference.quantize import quantization_note
from narrowcast.workloads.genomics.targets import EveryLetter


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def encoded(run, *texts):
    return torch.from_numpy(np.stack([run.tokenizer.encode(text) for text in texts]))


@torch.no_grad()
def asked(run, *texts):
    return run.network(*(encoded(run, text) for text in texts[:1]), None, *(
        encoded(run, text) for text in texts[1:]
    ))[0].double()  # fmt: skip


def test_chances_of_pairs_are_those_of_the_network(finished, tmp_path):
    folder = finished("pairs")
    source, out = folder.parent / "pairs_test.csv", tmp_path / "out.csv"
    words = ["genomics", "predict", str(folder), str(source), "-o", str(out), "--batch-size", "7"]
    assert run_command(words) == 0
    run, given = loaded(str(folder), device="cpu"), rows(source)
    found = rows(out)
    assert [row["name"] for row in found] == [str(n) for n in range(1, len(given) + 1)]
    for row, pair in zip(found, given, strict=True):
        chances = asked(run, pair["sequence"], pair["alternative"]).softmax(0)
        told = [float(row[f"chance_{name}"]) for name in run.info.classes]
        # fp32 sums over a batch in another order, and six digits are written.
        assert told == pytest.approx(chances.tolist(), rel=1e-4)
        assert row["class"] == run.info.classes[int(chances.argmax())]


def test_values_are_in_the_units_of_the_labels(finished, tmp_path):
    folder, out = finished("values"), tmp_path / "out.jsonl"
    source = folder.parent / "values.csv"
    assert run_command(["genomics", "predict", str(folder), str(source), "-o", str(out)]) == 0
    run = loaded(str(folder), device="cpu")
    assert run.info.spread != 1
    for line, given in zip(out.read_text().splitlines(), rows(source), strict=True):
        value = asked(run, given["sequence"])[0].item() * run.info.spread + run.info.centre
        assert json.loads(line)["value"] == pytest.approx(value, rel=1e-4)


def test_stretches_cover_a_record_longer_than_a_window(finished, tmp_path):
    folder, out = finished("letters"), tmp_path / "out.tsv"
    fasta = tmp_path / "long.fa"
    text = "ACGTTGCAAGC" * 20
    fasta.write_text(f">long one\n{text}\n>short\nACGT\n")
    assert run_command(["genomics", "predict", str(folder), str(fasta), "-o", str(out)]) == 0
    run = loaded(str(folder), device="cpu")
    classes = []
    for start in range(0, len(text), 64):
        found = asked(run, text[start : start + 64])
        classes += [run.info.classes[kind] for kind in found.argmax(-1).tolist()]
    told = [row for row in rows(out) if row["name"] == "long"]
    spread = [row["class"] for row in told for _ in range(int(row["start"]), int(row["end"]) + 1)]
    assert spread == classes
    assert [int(row["start"]) for row in told[1:]] == [int(row["end"]) + 1 for row in told[:-1]]
    assert {row["name"] for row in rows(out)} == {"long", "short"}


def test_gff_and_bed_say_the_same_and_leave_out_what_lies_between(finished, tmp_path):
    folder, fasta = finished("letters"), tmp_path / "a.fa"
    fasta.write_text(">a;b\n" + "ACGTTGCAAGC" * 6 + "\n")
    for name in ("out.gff3", "out.bed", "out.csv"):
        words = ["genomics", "predict", str(folder), str(fasta), "-o", str(tmp_path / name)]
        assert run_command(words) == 0
    table = [row for row in rows(tmp_path / "out.csv") if row["class"] != "other"]
    head, *gff = (tmp_path / "out.gff3").read_text().splitlines()
    assert head == "##gff-version 3"
    assert [line.split("\t")[:5] for line in gff] == [
        ["a%3Bb", "narrowcast", row["class"], row["start"], row["end"]] for row in table
    ]
    bed = [line.split("\t") for line in (tmp_path / "out.bed").read_text().splitlines()]
    assert [row[:4] for row in bed] == [
        ["a;b", str(int(row["start"]) - 1), row["end"], row["class"]] for row in table
    ]


def test_intervals_of_chances():
    chances = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.6, 0.4]])
    found = [tuple(row.values()) for row in intervals([Prediction("r", chances)], ("O", "G"))]
    assert found == [("r", 1, 2, "O", 0.8), ("r", 3, 3, "G", 0.8), ("r", 4, 4, "O", 0.6)]


def test_a_policy_is_obeyed(finished):
    folder, text = str(finished("values")), "ACGT" * 10
    found = {
        policy: loaded(folder, device="cpu", policy=policy).answers(
            [type("Row", (), {"sequence": text, "alternative": "", "place": ""})()]
        )[0].item()
        for policy in ("fp32", "bf16")
    }  # fmt: skip
    # Eight bits of mantissa: close, and not the same.
    assert found["bf16"] == pytest.approx(found["fp32"], abs=0.05)
    assert found["bf16"] != found["fp32"]


def test_long_sequences_are_cut_as_in_training_and_said_to_be(finished, tmp_path, capsys):
    folder, source = finished("values"), tmp_path / "long.csv"
    source.write_text("sequence\n" + "ACGT" * 30 + "\n" + "ACGT" * 16 + "\n")
    assert run_command(["genomics", "predict", str(folder), str(source)]) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()[1:]
    assert first.partition(",")[2] == second.partition(",")[2]
    assert "1 sequences were longer than 64 letters and were cut" in said.err


@pytest.mark.parametrize(("kind", "column"), [("gff", 6), ("bed", 5)])
def test_features_of_one_strand_are_written_as_they_are_read(kind, column):
    target = EveryLetter(classes=("none", "gene-", "gene+", "+"))
    found = Prediction("chr1", np.eye(4)[[0, 1, 1, 2, 2, 3]])
    features = [line.split("\t") for line in lines([found], target, kind) if "chr1" in line]
    assert [row[column].strip() for row in features] == ["-", "+", "."]
    assert [row[2 if kind == "gff" else 3] for row in features] == ["gene", "gene", "+"]


@pytest.mark.parametrize("weights_format", ["int8", "e4m3"])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_weights_in_8_bits_predict_as_their_dequantised_values(finished, weights_format, policy):
    name = str(finished("values"))
    quantised = loaded(name, device="cpu", weights_format=weights_format, policy=policy)
    records = [Row(sequence=text, alternative="") for text in ("ACGTACGT", "TTTTGGGG", "ACCA")]
    outputs, _ = quantised.answers(records)
    plain = loaded(name, device="cpu", policy=policy)
    assert not torch.equal(outputs, plain.answers(records)[0])
    stored = [
        (name, module)
        for name, module in quantised.network.named_modules()
        if parametrize.is_parametrized(module)
    ]
    assert len(stored) == quantised.quantized
    with torch.no_grad():
        for layer, module in stored:
            weight = plain.network.get_parameter(f"{layer}.weight")
            rows = weight.flatten(1)
            largest = rows.abs().amax(1)
            if weights_format == "int8":
                zeros = torch.zeros(len(rows), dtype=torch.int32)
                expected = torch.fake_quantize_per_channel_affine(
                    rows, largest / 127, zeros, 0, -127, 127
                )
            else:
                scale = (largest / 448).numpy()[:, None]
                codes = (rows.numpy() / scale).astype(ml_dtypes.float8_e4m3fn)
                expected = torch.from_numpy(codes.astype(np.float32) * scale)
            torch.testing.assert_close(module.weight.flatten(1), expected, rtol=1e-6, atol=0)
            weight.copy_(module.weight)
    tolerance = 1e-5 if policy == "fp32" else 2**-6
    again = plain.answers(records)[0]
    torch.testing.assert_close(again, outputs, rtol=tolerance, atol=tolerance)


def test_error_of_8_bit_weights_is_measured_against_fp32(finished):
    name = str(finished("values"))
    rows = [Row(sequence=text, alternative="") for text in ("ACGTACGT", "TTTTGGGG", "ACCA")]
    full, stored = (loaded(name, device="cpu", weights_format=each) for each in ("full", "int8"))
    note = quantization_note(stored, full, rows)
    error = (stored.answers(rows)[0] - full.answers(rows)[0]).square().mean().sqrt().item()
    assert f"differ from fp32 by {error:.2g} (root mean square" in note
    assert "in int8: " in note
