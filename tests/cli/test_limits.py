"""What no machine could do is refused at once; what a name leads to is looked at first."""

import os
import subprocess
import time
from pathlib import Path

import pytest

SMALL = (
    "steps=6", "batch_size=2", "model.layers=1", "model.width=16", "model.heads=2",
    "data.length=16", "health.every=0", "data.eval_windows=4",
)  # fmt: skip


def test_workers_are_not_forked_until_the_machine_is_full(narrowcast, tmp_path):
    ended = narrowcast("train", "quickstart", "data.workers=1099511627776", "--out", tmp_path / "r")
    assert ended.code == 2
    assert "data.workers=1099511627776: must be at most 1024" in ended.err
    assert not (tmp_path / "r").exists()


def test_layers_beyond_the_deepest_are_refused_and_the_deepest_are_planned(narrowcast):
    began = time.monotonic()
    assert "at most 2048" in narrowcast("plan", "quickstart", "model.layers=20000").err
    assert "M parameters" in narrowcast("plan", "quickstart", "model.layers=2048").out
    assert time.monotonic() - began < 30  # a second and a half on a machine that does nothing else


@pytest.mark.parametrize(
    "words",
    [
        ["model.vocab=16777216"],  # its logits
        ["data.length=16777216"],
        ["batch_size=16777216", "data.length=1024"],
        ["model.width=1048576", "model.heads=1024"],
    ],
)
def test_what_is_larger_than_memory_is_refused_with_its_size(narrowcast, tmp_path, words):
    ended = narrowcast("train", "quickstart", *words, "device=cpu", "--out", tmp_path / "r")
    assert ended.code == 3
    assert "iB" in ended.err.split("has")[0]
    assert not (tmp_path / "r").exists()


def test_the_most_of_what_takes_no_memory_can_be_trained(narrowcast, tmp_path):
    most = ["seed=9223372036854775807", "data.prefetch=1024", "lr_schedule.warmup=1000000000"]
    rare = ["checkpoint.every=1000000000", "eval.every=1000000000", "data.eval_windows=1000000000"]
    scale = [
        "precision.loss_scale.max_skipped_steps=1000000000",
        "clip_norm=3e38",
        "model.rope_base=1e12",
    ]
    ended = narrowcast(
        "train", "quickstart", *SMALL, *most, *rare, *scale, "steps=2", "--out", tmp_path / "r"
    )
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_folder_that_cannot_be_is_refused_in_words(narrowcast, tmp_path, name):
    ended = narrowcast("train", "quickstart", *SMALL, "--out", tmp_path / name)
    assert ended.code == 2
    assert "Choose another --out" in ended.err
    assert len(ended.err) < 500


def test_the_files_of_a_tokenizer_are_files(narrowcast, tmp_path):
    pytest.importorskip("tokenizers")
    os.mkfifo(tmp_path / "vocab.json")
    ended = narrowcast("plan", "quickstart", f"data.tokenizer={tmp_path}")
    assert ended.code == 2
    assert "vocab.json cannot be read (it is a pipe, not a file)" in ended.err
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.json").write_text("[" * 200_000)
    ended = narrowcast("plan", "quickstart", f"data.tokenizer={tmp_path}")
    assert (ended.code, "is not JSON" in ended.err) == (2, True)


def test_a_first_line_comes_before_the_work_and_never_into_json(narrowcast, tiny, tmp_path):
    run = tmp_path / "run"
    assert narrowcast("train", tiny, "--out", run).out.startswith("building the model …\n")
    assert narrowcast("resume", run).out.startswith("loading the run …\n")
    assert narrowcast("plan", tiny).err == "planning …\n"
    assert narrowcast("plan", tiny, "--json").err == ""
    assert narrowcast("train", tiny, "--quiet", "--out", tmp_path / "quiet").out == ""


def test_a_run_says_that_emulation_is_not_for_speed(narrowcast, tiny, tmp_path):
    slow = narrowcast("train", tiny, "precision.emulate=true", "--out", tmp_path / "a").out
    assert (
        "note      emulated formats give the numbers of the real format but run slower than fp32\n"
        in slow
    )
    plain = narrowcast("train", tiny, "precision.policy=fp32", "--out", tmp_path / "b").out
    assert "note" not in plain


def test_a_recipe_may_come_from_a_pipe(narrowcast, tiny):
    # What a shell passes on for `narrowcast plan <(cat recipe.yaml)`.
    reading, writing = os.pipe()
    os.write(writing, Path(tiny).read_bytes())
    os.close(writing)
    ended = narrowcast("plan", f"/dev/fd/{reading}")
    os.close(reading)
    assert (ended.code, ended.out[:5]) == (0, "piped"), ended.err


def test_a_recipe_may_come_from_standard_input(start, tiny, tmp_path):
    with start("plan", "/dev/stdin", cwd=tmp_path, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(Path(tiny).read_text(), timeout=60)
    assert (process.returncode, out[:5]) == (0, "piped"), err


def test_ten_thousand_shards_and_two_hundred_exceptions_are_a_recipe(narrowcast, tiny, tmp_path):
    shards = "".join(f"    - /data/corpus/en/shard-{i:05d}.txt\n" for i in range(10_000))
    large = tmp_path / "large.yaml"
    large.write_text(f"workload: lm\nsteps: 1\nbatch_size: 1\ndata:\n  text:\n{shards}")
    policy = "bf16; " + ", ".join(f"blocks.{i}.attn.qkv: fp32" for i in range(200))
    assert len(policy) > 4096
    # What is said is that the model has no such modules.
    for words in (
        f"precision.policy={policy}",
        f"precision.overrides={{'blocks.3.*': '{policy}'}}",
    ):
        assert "characters" not in narrowcast("plan", "quickstart", words).err
    assert narrowcast("plan", large).code == 0


def test_twenty_thousand_unknown_keys_are_reported_in_seconds(narrowcast, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("workload: lm\n" + "".join(f"key{i}: {i}\n" for i in range(20_000)))
    began = time.monotonic()
    assert "20002 problems in the recipe" in narrowcast("plan", file).err
    assert time.monotonic() - began < 60  # three on an idle machine


def test_a_number_in_the_place_of_a_word_is_shown_as_it_is_written(narrowcast):
    fault = "{step: 1, module: head, role: output, value: .inf}"
    ended = narrowcast("plan", "quickstart", f"fault_injection=[{fault}]")
    assert "item 1: value must be 'inf', 'nan', 'large' or 'bit-flip', got .inf" in ended.err


def test_a_command_to_go_on_works_where_the_path_has_blanks(narrowcast, tiny, tmp_path):
    run = tmp_path / "my run"
    assert narrowcast("train", tiny, "--out", run).code == 0
    assert f"`narrowcast resume '{run}'`" in narrowcast("train", tiny, "--out", run).err
