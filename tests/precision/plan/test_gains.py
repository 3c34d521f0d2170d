"""Where fp8 gains, by a table of measurements and how the model is run."""

import dataclasses

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.hardware import Speeds
from narrowcast.precision.plan.gains import detect_execution
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import PRODUCTS


def rows(planned):
    return {m.name: m for m in planned.modules}


# By tokens, inputs and outputs of 1024 and 4096: fp8 takes twice the time of bf16 where all are
# small, half of it where all are large, and as long where they are not alike.
SPEEDS = Speeds(
    gpu="NVIDIA H200",
    torch="2.13.0",
    date="2026-01-31",
    tokens=(1024, 4096),
    inputs=(1024, 4096),
    outputs=(1024, 4096),
    seconds={
        "bf16": (1.0,) * 8,
        "tensor": (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5),
        "delayed": (1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25),
    },
)


@pytest.fixture
def measured(h200):
    return dataclasses.replace(h200, speeds=SPEEDS)


def small_and_large():
    with torch.device("meta"):
        return nn.ModuleDict({"small": nn.Linear(1024, 1024), "large": nn.Linear(4096, 4096)})


def test_a_layer_that_gains_nothing_is_kept_wider_and_the_reason_names_its_shape(measured):
    by_name = rows(make_plan(small_and_large(), "fp8-tensor", hardware=measured, gemm_rows=4096))
    small, large = by_name["small"], by_name["large"]
    assert {getattr(small.policy, role) for role in PRODUCTS} == {"bf16"}
    assert (small.policy.scaling, small.how) == ("none", "native")
    assert small.reason.endswith("; kept bf16: fp8 gains nothing at 4096×1024×1024 (1.00 ×)")
    assert (large.policy.forward, large.policy.scaling) == ("e4m3", "tensor")
    assert large.reason == "native: compute capability 9.0; 2.00 × bf16 at 4096×4096×4096"


@pytest.mark.parametrize(
    ("policy", "tokens", "formats"),
    [
        ("fp8-tensor", 1024, ("bf16", "bf16")),
        ("fp8-tensor", 2048, ("bf16", "e4m3")),
        ("fp8-tensor", 10**6, ("bf16", "e4m3")),
        ("fp8-delayed", 1, ("bf16", "e4m3")),
        ("fp8-delayed", 4096, ("e4m3", "e4m3")),
        ("fp8-row", 1, ("e4m3", "e4m3")),
    ],
)
def test_the_rows_and_the_scaling_decide_with_the_shape(measured, policy, tokens, formats):
    """fp8-delayed gains twice as much in the table, and fp8-row is not in it."""
    by_name = rows(make_plan(small_and_large(), policy, hardware=measured, gemm_rows=tokens))
    assert tuple(by_name[name].policy.forward for name in ("small", "large")) == formats


def test_without_a_word_about_rows_there_are_many(measured):
    planned = rows(make_plan(small_and_large(), "fp8-tensor", hardware=measured))
    assert "2.00 × bf16 at 8192×4096×4096" in planned["large"].reason


def test_what_is_asked_for_whatever_it_costs_is_given_and_its_cost_is_told(measured):
    planned = make_plan(
        small_and_large(), "fp8-tensor", hardware=measured, gemm_rows=1024, skip_slow_fp8=False
    )
    small = rows(planned)["small"]
    assert (small.policy.forward, small.how) == ("e4m3", "native")
    assert small.reason.endswith("; 0.50 × bf16 at 1024×1024×1024")


EMULATED = [
    ("fp8-tensor", True),
    ("compute=mxfp8", None),
    ("compute=e5m2", None),
    ("fp8-tensor, output=fp32", None),
    ("bf16, grad_weight=fp32", None),
]


@pytest.mark.parametrize(("policy", "emulate"), EMULATED)
def test_what_is_emulated_is_not_judged_by_its_speed(h200, measured, policy, emulate):
    with_table, without = (
        make_plan(small_and_large(), policy, hardware=hardware, emulate=emulate, gemm_rows=1024)
        for hardware in (measured, h200)
    )
    assert [m.how for m in with_table.modules] == ["emulated", "emulated"]
    assert with_table.modules == without.modules
    assert not any("speed" in m.reason or "gains" in m.reason for m in without.modules)


def test_a_uniform_policy_has_nothing_to_gain_and_says_nothing(measured):
    planned = make_plan(small_and_large(), "bf16", hardware=measured, gemm_rows=1024)
    assert {m.reason for m in planned.modules} == {"native: compute capability 9.0"}


def test_a_shape_that_fp8_cannot_have_is_not_looked_up(measured):
    with torch.device("meta"):
        head = nn.Linear(4096, 50257)
    reason = make_plan(head, "fp8-tensor", hardware=measured).modules[0].reason
    assert reason.startswith("kept bf16: 4096×50257 is not a multiple of 16; native: ")
    assert "×" not in reason.partition("native: ")[2]


# The device saves half a second by a large layer in fp8-tensor, three quarters in fp8-delayed.
HOSTS = {"bf16": 0.5, "tensor": 1.1, "delayed": 1.1}


@pytest.fixture
def with_host(h200):
    return dataclasses.replace(h200, speeds=dataclasses.replace(SPEEDS, host_seconds=HOSTS))


def test_a_launched_layer_that_costs_the_host_more_than_it_saves_is_kept_wider(with_host):
    def planned(policy, running):
        plan = make_plan(
            small_and_large(), policy, hardware=with_host, gemm_rows=4096, execution=running
        )
        return rows(plan)["large"]

    eager = planned("fp8-tensor", "eager")
    assert {getattr(eager.policy, role) for role in PRODUCTS} == {"bf16"}
    told = "when eager, fp8 at 4096×4096×4096 costs the host more than it saves (otherwise 2.00 ×)"
    assert eager.reason.endswith(f"; kept bf16: {told}")
    assert planned("fp8-tensor", None).reason == eager.reason  # it is not compiled
    compiled = planned("fp8-tensor", "compiled")  # casts are launched from Python there too
    assert compiled.reason == eager.reason.replace("eager", "compiled")
    assert planned("fp8-tensor", "graphed").policy.forward == "e4m3"
    assert planned("fp8-delayed", "eager").policy.forward == "e4m3"  # saves more than it costs


@pytest.mark.parametrize("policy", ["bf16", "fp8-tensor"])
def test_an_exception_that_asks_for_fp8_has_it_whatever_it_costs_the_host(with_host, policy):
    text = "forward=e4m3, grad_input=e5m2, grad_weight=e5m2, scaling=tensor"
    settings = {"gemm_rows": 4096, "execution": "eager", "overrides": {"large": text}}
    plan = make_plan(small_and_large(), policy, hardware=with_host, **settings)
    assert rows(plan)["large"].policy.forward == "e4m3"


def test_without_only_faster_nothing_is_kept_wider_for_the_host(with_host):
    model = small_and_large()
    settings = {"gemm_rows": 4096, "execution": "eager", "skip_slow_fp8": False}
    plan = make_plan(model, "fp8-tensor", hardware=with_host, **settings)
    assert rows(plan)["large"].policy.forward == "e4m3"


def test_a_model_that_was_given_to_a_compiler_runs_compiled():
    model = nn.Sequential(nn.Linear(16, 16))
    assert detect_execution(model) == "eager"
    assert detect_execution(torch.compile(model)) == "compiled"
    assert detect_execution(model) == "eager"
    model[0].compile()
    assert detect_execution(model) == "compiled"
    assert detect_execution(model, "graphed") == "graphed"


def test_a_way_to_run_that_there_is_not_is_refused_with_those_there_are(cpu):
    with pytest.raises(ConfigError, match='"eager" or "compiled" or "graphed"'):
        make_plan(nn.Linear(16, 16), "bf16", hardware=cpu, execution="fast")


@pytest.mark.parametrize(
    ("skip_slow_fp8", "execution", "told"),
    [
        (
            True,
            None,
            "eager: 1 layer is kept wider because of the host cost of fp8; none if graphed",
        ),
        (
            True,
            "compiled",
            "compiled: 1 layer is kept wider because of the host cost of fp8; none if graphed",
        ),
        (True, "graphed", "graphed: the host cost of fp8 is not counted"),
        (False, "eager", "eager: no layer is kept wider because of the host cost of fp8"),
    ],
)
def test_a_plan_says_how_it_took_the_model_to_run(with_host, skip_slow_fp8, execution, told):
    settings = {"gemm_rows": 4096, "skip_slow_fp8": skip_slow_fp8, "execution": execution}
    plan = make_plan(small_and_large(), "fp8-tensor", hardware=with_host, **settings)
    assert f"execution  {told}" in str(plan).splitlines()
    assert plan.to_json()["execution"] == plan.execution == (execution or "eager")
    assert plan.spares_host == ("1 layer" in told)


def test_a_plan_that_does_not_depend_on_it_says_nothing_of_it(with_host, measured):
    assert "execution" not in str(make_plan(small_and_large(), "bf16", hardware=with_host))
    assert "execution" not in str(make_plan(small_and_large(), "fp8-tensor", hardware=measured))


def prepared(model=None, **settings):
    model = nn.Sequential(nn.Linear(16, 16)) if model is None else model
    return nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), **settings)


def test_a_run_is_planned_as_it_was_told_and_changed_as_it_was_planned():
    run = prepared(policy="fp32", execution="graphed")
    assert run.plan.execution == "graphed"
    run.set_policy("bf16")
    assert run.plan.execution == "graphed"
    run.set_policy("fp32", execution="compiled")
    assert run.plan.execution == "compiled"


def test_a_run_whose_model_was_compiled_since_is_changed_as_a_compiled_one():
    run = prepared(policy="fp32")
    assert run.plan.execution == "eager"
    run.model.compile()
    run.set_policy("bf16")
    assert run.plan.execution == "compiled"


def test_a_plan_made_for_another_way_to_run_is_refused_beside_it(cpu):
    model = nn.Sequential(nn.Linear(16, 16))
    plan = make_plan(model, "fp32", hardware=cpu)
    with pytest.raises(ConfigError, match=r"made for 'eager'.*plan\(…, execution='graphed'\)"):
        prepared(model, policy=plan, execution="graphed")
    run = prepared(model, policy=plan, execution="eager")
    with pytest.raises(ConfigError, match="made for 'eager'"):
        run.set_policy(plan, execution="compiled")


def test_a_graphed_step_says_what_a_plan_for_eager_ones_left_out(cpu):
    model = nn.Sequential(nn.Linear(16, 16))
    plan = make_plan(model, "fp32", hardware=cpu)
    run = prepared(model, policy=plan)
    assert "execution=" not in repr(run.graphed(model))
    run.release()
    spared = tuple(dataclasses.replace(each, spares_host=True) for each in plan.modules)
    run = prepared(model, policy=dataclasses.replace(plan, modules=spared))
    told = repr(run.graphed(model))
    assert "keeps 1 modules wider" in told
    assert 'run.set_policy(…, execution="graphed")' in told
