"""Finished decompositions, loaded and run with masks from Python."""

import copy

import pytest
import torch
from transformers import GPT2LMHeadModel

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.runs import EvalRecord

SITES = ("transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_proj")
TOY = ("batch_size=32", "model.pretrain_batch_size=256", "model.pretrain_steps=800",
       "eval_tasks.batches=1", "eval_tasks.pgd_steps=0", "decomposition.warmup_steps=5",
       "health.every=0", "steps=3", "decomposition.seeds=2", "device=cpu")  # fmt: skip


def last_evaluation(records):
    return [record.metrics for record in records if isinstance(record, EvalRecord)][-1]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The folder of a decomposed toy of two seeds, and its last evaluation."""
    folder = tmp_path_factory.mktemp("loading") / "toy"
    return folder, last_evaluation(list(nc.train("decompose/tms_5-2-id", TOY, out=folder)))


@pytest.fixture(scope="module")
def run(decomposed_gpt2):
    return nc.decompose.load(decomposed_gpt2)


def test_masks_of_one_with_the_residual_are_the_target(run, gpt2_folder):
    tokens = run.batch(size=2)
    plain = GPT2LMHeadModel.from_pretrained(gpt2_folder)
    with torch.no_grad():
        expected = plain(tokens).logits
        torch.testing.assert_close(run(tokens), expected, rtol=0, atol=0)
        close = {"rtol": 0, "atol": 2e-5}
        torch.testing.assert_close(run(tokens, masks=1.0, delta=1), expected, **close)


def test_masks_of_zero_are_the_target_without_these_matrices(run, gpt2_folder):
    tokens = run.batch(size=2)
    plain = GPT2LMHeadModel.from_pretrained(gpt2_folder)
    with torch.no_grad():
        for site in SITES:
            plain.get_submodule(site).weight.zero_()
        expected = plain(tokens).logits
        torch.testing.assert_close(run(tokens, masks=0.0), expected, rtol=0, atol=2e-5)


def test_a_component_that_is_off_is_subtracted_from_the_weight(run, gpt2_folder):
    tokens = run.batch(size=2)
    plain = GPT2LMHeadModel.from_pretrained(gpt2_folder)
    v, u = run.components(SITES[0])
    with torch.no_grad():
        plain.get_submodule(SITES[0]).weight -= torch.outer(v[0, :, 5], u[0, 5])
        expected = plain(tokens).logits
        got = run(tokens, off=[f"{SITES[0]}:5"])
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_names_turn_components_on_and_all_others_off(run):
    tokens = run.batch(size=2)
    masks = {name: torch.zeros(count) for name, count in run.sites.items()}
    masks[SITES[1]][3] = 1
    with torch.no_grad():
        assert torch.equal(run(tokens, masks=[f"{SITES[1]}:3"]), run(tokens, masks=masks))


def test_masks_have_gradients_and_weights_have_none(run):
    tokens = run.batch(size=1)
    mask = torch.ones(run.sites[SITES[0]], requires_grad=True)
    run(tokens, masks={SITES[0]: mask}).logsumexp(-1).sum().backward()
    assert (mask.grad != 0).all()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_importances_and_evaluation_are_those_of_the_run(run, decomposed_gpt2):
    with nc.runs.RunFolder.open(decomposed_gpt2) as folder:
        logged = last_evaluation(folder.records())
    assert run.evaluate() == pytest.approx(logged, rel=1e-6)
    tokens = run.batch(size=4)  # the batch size of the run
    alive = {name: (each > 0).any(0).any(0) for name, each in run.importances(tokens).items()}
    assert {name: each[0].tolist() for name, each in run.alive.items()} == {
        name: each.tolist() for name, each in alive.items()
    }


def test_a_toy_is_loaded_with_all_its_seeds(toy):
    folder, logged = toy
    run = nc.decompose.load(folder)
    assert run.evaluate() == pytest.approx(logged, rel=1e-6)
    x = run.batch(size=16)
    assert x.shape == (2, 16, 5)
    assert run.importances(x)["linear1"].shape == (2, 16, run.sites["linear1"])
    torch.testing.assert_close(run(x, masks=1.0, delta=1.0), run(x), rtol=0, atol=1e-5)
    bias = copy.deepcopy(run.model.decomposition.target.linear2.bias)
    assert torch.equal(run(x, masks=0.0), bias[:, None].relu().expand(2, 16, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"masks": {"nowhere": 1.0}}, "no site of this name, got 'nowhere'"),
        ({"off": ["nowhere:1"]}, "no site of this name, got 'nowhere:1'"),
        ({"off": [f"{SITES[0]}:16"]}, "has components 0 to 15"),
        ({"off": f"{SITES[0]}:1"}, "must be a list"),
        ({"masks": {SITES[0]: torch.ones(3)}}, "must broadcast to"),
    ],
)
def test_masks_that_do_not_fit_raise(run, arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(run.batch(size=1), **arguments)


def test_a_target_that_changed_raises(decomposed_gpt2, gpt2_folder, tmp_path):
    changed = GPT2LMHeadModel.from_pretrained(gpt2_folder)
    with torch.no_grad():
        changed.get_submodule(SITES[0]).weight[0, 0] += 1e-3
    changed.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((gpt2_folder / name).read_bytes())
    with pytest.raises(CheckpointError, match="other weights than when it was decomposed"):
        nc.decompose.load(decomposed_gpt2, [f"model.path={tmp_path}"])


def test_a_device_that_does_not_exist_raises(decomposed_gpt2):
    with pytest.raises(UnsupportedError, match="cuda"):
        nc.decompose.load(decomposed_gpt2, device="cuda:99")


def test_what_is_no_finished_decomposition_raises(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        nc.decompose.load(tmp_path / "nowhere")
