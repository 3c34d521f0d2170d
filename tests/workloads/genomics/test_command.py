"""`narrowcast genomics` from the command line: what it answers, and with which exit code."""

import json
import shutil
import subprocess
import sys

import pytest

import narrowcast as nc
from narrowcast.cli.entry import run_command
from narrowcast.workloads.genomics.command import parse_overrides

SMALL = (
    "epochs=null", "steps=2", "model.width=16", "model.layers=1", "data.max_length=32",
    "device=cpu", "precision.task=null",
)  # fmt: skip


@pytest.fixture
def genome(tmp_path):
    (tmp_path / "a.fa").write_text(">a\n" + "ACGTTGCA" * 40 + "\n")
    (tmp_path / "b.fa").write_text(">b\n" + "GGCATTAC" * 40 + "\n")
    return tmp_path


def test_a_base_is_what_another_run_goes_on_from(genome, capsys):
    out = genome / "base"
    files = [str(genome / "a.fa"), str(genome / "b.fa")]
    assert run_command(["genomics", "pretrain", *files, "-o", str(out), *SMALL, "-q"]) == 0
    kept = json.loads((out / "genomics.json").read_text())
    assert (kept["task"], kept["config"]["causal"]) == ("generation", True)
    words = [f"data.path={files[0]}", f"model.path={out}", *SMALL[1:2], "data.max_length=32"]
    with nc.train("genomics/generation", [*words, "epochs=null", "precision.task=null"]) as run:
        assert f"weights loaded from {out}" in run.task.info.notes[-1]
    # Both files were read: 320 letters each, a tenth of which is judged on.
    with nc.train("genomics/pretrain", [*parse_overrides(files), *SMALL]) as run:
        letters = sum(len(run.task.train_data.tokens[n]) for n in range(len(run.task.train_data)))
    assert letters == 2 * 288


def test_files_and_settings_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd=name.fa").write_text(">a\nACGT\n")
    assert parse_overrides(["odd=name.fa", "steps=3", 'a "b".fa']) == [
        'data.path="odd=name.fa"', 'data.more=["a \\"b\\".fa"]', "steps=3",
    ]  # fmt: skip


TABLE = "sequence,alternative\nACGT,ACGA\nACGT,AC!A\n"


@pytest.mark.parametrize(
    ("name", "words", "said", "code"),
    [
        ("base", ["predict", "RUN", "a.fa"], "was trained for generation, which this", 2),
        ("pairs", ["predict", "RUN", "a.fa"], "a.fa, record 1 has no column 'alternative'", 2),
        ("pairs", ["predict", "RUN", "bad.csv"], "bad.csv, record 2", 2),
        ("values", ["predict", "RUN", "none.fa"], "none.fa cannot be read: No such file", 2),
        ("values", ["predict", "RUN", "a.fa", "--format", "gff"], "must be csv, tsv, jsonl", 2),
        ("values", ["predict", "RUN", "a.fa", "-o", "x.txt"], "must be csv, tsv, jsonl", 2),
        ("values", ["predict", "RUN", "a.fa", "-o", "no/x.csv"], "there is no folder no", 2),
        ("values", ["predict", "RUN", "a.fa", "-o", "a.fa"], "a.fa is also an input", 2),
        ("values", ["predict", "RUN", "a.fa", "--reference", "b.fa"], "single sequences", 2),
        ("values", ["predict", "RUN", "a.fa", "--device", "tpu"], "mps or auto, got tpu", 3),
        ("values", ["predict", "RUN", "a.fa", "--policy", "bf61"], "bf61", 2),
        ("values", ["predict", "nowhere", "a.fa"], "Give the folder of a finished genomics run", 2),
        ("values", ["score", "RUN", "v.csv", "--reference", "a.fa"], "on single sequences", 2),
        ("base", ["score", "RUN", "v.csv", "--reference", "b.fa"], "v.csv, record 1: a:3 is", 2),
        ("base", ["score", "RUN", "v.csv", "--reference", "a.fa", "--labels", "x"],
         "v.csv, record 1 has no column x, got kind", 2),
        ("base", ["score", "RUN", "v.csv", "--reference", "a.fa", "--labels", "kind"],
         "all labels are 'one', so there is nothing to compare", 2),
        ("base", ["score", "RUN", "v.csv", "--reference", "a.fa", "--position", "at"],
         "v.csv, record 1 has no column at", 2),
        ("base", ["score", "RUN", "v.csv", "--reference", "a.fa", "--positive", "one"],
         "--positive needs --labels", 2),
        ("values", ["generate", "RUN"], "Use a run of `narrowcast genomics pretrain`", 2),
        ("base", ["generate", "RUN", "--prompt", "AC!"], "--prompt", 2),
        ("base", ["generate", "RUN", "--top-p", "0"], "--top-p", 2),
        ("base", ["pretrain"], "pretrain needs sequences", 2),
        ("base", ["pretrain", "a.fa", "data.path=b.fa"], "is set by the files", 2),
        ("base", ["pretrain", "none.fa"], "none.fa cannot be read", 2),
        ("base", ["pretrain", "a.fa", "stepps=2"], "Did you mean steps", 2),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(
    finished, genome, monkeypatch, capsys, name, words, said, code
):
    monkeypatch.chdir(genome)
    (genome / "bad.csv").write_text(TABLE)
    (genome / "v.csv").write_text("chrom,pos,ref,alt,kind\na,3,G,T,one\na,4,T,G,one\n")
    folder = str(finished(name))
    assert run_command(["genomics", *(folder if w == "RUN" else w for w in words)]) == code
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_a_file_is_whole_or_not_there(finished, genome):
    (genome / "bad.csv").write_text(TABLE)
    out = genome / "out.csv"
    out.write_text("as it was")
    words = ["genomics", "predict", str(finished("pairs")), str(genome / "bad.csv"), "-o", str(out)]
    assert run_command([*words, "--batch-size", "1"]) == 2
    assert out.read_text() == "as it was"
    assert not list(genome.glob("out.csv?*"))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("genomics.json", "{", "is damaged"),
        ("genomics.json", None, "Give the folder of a finished genomics run"),
        ("genomics.json", "[]", "is damaged"),
        ("model.safetensors", "x", "is damaged"),
        ("model.safetensors", None, "the run is not finished"),
    ],
)
def test_a_damaged_run_is_said_to_be(finished, tmp_path, capsys, file, text, said):
    folder = tmp_path / "run"
    shutil.copytree(finished("base"), folder)
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    assert run_command(["genomics", "generate", str(folder)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"alphabet": "martian"}, {"tokenizer": "kmer"}, {"task": "x"}, {"max_length": "long"},
        {"strange": 1}, {"classes": 3}, {"config": {"vocab_size": 11, "width": 10**6}},
        {"config": {"vocab_size": 11, "order": 1}}, {"config": {"width": 16}},
    ],
)  # fmt: skip
def test_a_run_of_something_else_is_said_to_be_damaged(finished, tmp_path, capsys, change):
    folder = tmp_path / "run"
    shutil.copytree(finished("base"), folder)
    kept = json.loads((folder / "genomics.json").read_text())
    (folder / "genomics.json").write_text(json.dumps({**kept, **change}))
    assert run_command(["genomics", "generate", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "damaged" in said or "do not match genomics.json" in said


def test_weights_that_are_no_numbers_are_no_letters(finished, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "run"
    shutil.copytree(finished("base"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["head.out.bias"] += float("nan")
    save_file(weights, folder / "model.safetensors")
    assert run_command(["genomics", "generate", str(folder)]) == 4
    assert "NaN" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_python")
def test_a_reader_that_has_seen_enough_ends_it_quietly(finished):
    words = [sys.executable, "-m", "narrowcast", "genomics", "generate", str(finished("base"))]
    with subprocess.Popen(
        [*words, "--length", "20", "--count", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout.readline().startswith(">sample_1")
        run.stdout.close()
        assert run.wait(timeout=120) == 1
        assert "Traceback" not in run.stderr.read()
