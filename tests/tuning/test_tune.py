import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch
from tests.tuning.conftest import Network, loss_fn

import narrowcast as nc
from narrowcast.config.yaml_text import parse
from narrowcast.errors import ConfigError
from narrowcast.tuning.budget import Budget
from narrowcast.tuning.check import CheckRuns, CheckSettings, check_choice
from narrowcast.tuning.options import Rates


def tuned(model, batches, gpu, budget, **overrides):
    settings = {"gemm_rows": 64, "execution": "graphed", "check_steps": 0, "measure_batches": 2}
    settings |= overrides
    return nc.tune(model, batches, loss_fn, budget=budget, hardware=gpu, **settings)


def products(policy, name):
    own = nc.policy(policy).for_module(name)
    return own.forward, own.grad_input, own.grad_weight


def test_a_loose_budget_takes_every_layer_to_fp8_and_a_tight_one_none(network, batches, gpu):
    loose = tuned(network, batches, gpu, "loss=50%")
    assert {group.chosen for group in loose.groups} == {"fp8-delayed"}
    tight = tuned(network, batches, gpu, "loss=0.003%")
    assert {group.chosen for group in tight.groups} <= {"bf16", "tf32"}
    assert tight.preset == "bf16"
    assert tight.predicted.seconds == pytest.approx(2 * loose.predicted.seconds)


def test_between_them_the_policy_is_within_its_budget_and_faster_than_every_preset(
    network, batches, gpu
):
    result = tuned(network, batches, gpu, "loss=0.2%")
    assert result.measured.lost <= 0.002
    fitting = [preset.seconds for preset in result.presets if preset.fits]
    assert result.predicted.seconds < min(fitting)
    assert not result.preset
    assert len({group.chosen for group in result.groups}) > 1


@pytest.mark.parametrize("layer", ["blocks.0.up", "blocks.1.up"])
def test_a_layer_with_weights_times_1e4_is_found_and_kept_wide(batches, gpu, layer):
    torch.manual_seed(0)
    model = Network(blocks=5)
    assert products(tuned(model, batches, gpu, "loss=0.5%").policy, layer)[0] == "e4m3"
    with torch.no_grad():
        model.get_submodule(layer).weight *= 1e4
    result = tuned(model, batches, gpu, "loss=0.5%")
    (group,) = [group for group in result.groups if layer in group.layers]
    assert group.sensitive
    assert products(result.policy, layer)[0] in ("bf16", "tf32", "fp32")
    assert products(result.policy, "blocks.4.up")[0] == "e4m3"


def test_an_outlier_channel_is_found_and_kept_wide(batches, gpu):
    """One large input channel leaves few bits to the others under a scale per tensor."""
    torch.manual_seed(0)
    model = Network(blocks=5)
    with torch.no_grad():
        model.blocks[3].norm.weight[7] = 3e4
        model.blocks[3].up.weight[:, 7] /= 3e4
    result = tuned(model, batches, gpu, "loss=0.5%")
    (group,) = [group for group in result.groups if "blocks.3.up" in group.layers]
    assert group.sensitive
    assert group.layers == ("blocks.3.up",)
    assert products(result.policy, "blocks.3.up")[0] in ("bf16", "tf32", "fp32")
    assert products(result.policy, "blocks.2.up")[0] == "e4m3"


def test_the_result_is_the_same_for_the_same_seed(network, batches, gpu):
    first = tuned(network, batches, gpu, "loss=0.5%")
    assert tuned(network, batches, gpu, "loss=0.5%").to_json() == first.to_json()


def test_a_policy_file_is_the_policy_with_a_reason_per_line(network, batches, gpu, tmp_path):
    result = tuned(network, batches, gpu, "loss=0.2%")
    path = result.save(tmp_path / "p.yaml")
    assert nc.policy(f"@{path}") == result.policy
    document = parse(path.read_text())
    assert set(document.value) == {"policy", "exceptions"}
    lines = path.read_text().splitlines()
    exceptions = lines[lines.index("exceptions:") + 1 :]
    assert exceptions
    assert all(re.search(r"# .+", line) for line in exceptions)
    loaded = nc.load_recipe("quickstart", [f"precision.policy=@{path}"])
    assert nc.policy(loaded.recipe.precision.policy) == result.policy


def test_a_budget_of_time_takes_the_least_loss_in_that_time(network, batches, gpu):
    result = tuned(network, batches, gpu, "time=75%")
    whole = next(preset for preset in result.presets if preset.policy == "bf16")
    assert result.predicted.seconds <= 0.75 * whole.seconds
    assert result.predicted.lost > 0
    faster = tuned(network, batches, gpu, "time=60%")
    assert faster.predicted.lost > result.predicted.lost


def test_a_budget_of_memory_is_that_of_the_dry_run(network, batches, gpu):
    """The dry run is the judge: `nc.plan` with a batch predicts the same bytes."""
    free = tuned(network, batches, gpu, "loss=0.2%, memory=10GiB")
    most = free.predicted.bytes - 1
    result = tuned(network, batches, gpu, f"loss=0.2%, memory={most}B")
    assert result.policy != free.policy
    plan = nc.plan(
        network, result.policy, hardware=gpu, gemm_rows=64, execution="graphed",
        batch=batches[2], loss_fn=loss_fn,
    )  # fmt: skip
    assert result.predicted.bytes == plan.memory.predicted.needed <= most
    with pytest.raises(ConfigError, match=r"needs at least .* GiB\. Write memory="):
        tuned(network, batches, gpu, "loss=50%, memory=1KiB")


def test_what_cannot_be_kept_says_what_to_write(network, batches, gpu):
    with pytest.raises(ConfigError, match="Allow more time or more loss"):
        tuned(network, batches, gpu, "loss=0.003%, time=60%")
    with pytest.raises(ConfigError, match="batches must have at least one"):
        tuned(network, [], gpu, "loss=1%")
    with pytest.raises(ConfigError, match="hardware must be one of"):
        nc.tune(network, batches, loss_fn, hardware="h2000")
    with pytest.raises(ConfigError, match="check_steps=0"):
        tuned(network, batches[:4], gpu, "loss=1%", check_steps=5)


def test_without_rates_nothing_is_gained_and_fp32_is_best(network, batches):
    result = nc.tune(network, batches, loss_fn, hardware=None)
    assert result.preset == "fp32"
    assert "hardware=h200" in str(result)
    assert result.check is None
    losses = {option.name: option.lost for option in result.groups[0].options}
    assert losses["fp8-tensor"] > losses["bf16"] > losses["fp32"] == 0


def test_the_check_run_trains_for_equal_time_and_confirms_a_good_choice(network, batches, gpu):
    before = copy.deepcopy(network.state_dict())
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    result = tuned(
        network, itertools.cycle(batches), gpu, "loss=0.2%", optimizer=optimizer, check_steps=30
    )
    assert result.check.verdict == "confirmed"
    chosen = result.check.runs[-1]
    rival = next(run for run in result.check.runs if run.policy == "bf16")
    times = {p.policy: p.seconds for p in (*result.presets, result.predicted)}
    assert chosen.equal_time_steps == round(30 * times["bf16"] / times[chosen.policy]) > 40
    assert chosen.equal_time_loss < rival.loss < 2.7  # ln 16 = 2.77 before the first step
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_the_check_run_withdraws_a_choice_that_has_less_time_to_train(network, batches, gpu):
    """A policy that takes twenty times as long as predicted loses at equal time."""
    result = tuned(network, batches, gpu, "loss=0.2%")
    slow = replace(
        result, predicted=replace(result.predicted, seconds=20 * result.predicted.seconds)
    )
    rates = Rates(hardware=gpu, rows=64, execution="graphed")
    settings = CheckSettings(steps=40, seed=0, clip_norm=None, rates=rates)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    stream = itertools.cycle(batches)
    runs = CheckRuns(
        network, stream, loss_fn, optimizer=optimizer, settings=settings, tell=lambda line: None
    )
    check = check_choice(slow, runs)
    assert check.verdict == "withdrawn"
    assert check.runs[-1].equal_time_steps == 3
    assert check.instead == "bf16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss=0.5%", Budget(loss=0.005)),
        ("loss=1%, memory=20GiB", Budget(loss=0.01, memory=20 * 2**30)),
        (["memory=1.5GB", "time=12ms"], Budget(memory=1_500_000_000, seconds=0.012)),
        ("time=80% loss=2%", Budget(loss=0.02, time_share=0.8)),
    ],
)
def test_a_budget_is_read_and_written(text, expected):
    assert Budget.parse(text) == expected
    assert Budget.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "loss=1", "loss=-1%", "loss=200%", "memory=20", "time=5", "speed=3", "loss=1%, loss=2%"],
)
def test_a_budget_that_cannot_be_read_says_what_to_write(text):
    with pytest.raises(ConfigError, match=r"Write"):
        Budget.parse(text)
