"""Scores of variants against likelihoods that torch computes here."""

import csv

import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from narrowcast.cli.entry import run_command
from narrowcast.workloads.genomics.inference.finished import finished as loaded

GENOME = "".join("ACGT"[(7 * n * n + n // 5) % 4] for n in range(400))
PLACES = [100, 150, 200, 250, 300, 20]
OPPOSITE = str.maketrans("ACGTN", "TGCAN")


@pytest.fixture
def variants(tmp_path):
    """A reference and variants of it; the last lies near its beginning."""
    (tmp_path / "ref.fa").write_text(f">chr1\n{GENOME}\n")
    lines = ["chrom,pos,ref,alt,kind,size"]
    for number, at in enumerate(PLACES):
        old = GENOME[at - 1]
        new = "ACGT"[("ACGT".index(old) + 1 + number % 3) % 4]
        lines.append(f"1,{at},{old},{new},{'bad' if number % 2 else 'good'},{number * number}")
    (tmp_path / "v.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def scored(folder, home, *more):
    words = ["genomics", "score", str(folder), str(home / "v.csv"), "--reference"]
    code = run_command([*words, str(home / "ref.fa"), "-o", str(home / "out.csv"), *more])
    assert code == 0
    with (home / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def window(at, letter, length):
    """The letters around a place, N beyond the beginning."""
    left = at - 1 - (length - 1) // 2
    text = "N" * max(-left, 0) + GENOME[max(left, 0) : at - 1] + letter + GENOME[at:]
    return text[:length]


@torch.no_grad()
def likelihood(run, text):
    total = 0.0
    ids = torch.from_numpy(run.tokenizer.encode(text))
    logits = run.network(ids[None])[0].double()
    for place in range(1, len(ids)):
        if text[place] != "N":
            chances = torch.softmax(logits[place - 1], 0)
            total += torch.log(chances[ids[place]]).item()
    return total


def test_a_base_gives_the_ratio_of_likelihoods_over_both_strands(finished, variants):
    folder = finished("base")
    found, run = scored(folder, variants), loaded(str(folder), device="cpu")
    for row, at in zip(found, PLACES, strict=True):
        ratios = []
        before, after = (window(at, row[key], 64) for key in ("ref", "alt"))
        for turn in (lambda text: text, lambda text: text.translate(OPPOSITE)[::-1]):
            ratios.append(likelihood(run, turn(after)) - likelihood(run, turn(before)))
        # Sums of 63 logarithms in fp32 logits.
        assert float(row["score"]) == pytest.approx(sum(ratios) / 2, abs=1e-4)


def test_an_indel_of_a_short_contig_costs_no_letters_more(finished, tmp_path):
    # The window has 64 letters, the contig fewer: nothing is pushed out at its end.
    contig = GENOME[:50]
    inserted, deleted = contig[:20] + "GAT" + contig[20:], contig[:30] + contig[33:]
    (tmp_path / "ref.fa").write_text(f">1\n{contig}\n")
    lines = ["chrom,pos,ref,alt", f"1,20,{contig[19]},{contig[19]}GAT"]
    lines.append(f"1,30,{contig[29:33]},{contig[29]}")
    (tmp_path / "v.csv").write_text("\n".join(lines) + "\n")
    # The longer one loses three letters, on the side that has more beside the variant.
    windows = [
        ("N" * 11 + contig, "N" * 11 + inserted[:-3]),
        ("N" + "NNN" + contig[3:], "N" + deleted),
    ]
    folder = finished("base")
    found, run = scored(folder, tmp_path), loaded(str(folder), device="cpu")
    for row, texts in zip(found, windows, strict=True):
        before, after = (text.ljust(64, "N") for text in texts)
        assert before.count("N") == after.count("N")
        ratios = []
        for turn in (lambda text: text, lambda text: text.translate(OPPOSITE)[::-1]):
            ratios.append(likelihood(run, turn(after)) - likelihood(run, turn(before)))
        assert float(row["score"]) == pytest.approx(sum(ratios) / 2, abs=1e-4)


def test_a_run_of_pairs_gives_chances_and_the_score_is_that_of_the_last_class(finished, variants):
    folder = finished("pairs")
    found, run = scored(folder, variants), loaded(str(folder), device="cpu")
    for row, at in zip(found, PLACES, strict=True):
        before, after = (
            torch.from_numpy(run.tokenizer.encode(window(at, row[key], 64)))[None]
            for key in ("ref", "alt")
        )
        with torch.no_grad():
            chances = run.network(before, None, after)[0].softmax(0).tolist()
        told = [float(row[f"chance_{name}"]) for name in run.info.classes]
        assert told == pytest.approx(chances, rel=1e-4)
        assert float(row["score"]) == pytest.approx(chances[1], rel=1e-4)


def test_scores_are_held_against_labels(finished, variants, capsys):
    found = scored(finished("base"), variants, "--labels", "kind", "--positive", "good")
    scores = [float(row["score"]) for row in found]
    truth = [number % 2 == 0 for number in range(len(PLACES))]
    said = capsys.readouterr().out
    assert "6 variants; 3 are good, which should have high scores" in said
    assert f"AUROC {sk.roc_auc_score(truth, scores):.4f}" in said
    assert f"AUPRC {sk.average_precision_score(truth, scores):.4f}" in said
    assert f"Spearman {stats.spearmanr(truth, scores).statistic:.4f}" in said


def test_numbers_as_labels_are_ranked(finished, variants, capsys):
    found = scored(finished("base"), variants, "--labels", "size")
    scores = [float(row["score"]) for row in found]
    sizes = [number * number for number in range(len(PLACES))]
    said = capsys.readouterr().out
    assert f"Spearman {stats.spearmanr(sizes, scores).statistic:.4f}" in said
    assert "AUROC" not in said


def test_labels_of_a_vcf_are_in_its_info(finished, tmp_path, capsys):
    (tmp_path / "ref.fa").write_text(f">1\n{GENOME}\n")
    lines = ["##fileformat=VCFv4.2", "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO"]
    for number, at in enumerate(PLACES):
        old = GENOME[at - 1]
        new, info = "ACGT"[("ACGT".index(old) + 1) % 4], f"KIND={number % 2}" if number else "."
        lines.append(f"chr1\t{at}\t.\t{old}\t{new}\t.\t.\t{info}")
    (tmp_path / "v.csv").write_text("\n".join(lines) + "\n")
    scored(finished("base"), tmp_path, "--labels", "KIND")
    said = capsys.readouterr().out
    assert "5 variants, 1 without a label; 3 are 1, which should have high scores" in said


@pytest.mark.parametrize("words", [("--labels", "nix"), ("--labels", "kind", "--positive", "x")])
def test_labels_that_fit_nothing_are_refused_before_scores_are_computed(
    finished, variants, capsys, words
):
    asked = [str(variants / "v.csv"), "--reference", str(variants / "ref.fa"), *words]
    assert run_command(["genomics", "score", str(finished("base")), *asked]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words[-1] in said.err
