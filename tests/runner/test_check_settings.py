"""Settings that cannot work are reported before a model is built or anything is downloaded."""

import re
import socket

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads import shipped_recipes

NEED_DATA = ("sft/smollm2", "sft/full", "sft/dpo")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail where the Hub is asked: a machine without a network would retry for a minute."""

    def refuse(*args, **kwargs):
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def no_model(monkeypatch):
    """Fail where a module is made, with weights or on the meta device."""

    def refuse(self, *args, **kwargs):
        pytest.fail(f"a {type(self).__name__} was made")

    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)


MISSING = [
    ("sft/smollm2", "data.path", "rows.jsonl"),
    ("sft/smollm2", "data.validation_path", "parts/*.jsonl"),
    ("sft/tiny", "eval_tasks.perplexity", "text.txt"),
    ("sft/tiny", "eval_tasks.exact_match", "questions.jsonl"),
    ("quickstart", "data.text", "text.txt"),
    ("decompose/lm", "data.text", "[text.txt]"),
]


@pytest.mark.parametrize(("recipe", "setting", "name"), MISSING)
def test_missing_file_is_reported_before_the_model_is_built(recipe, setting, name, no_model):
    words = ["device=cpu", f"{setting}={name}"]
    if setting == "data.validation_path":
        words.append("data.path=sums")
    if recipe == "decompose/lm":
        words.append("model.path=/models/none")
    with pytest.raises(
        ConfigError, match=rf"{setting}: {re.escape(name.strip('[]'))}: no such file"
    ):
        nc.train(recipe, words)


def test_missing_networks_are_reported_before_the_model_is_built(no_model):
    words = ["device=cpu", "ica.mask_mode=freeze", "ica.ica_template_path=networks.json"]
    with pytest.raises(ConfigError, match=r"ica_template_path: networks\.json: no such file"):
        nc.train("sft/tiny", words)


def test_all_missing_files_are_reported_at_once(no_model):
    words = ["data.path=[a.jsonl,b.csv]", "eval_tasks.perplexity=c.txt"]
    with pytest.raises(ConfigError) as raised:
        nc.train("sft/smollm2", words)
    assert all(name in str(raised.value) for name in ("a.jsonl", "b.csv", "c.txt"))


@pytest.mark.parametrize("recipe", [name for name, _ in shipped_recipes()])
def test_unknown_policy_is_reported_before_the_model_is_built(recipe, no_model):
    needed = ["data.path=sums"] if recipe in NEED_DATA else []
    with pytest.raises(ConfigError, match="no preset 'nonsense'"):
        nc.train(recipe, [*needed, "device=cpu", "precision.policy=nonsense"])


def test_unknown_policy_of_a_phase_is_reported_before_the_model_is_built(no_model):
    schedule = "precision.schedule=[{policy: fp32, until: 10%}, {policy: nonsense}]"
    with pytest.raises(ConfigError, match=r"phase 2 of precision.schedule: .*'nonsense'"):
        nc.train("quickstart", ["device=cpu", schedule])


@pytest.mark.parametrize("recipe", ["sft/smollm2", "quickstart", "genomics/variant_effect"])
def test_missing_device_is_reported_before_the_model_is_built(recipe, no_model):
    with pytest.raises((ConfigError, UnsupportedError), match="device="):
        nc.train(
            recipe, ["data.path=rows.jsonl", "device=mps"] if "/" in recipe else ["device=mps"]
        )
