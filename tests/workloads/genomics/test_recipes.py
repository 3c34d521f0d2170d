"""The five recipes with the sequences they make, and less of everything."""

import json
import math

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.runs import EvalRecord
from narrowcast.workloads.genomics.data.made import made_rows, markov_entropy

WORDS = (
    "epochs=null", "model.width=16", "model.dropout=0", "eval.every=0", "eval.patience=0",
    "eval.keep_best=false", "health.every=0", "device=cpu", "precision.task=null",
    "precision.policy=fp32", "gradient_accumulation_steps=1", "batch_size=16", "optimizer.lr=1e-2",
    "lr_schedule.warmup_ratio=0.1",
)  # fmt: skip


def measured(recipe, folder, *words):
    records = list(nc.train(f"genomics/{recipe}", [*WORDS, *words], out=folder))
    (judged,) = [record.metrics for record in records if isinstance(record, EvalRecord)]
    told = json.loads((folder / "judged.json").read_text())["validation"]["measured"]
    # What is judged again when training is over is what was judged before.
    assert {key: judged[key] for key in judged if key != "of_source"} == pytest.approx(told)
    return judged


def test_promoters_and_genes_are_found(tmp_path):
    words = ("steps=60", "data.max_length=128", "model.backbone=cnn")
    found = measured("annotation", tmp_path / "r", *words)
    assert found["mcc"] > 0.1  # chance gives 0, give or take 0.01 for so many letters


def test_variants_that_break_a_site_are_found(tmp_path):
    found = measured("variant_effect", tmp_path / "r", "steps=60", "model.backbone=cnn")
    assert found["auroc"] > 0.6  # half by chance


def test_the_motifs_of_proteins_are_found(tmp_path):
    words = ("steps=80", "model.backbone=cnn", "model.layers=1", "model.width=32",
             "objective.function=ec", "optimizer.lr=5e-3")  # fmt: skip
    found = measured("protein_function", tmp_path / "r", *words)
    assert found["accuracy"] > 2 / 7  # twice what chance gives


def test_a_genome_is_foretold_better_than_by_how_frequent_letters_are(tmp_path):
    found = measured("generation", tmp_path / "r", "steps=40", "data.max_length=128")
    (genome,) = made_rows("generation", function="", seed=0, part="validation")
    shares = np.unique(list(genome.sequence), return_counts=True)[1] / len(genome.sequence)
    assert markov_entropy() < found["loss"] < -(shares * np.log(shares)).sum()
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_a_domain_is_adapted_to_from_one_that_was_learnt(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowcast.workloads.genomics.build.SOURCE_STEPS", 60)
    monkeypatch.setattr("narrowcast.workloads.genomics.build.SOURCE_LR", 1e-2)
    words = ("steps=20", "model.backbone=cnn", "model.layers=1", "model.width=32")
    found = measured("domain_adaptation", tmp_path / "r", *words)
    assert found["accuracy"] > 0.75
    assert found["of_source"] > 0.25  # what was learnt before the run is not forgotten
