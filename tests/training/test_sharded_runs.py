"""Recipes on two ranks that shard their weights, against the same recipe in one process."""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import on_ranks

import narrowcast as nc
from narrowcast.errors import CheckpointError, UnsupportedError
from narrowcast.runner import assemble
from narrowcast.runs import (
    EvalRecord,
    FindingRecord,
    PrecisionRecord,
    RunFolder,
    StepRecord,
    StrategyRecord,
)

pytest.importorskip("torch.distributed")
SPLIT = "precision.policy=bf16, params=bf16, master=split"
PHASES = "precision={schedule: [{policy: fp32, until: 2}, {policy: bf16}]}"
ADAPTERS = ["model.tune=lora", "lora.lora_dropout=0", "model.base_dtype=bf16"]


@pytest.fixture(autouse=True)
def _build_one_at_a_time(monkeypatch):
    """Let ranks build their tasks in turn: threads share torch's seed and default dtype."""
    build, turn = assemble.build_task, threading.Lock()

    def locked(*args, **kwargs):
        with turn:
            return build(*args, **kwargs)

    monkeypatch.setattr(assemble, "build_task", locked)


def records_of(folder):
    with RunFolder.open(folder) as run:
        return run.records()


def metrics_of(folder):
    """Return losses, gradient norms and metrics of a run, in order."""
    steps = [(r.loss, r.grad_norm) for r in records_of(folder) if isinstance(r, StepRecord)]
    judged = [list(r.metrics.values()) for r in records_of(folder) if isinstance(r, EvalRecord)]
    return [number for row in (*steps, *judged) for number in row]


def train(recipe, words, folder, ranks=1, strategy="fsdp"):
    words = ["device=cpu", "steps=4", "eval.every=2", "health.every=2", *words]
    if ranks == 1:
        nc.train(recipe, words, out=folder).finish()
    else:
        words.append(f"parallel.strategy={strategy}")
        on_ranks(ranks, lambda rank: nc.train(recipe, words, out=folder).finish())


def resumed(folder, copy, ranks=1):
    """Resume a copy of a finished run from its checkpoint of step 2."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    (copy / "finished.json").unlink()
    if ranks == 1:
        nc.resume(copy).finish()
    else:
        on_ranks(ranks, lambda rank: nc.resume(copy, ["parallel.strategy=fsdp"]).finish())
    return copy


def files_of(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] != "checkpoints"}


def check_same(one, two, rel=2e-5):
    assert metrics_of(two) == pytest.approx(metrics_of(one), rel=rel, abs=rel)
    assert files_of(two) == files_of(one)
    written = [path for path in one.rglob("*.safetensors") if "checkpoints" not in path.parts]
    assert written
    for path in written:
        ours, plain = load_file(two / path.relative_to(one)), load_file(path)
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=50 * rel)


@pytest.mark.parametrize(
    ("words", "rel"),
    [
        ([PHASES, "ema.decay=0.5"], 2.0**-7),
        ([SPLIT, "ema.decay=0.5", "eval.keep_best=true"], 2.0**-7),
    ],
)
def test_language_models_are_trained_averaged_and_resumed(tiny, tmp_path, words, rel):
    words = [
        *words,
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "optimizer.lr=0.003",
        "batch_size=3",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny, words, one)
    train(tiny, words, two, ranks=2)
    shards = {"index.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    saved = {path.name for path in (two / "checkpoints" / "step-000004").iterdir()}
    assert saved == {"state.json", "tensors.safetensors", *shards}
    again = (resumed(two, tmp_path / f"on-{n}", n) for n in (1, 3))
    for folder in (two, *again, resumed(one, tmp_path / "one-on-2", 2)):
        check_same(one, folder, rel)
    changes = [r.step for r in records_of(two) if isinstance(r, PrecisionRecord)]
    assert changes == ([3] if PHASES in words else [])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_resumes_with_its_own_amax_histories(tiny, tmp_path, strategy):
    words = ["precision.policy=fp8-delayed", "model.width=32", "checkpoint.every=2"]
    train(tiny, words, tmp_path / "run", ranks=2, strategy=strategy)

    def histories(rank):
        run = nc.resume(tmp_path / "run")
        return run.prepared.state_dict()["amax"]["amax"]

    first, second = on_ranks(2, histories)
    assert not torch.equal(first, second)
    alone = histories(0)
    assert torch.equal(alone, torch.maximum(first, second))


@pytest.mark.parametrize("part", ["content", "size"])
def test_a_changed_shard_raises_on_all_ranks_and_names_an_intact_checkpoint(tiny, tmp_path, part):
    run = tmp_path / "run"
    train(tiny, ["precision.policy=fp32", "checkpoint.every=2", "checkpoint.keep=2"], run, ranks=2)
    (run / "finished.json").unlink()
    shard = run / "checkpoints" / "step-000004" / "rank-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] if part == "size" else content[:-1] + b"\x7f")
    before = (run / "records.jsonl").read_bytes()

    def one_rank(rank):
        with pytest.raises(CheckpointError, match=r"rank-00001.*resume from step-000002"):
            nc.resume(run)

    on_ranks(2, one_rank)
    with pytest.raises(CheckpointError, match=r"rank-00001.*resume from step-000002"):
        nc.resume(run)
    assert (run / "records.jsonl").read_bytes() == before


def test_saving_shards_in_the_background_needs_gloo(tiny, tmp_path):
    with pytest.raises(UnsupportedError, match=r"checkpoint\.background=true needs gloo"):
        train(tiny, ["checkpoint.background=true"], tmp_path / "run", ranks=2)


def test_a_skipped_step_is_replayed_and_diagnosed(tiny, tmp_path):
    fault = "fault_injection=[{step: 2, module: blocks.0.mlp.up, role: output, value: inf}]"
    train(tiny, ["precision.policy=fp32", "steps=3", fault], tmp_path / "run", ranks=2)
    steps = [r for r in records_of(tmp_path / "run") if isinstance(r, StepRecord)]
    assert [step.applied for step in steps] == [True, False, True]
    assert "blocks.0.mlp.up output" in steps[1].skip_reason
    findings = [r for r in records_of(tmp_path / "run") if isinstance(r, FindingRecord)]
    assert [(f.module, f.role) for f in findings] == [("blocks.0.mlp.up", "output")] * 2


def test_ranks_of_a_hybrid_run_select_the_same_weights(tiny, tmp_path):
    words = ["precision.policy=fp32", "strategy=hybrid", "strategy.baseline=true", "steps=12"]
    words += ["strategy.readout.half_lives=[0.2,0.5]", "strategy.readout.budget=0.5"]
    words += ["checkpoint.every=6", "checkpoint.keep=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny, words, one)
    train(tiny, words, two, ranks=2, strategy="ddp")
    check_same(one, two)
    chosen = [[r.what for r in records_of(f) if isinstance(r, StrategyRecord)] for f in (one, two)]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("more", [["model.tune=full"], ADAPTERS], ids=["full", "adapters"])
def test_fine_tuning_writes_the_folders_of_one_process(tmp_path, more):
    transformers = pytest.importorskip("transformers")
    loading = pytest.importorskip("narrowcast.workloads.sft.models.loading")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 260, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    loading.tiny_tokenizer().save_pretrained(tmp_path / "llama")
    rows = [{"prompt": f"Say {n}.", "completion": "a " * (n % 7 + 1)} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [f"model.path={tmp_path}/llama", f"data.path={tmp_path}/rows.jsonl", "batch_size=4"]
    words += ["data.max_seq_length=96", "precision.policy=fp32", "eval_tasks.samples=2"]
    words += ["eval_tasks.max_new_tokens=3", "checkpoint.every=2", "checkpoint.keep=2", *more]
    one, two = tmp_path / "one", tmp_path / "two"
    train("sft/tiny", words, one)
    train("sft/tiny", words, two, ranks=2)
    for folder in (two, resumed(two, tmp_path / "on-one")):
        check_same(one, folder, rel=2e-5 if more != ADAPTERS else 1e-3)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
def test_a_genomics_model_writes_the_same_predictions(tmp_path):
    rows = [
        f"{'ACGT'[n % 4] * 5}{'GATTACA'[n % 7 :]}{'TGCA'[n // 4 % 4] * 9},{n % 2}"
        for n in range(60)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["sequence,label", *rows]))
    words = ["epochs=null", "batch_size=8", "model.width=16", "model.layers=2", "model.dropout=0"]
    words += ["data.max_length=64", "precision.task=null", "precision.policy=fp32"]
    words += [
        f"data.path={tmp_path}/rows.csv",
        "objective.target=value",
        "objective.label_smoothing=0",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    train("genomics/variant_effect", words, one)
    train("genomics/variant_effect", words, two, ranks=2)
    check_same(one, two, rel=2e-4)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
def test_a_sharded_genomics_model_writes_the_same_samples(tmp_path):
    sequences = [f">{n}\n{'GATTACA'[n % 7 :] * 9}{'ACGT'[n % 4] * n}\n" for n in range(40)]
    (tmp_path / "genome.fa").write_text("".join(sequences))
    words = ["epochs=null", "batch_size=4", "model.width=16", "model.layers=2", "model.dropout=0"]
    words += ["gradient_accumulation_steps=1", "data.max_length=64", "precision.task=null"]
    words += [f"data.path={tmp_path}/genome.fa", "precision.policy=fp32", "eval.keep_best=false"]
    one, two = tmp_path / "one", tmp_path / "two"
    train("genomics/generation", words, one)
    train("genomics/generation", words, two, ranks=2)
    check_same(one, two, rel=2e-4)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view")
def test_weights_that_a_task_builds_at_random_are_those_of_rank_0(tmp_path):
    """The tutorial's `write_results` runs the model, on all ranks."""
    one, two = tmp_path / "one", tmp_path / "two"
    train("tutorial", ["precision.policy=fp32"], one)
    train("tutorial", ["precision.policy=fp32"], two, ranks=2)
    check_same(one, two)
    assert (two / "misread.json").read_text() == (one / "misread.json").read_text()
