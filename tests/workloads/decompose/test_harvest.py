"""What components do: activity, effects and sources, against the model without them."""

import json
import shutil
import subprocess

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer, GPT2LMHeadModel

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.command import decompose
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.harvest import HarvestSettings, harvest, harvest_page

FIRST, SECOND = "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_proj"
TOKENS = 640


@pytest.fixture(scope="module")
def run(decomposed_gpt2):
    return nc.decompose.load(decomposed_gpt2)


@pytest.fixture(scope="module")
def result(run):
    return harvest(run, HarvestSettings(tokens=TOKENS, examples=3, attributed=8))


@pytest.fixture(scope="module")
def windows(run, result):
    """The windows that were read: evenly spaced in the text."""
    there, count = len(run.subject.windows), TOKENS // 32
    numbers = [(2 * each + 1) * there // (2 * count) for each in range(count)]
    return run.subject.windows.__getitems__(numbers)


@pytest.fixture(scope="module")
def tokenizer(gpt2_folder):
    return AutoTokenizer.from_pretrained(gpt2_folder)


def named(result, name):
    return next(each for each in result["components"] if each["name"] == name)


def test_activity_and_tokens_are_those_of_the_importances(run, result, windows, tokenizer):
    assert result["positions"] == windows.numel() == TOKENS
    for site, importance in run.importances(windows).items():
        for number in range(16):
            component, values = named(result, f"{site}:{number}"), importance[..., number]
            assert component["active"] == pytest.approx((values > 0).double().mean().item())
            assert component["importance"] == pytest.approx(values.double().mean().item(), rel=1e-5)
            for token in component["tokens"]:
                chosen = values[windows == tokenizer.encode(token["token"])[0]]
                assert token["count"] == len(chosen) >= 3
                assert token["importance"] == pytest.approx(chosen.mean().item(), abs=1e-4)


def test_examples_are_the_windows_of_the_largest_importances(run, result, windows, tokenizer):
    importances = run.importances(windows)
    for component in result["components"]:
        site, number = component["name"].split(":")
        largest = importances[site][..., int(number)].amax(1)
        expected = largest.topk(3).values
        got = [max(example["importances"]) for example in component["examples"]]
        assert got == pytest.approx([e for e in expected.tolist() if e > 0], abs=6e-4)
        for example in component["examples"]:
            assert example["importances"][example["peak"]] == max(example["importances"])
            text = tokenizer.decode(windows[example["window"]])
            assert "".join(example["tokens"]) in text


def test_the_effect_of_a_component_is_that_of_its_part_of_the_weight(
    run, result, windows, gpt2_folder
):
    for site in (FIRST, SECOND):
        component = max(
            (each for each in result["components"] if each["site"] == site),
            key=lambda each: each["effect"]["loss_change"] if each["effect"] else -1,
        )
        number = int(component["name"].split(":")[1])
        tokens = windows[[example["window"] for example in component["examples"][:2]]]
        plain = GPT2LMHeadModel.from_pretrained(gpt2_folder)
        v, u = run.components(site)
        with torch.no_grad():
            before = plain(tokens, labels=tokens).loss
            plain.get_submodule(site).weight -= torch.outer(v[0, :, number], u[0, number])
            after = plain(tokens, labels=tokens).loss
        change = component["effect"]["loss_change"]
        assert change == pytest.approx((after - before).item(), abs=2e-5)
        assert component["effect"]["largest"]["loss_change"] >= change


def test_the_share_of_a_source_is_a_derivative(run, result, windows):
    target = next(each for each in result["components"] if each["sources"])
    assert target["site"] == SECOND  # the first has no site before it
    number = int(target["name"].split(":")[1])
    x, decomposition = windows[:16], run.model.decomposition
    weight = run.importances(x)[SECOND][..., number].flatten()

    def activation(masks):
        inputs = [SiteMask(masks.expand(1, x.numel(), 16), 0.0, 1.0), None]
        passed = decomposition(x, masks=inputs, cache="acts")
        return passed.acts[1][0, :, number]

    with torch.no_grad():
        whole = activation(torch.ones(16))
        for source in target["sources"]:
            size, values = 1e-2, []
            for sign in (1, -1):
                mask = torch.ones(16)
                mask[int(source["name"].split(":")[1])] += sign * size
                values.append((weight * whole.sign() * activation(mask)).sum())
            slope = (values[0] - values[1]) / (2 * size) / (weight * whole.abs()).sum()
            assert source["share"] == pytest.approx(slope.item(), rel=0.03, abs=2e-3)


def test_the_command_writes_json_and_a_page(decomposed_gpt2, tmp_path):
    arguments = ["harvest", str(decomposed_gpt2), "--tokens", "64", "--out", str(tmp_path / "new")]
    done = CliRunner().invoke(decompose, arguments, catch_exceptions=False)
    assert done.output.split() == [
        str(tmp_path / f"new/harvest.{kind}") for kind in ("json", "html")
    ]
    written = json.loads((tmp_path / "new/harvest.json").read_text(encoding="utf-8"))
    assert written["positions"] == 64
    assert len(written["components"]) == 32


def test_text_cannot_leave_the_data_of_the_page():
    text = json.dumps({"token": "</script><!--<script>@SCRIPT@"})
    page = harvest_page(text, target="<b>")
    inside = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inside) == json.loads(text)
    assert "<b>" not in page


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_is_javascript(tmp_path):
    script = harvest_page("{}", target="x").split("<script>")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"examples": 1, "effect_windows": 2}, "effect_windows must be at most examples"),
    ],
)
def test_settings_that_do_not_fit_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        HarvestSettings(**settings)
