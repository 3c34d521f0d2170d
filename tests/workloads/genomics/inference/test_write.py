"""Sequences of `narrowcast genomics generate` against letters that are chosen here."""

import torch

from narrowcast.cli.entry import run_command
from narrowcast.workloads.genomics.inference.finished import finished as loaded


def written(capsys, folder, *more):
    assert run_command(["genomics", "generate", str(folder), "--device", "cpu", *more]) == 0
    records = capsys.readouterr().out.split(">")[1:]
    return ["".join(record.splitlines()[1:]) for record in records]


def test_without_temperature_the_likeliest_letter_follows(finished, capsys):
    folder = finished("base")
    (text,) = written(capsys, folder, "--prompt", "acgta", "--length", "20", "--temperature", "0")
    run, expected = loaded(str(folder), device="cpu"), "ACGTA"
    letters = torch.from_numpy(run.tokenizer.encode("ACGT"))
    for _ in range(20):
        ids = torch.from_numpy(run.tokenizer.encode(expected))[None]
        with torch.no_grad():
            logits = run.network(ids)[0, -1]
        expected += "ACGT"[int(logits[letters].argmax())]
    assert text == expected


def test_a_seed_means_the_same_sequences_and_another_others(finished, capsys):
    folder, words = finished("base"), ("--length", "70", "--count", "3")
    one, two = (written(capsys, folder, *words) for _ in range(2))
    other = written(capsys, folder, *words, "--seed", "1")
    assert one == two
    assert len({*one, *other}) == 6
    # Without a prompt a letter is drawn to begin with; lines are of 60 letters.
    assert {len(text) for text in one} == {70}
    assert set("".join(one)) <= set("ACGT")


def test_sequences_grow_longer_than_what_the_run_was_trained_on(finished, capsys):
    folder = finished("base")
    (text,) = written(capsys, folder, "--prompt", "ACGT", "--length", "90", "--temperature", "0")
    run = loaded(str(folder), device="cpu")
    letters = torch.from_numpy(run.tokenizer.encode("ACGT"))
    # The last letters follow from those of a window, in steps of 16 tokens behind it.
    begun = len(text) - 1 - (len(text) - 1 - 4) % 16
    context = text[begun - 48 : -1]
    ids = torch.from_numpy(run.tokenizer.encode(context))[None]
    with torch.no_grad():
        assert text[-1] == "ACGT"[int(run.network(ids)[0, -1][letters].argmax())]
