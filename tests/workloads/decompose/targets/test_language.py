"""Language models that were trained elsewhere, read and asked about their text."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.decompose.evaluation.language_table import MASKINGS
from narrowcast.workloads.decompose.targets import llama2c
from narrowcast.workloads.decompose.targets.language import next_token_losses
from narrowcast.workloads.decompose.targets.pretrained import language_target
from narrowcast.workloads.sft.models.loading import tiny_tokenizer

DATA = Path(__file__).parents[4] / "../shared/data"
STORIES, TEXT = DATA / "lm_stories260K", DATA / "text/tinystories_head.txt"
needs_stories = pytest.mark.skipif(
    not (STORIES.is_dir() and TEXT.is_file()),
    reason="needs the stories260K checkpoint and TinyStories in ../shared/data",
)
RHYME = "the cat sat on the mat. " * 200


@pytest.fixture(scope="module")
def rhyme(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "rhyme.txt"
    file.write_text(RHYME)
    return str(file)


@pytest.fixture(scope="module")
def folder(gpt2_folder):
    """A folder with a GPT-2 of two layers that knows the rhyme."""
    return gpt2_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of workload lm."""
    out = tmp_path_factory.mktemp("runs") / "lm"
    words = ["steps=40", "batch_size=4", "device=cpu", "eval.every=0", "data.length=32"]
    words += ["model.layers=1", "model.width=32", "model.heads=2", "precision.policy=fp32"]
    words += ["data.eval_windows=4", "optimizer.lr=1e-2"]
    list(nc.train("quickstart", words, out=out))
    return out


@needs_stories
def test_stories_are_predicted_as_published():
    tokenizer = llama2c.SentencePieces(STORIES / "tok512.bin")
    model = llama2c.read_model(STORIES / "stories260K.bin")
    stories = TEXT.read_text(encoding="utf-8").replace("\n\n", "\0").split("\n")[:20]
    nats, count = 0.0, 0
    for story in stories:
        tokens = torch.tensor([tokenizer.encode(story.replace("\0", "\n\n").strip())])
        with torch.no_grad():
            losses = next_token_losses(model(tokens).logits, tokens)
        nats, count = nats + losses.sum().item(), count + losses.numel()
    assert count == 6449
    assert nats / count == pytest.approx(1.335, abs=0.0005)


@needs_stories
def test_stories_are_a_target():
    language = language_target(str(STORIES), text=[str(TEXT)], length=128, device="cpu")
    assert language.vocabulary == 512
    assert not any(parameter.requires_grad for parameter in language.target.parameters())
    assert isinstance(language.target.model.layers[0].mlp.down_proj, torch.nn.Linear)
    tokens = language.train.__getitems__([0, 5])
    assert tokens.shape == (2, 128)
    logits = language.target(tokens).logits
    assert logits.shape == (2, 128, 512)
    assert next_token_losses(logits, tokens).mean() < 2


def test_a_model_of_transformers_is_read_whole(folder, rhyme):
    language = language_target(str(folder), text=[rhyme], length=32, device="cpu")
    plain = GPT2LMHeadModel.from_pretrained(folder)
    tokens = language.held_out.__getitems__([0])
    with torch.no_grad():
        expected = plain(tokens, labels=tokens)
        got = getattr(language.target(tokens), language.output)
    assert torch.equal(got, expected.logits)
    assert next_token_losses(got, tokens).mean() == pytest.approx(expected.loss.item(), rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(language.train.__getitems__([0])[0]) == RHYME[:32]
    assert plain.loss_type is None  # of which transformers warns who asks for the loss
    assert language.target.loss_type == "ForCausalLM"


def test_a_model_of_random_weights_is_refused(folder, rhyme, tmp_path):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(folder))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no better than chance"):
        language_target(str(tmp_path), text=[rhyme], length=32, device="cpu")


def test_what_a_run_trained_is_built_again_with_its_weights(run):
    language = language_target(str(run), text=[], length=32, device="cpu")
    assert language.output is None
    assert language.vocabulary == 256
    tokens = language.held_out.__getitems__([0, 1])
    with torch.no_grad():
        logits = language.target(tokens)
    measured = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    trained = [record["loss"] for record in records if "loss" in record][-1]
    assert measured.item() == pytest.approx(trained, abs=0.5)
    assert measured.item() < 4


def test_a_run_can_be_decomposed_on_other_text(run, rhyme):
    language = language_target(str(run), text=[rhyme], length=16, device="cpu")
    assert bytes(language.train.__getitems__([0])[0].tolist()).decode() == RHYME[:16]


def test_a_run_that_has_not_ended_is_refused(run, tmp_path):
    (tmp_path / "resolved.json").write_bytes((run / "resolved.json").read_bytes())
    with pytest.raises(ConfigError, match=r"the run is not finished. Run narrowcast resume"):
        language_target(str(tmp_path), text=[], length=32, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is damaged"):
        language_target(str(tmp_path), text=[], length=32, device="cpu")


def test_a_run_of_another_workload_is_refused(tmp_path):
    resolved = {"workload": {"value": "tutorial", "origin": "recipe"}}
    (tmp_path / "resolved.json").write_text(json.dumps(resolved))
    with pytest.raises(ConfigError, match="is a run of workload tutorial"):
        language_target(str(tmp_path), text=[], length=32, device="cpu")


def test_other_text_is_refused_where_tokens_were_learnt_from_the_run_s_own(run, rhyme, tmp_path):
    resolved = json.loads((run / "resolved.json").read_text())
    resolved["data.tokenizer"]["value"] = "bpe"
    (tmp_path / "resolved.json").write_text(json.dumps(resolved))
    with pytest.raises(ConfigError, match=r"tokenizer trained on its own text.*Leave data\.text"):
        language_target(str(tmp_path), text=[rhyme], length=32, device="cpu")


def test_a_longer_window_than_positions_is_refused(folder, rhyme):
    with pytest.raises(ConfigError, match=r"context length of .* got .*Write data\.length=64"):
        language_target(str(folder), text=[rhyme], length=65, device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path, rhyme):
    with pytest.raises(ConfigError, match=r"has no model. Give the folder of an lm run"):
        language_target(str(tmp_path), text=[rhyme], length=32, device="cpu")


def test_damaged_files_are_refused_in_one_line(tmp_path, rhyme):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        language_target(str(tmp_path), text=[rhyme], length=32, device="cpu")


@pytest.mark.parametrize("size", [5, 28, 1000])
def test_a_file_that_is_no_small_llama_is_refused(tmp_path, size):
    (tmp_path / "model.bin").write_bytes(b"\1" * size)
    (tmp_path / "tok.bin").write_bytes(b"\1" * size)
    with pytest.raises(ConfigError, match=r"not in the version 0 format of llama2\.c"):
        language_target(str(tmp_path), text=["any"], length=32, device="cpu")


@pytest.mark.parametrize("which", ["folder", "run"])
def test_on_the_meta_device_no_text_is_read(which, request):
    path = request.getfixturevalue(which)
    language = language_target(str(path), text=[], length=32, device="meta")
    assert next(language.target.parameters()).is_meta
    assert len(language.train) == len(language.held_out) == 0


def test_an_evaluation_passes_a_batch_once_for_the_target_and_once_for_each_kind_of_masks(
    folder, rhyme
):
    names = ["sites.names=[transformer.h.*.mlp.c_fc]", "sites.components=4", "eval_tasks.batches=1"]
    words = [f"model.path={folder}", f"data.text=[{rhyme}]", "data.length=32", "batch_size=2"]
    recipe = load_recipe("decompose/lm", [*words, *names, "precision.policy=fp32"]).recipe
    task = build_task(recipe, device=torch.device("cpu"))
    passes = []
    task.model.decomposition.register_forward_hook(lambda *_: passes.append(1))
    told = task.evaluate(task.model)
    assert len(passes) == 1 + len(MASKINGS)
    assert list(told) == [metric.name for metric in task.info.metrics]
