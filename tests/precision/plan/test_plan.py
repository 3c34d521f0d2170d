import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Support, detect_hardware
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import Policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.up = nn.Linear(32, 64)

    def forward(self, x):
        return self.up(self.attention(*[self.norm(x)] * 3)[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 48, bias=False)
        self.odd = nn.Linear(32, 50)
        self.head.weight = self.embed.weight


def rows(planned):
    return {m.name: m for m in planned.modules}


def test_a_row_is_made_for_every_module_that_multiplies_or_holds_weights(cpu):
    names = [m.name for m in make_plan(Model(), "bf16", hardware=cpu).modules]
    block = ["norm", "attention", "up"]
    expected = [f"blocks.{i}.{name}" for i in (0, 1) for name in block]
    assert names == ["embed", *expected, "head", "odd"]


REASONS = [
    ("bf16", "blocks.0.norm", "kept fp32: normalisation"),
    ("bf16", "embed", "kept fp32: embedding lookup, no products"),
    ("bf16", "blocks.0.up", "emulated: this CPU has no bf16 products"),
    (
        "fp8-row",
        "odd",
        "kept bf16: 32×50 is not a multiple of 16; emulated: this CPU has no bf16 products",
    ),
    ("fp8-row", "blocks.1.up", "emulated: this CPU has no e4m3 products"),
    ("compute=mxfp8", "head", "kept bf16: 32×48 is not a multiple of 32; emulated: this CPU has "),
    ("fp32", "blocks.0.up", "fp32"),
    ("bf16; odd: fp32", "odd", "fp32 (exception)"),
    ("bf16", "head", "emulated: this CPU has no bf16 products (weight tied to an earlier module)"),
]


@pytest.mark.parametrize(("policy", "name", "reason"), REASONS)
def test_the_reason_says_what_was_decided_and_why(cpu, policy, name, reason):
    assert rows(make_plan(Model(), policy, hardware=cpu))[name].reason.startswith(reason)


def test_a_shape_that_is_no_multiple_of_sixteen_is_kept_in_bf16_and_says_so(h200):
    with torch.device("meta"):
        head = nn.Linear(768, 50257)
    module_plan = make_plan(head, "fp8-tensor", hardware=h200).modules[0]
    assert module_plan.reason.startswith("kept bf16: 768×50257 is not a multiple of 16")
    assert module_plan.policy.forward == "bf16"


def test_eight_bit_products_are_for_linear_layers_and_the_plan_says_so(cpu):
    module_plan = rows(make_plan(Model(), "fp8-tensor", hardware=cpu))["blocks.0.attention"]
    assert module_plan.policy.forward == "bf16"
    assert "kept bf16: only linear layers support 8-bit products" in module_plan.reason


def test_a_linear_layer_with_a_forward_of_its_own_is_not_said_to_run_in_fp8(cpu):
    class Doubled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight * 2, self.bias)

    module_plan = make_plan(Doubled(32, 32), "fp8-tensor", hardware=cpu).modules[0]
    assert module_plan.policy.forward == "bf16"
    assert "overrides forward" in module_plan.reason


def test_formats_per_product_are_not_promised_to_a_convolution(cpu):
    policy = "bf16, grad_weight=fp32, output=fp32"
    module_plan = make_plan(nn.Conv1d(4, 4, 1), policy, hardware=cpu).modules[0].to_json()
    assert (module_plan["grad_weight"], module_plan["output"]) == ("bf16", "bf16")
    assert "kept bf16" in module_plan["reason"]


def test_a_gpu_with_the_arithmetic_is_planned_natively(h200):
    by_name = rows(make_plan(Model(), "fp8-tensor", hardware=h200))
    assert by_name["blocks.0.up"].how == "native"
    measured = "speed not measured here"
    assert by_name["blocks.0.up"].reason == f"native: compute capability 9.0; {measured}"
    assert by_name["blocks.0.up"].policy.forward == "e4m3"


def test_products_that_no_gpu_mixes_are_emulated_on_one_that_has_them_all(h200):
    module_plan = make_plan(nn.Linear(32, 32), "bf16, grad_weight=fp32", hardware=h200).modules[0]
    assert (module_plan.how, module_plan.policy.grad_weight) == ("emulated", "fp32")


def test_emulation_everywhere_is_said_to_have_been_asked_for(h200):
    planned = make_plan(Model(), "bf16", hardware=h200, emulate=True)
    assert planned.emulated
    assert rows(planned)["odd"].reason == "emulated: requested by emulate=true"


@pytest.mark.parametrize("policy", ["bf16", "fp8-tensor", "fp32; odd: fp16"])
def test_a_policy_that_needs_emulation_is_refused_where_none_is_wanted(cpu, policy):
    with pytest.raises(
        UnsupportedError, match=r"but emulate=false was set: this CPU has no \w+ prod"
    ):
        make_plan(Model(), policy, hardware=cpu, emulate=False)


def test_a_native_policy_passes_where_no_emulation_is_wanted(h200):
    assert not make_plan(Model(), "bf16", hardware=h200, emulate=False).emulated


def test_what_no_device_here_can_run_is_refused_and_not_called_native(cpu):
    products = {**cpu.products, "bf16": Support(how="impossible", reason="the driver forbids it")}
    hardware = type(cpu)(device="cpu", name="x", memory_bytes=1, products=products)
    with pytest.raises(UnsupportedError, match=r"the driver forbids it\. Use the fp32 policy"):
        make_plan(Model(), "bf16", hardware=hardware)


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_name(cpu):
    with pytest.raises(ConfigError, match=r"`haed: fp32` matches no module \(did you mean head"):
        make_plan(Model(), "bf16; haed: fp32", hardware=cpu)


def test_overrides_are_exceptions_that_win(cpu):
    planned = make_plan(Model(), "bf16; head: fp32", hardware=cpu, overrides={"head": "tf32"})
    assert rows(planned)["head"].policy.forward == "tf32"


def test_an_exception_on_a_list_of_modules_reaches_the_functions_of_each(cpu):
    names = rows(make_plan(Model(), "bf16; blocks: fp32", hardware=cpu))
    assert {"blocks.0", "blocks.1"} <= names.keys()
    assert names["blocks.0"].policy.functional == "fp32"
    assert "blocks" not in names


def test_tied_weights_are_counted_once(cpu):
    model = Model()
    planned = make_plan(model, "bf16", hardware=cpu)
    unique = sum(p.numel() for p in model.parameters())
    assert sum(m.parameters for m in planned.modules) == unique
    assert planned.bytes["params"] == 4 * unique


BYTES = [
    ("fp32", 4, 4, 0, 8),
    ("bf16", 4, 4, 0, 8),
    ("bf16-pure", 2, 2, 0, 4),
    ("bf16, params=bf16, master=split", 2, 2, 2, 8),
    ("bf16, params=bf16, master=kahan", 2, 2, 2, 8),
    ("bf16, params=bf16, master=stochastic", 2, 2, 0, 8),
    ("bf16, params=bf16, master=fp32", 2, 2, 4, 8),
    ("bf16, params=bf16, master=fp32, grads=fp32", 2, 4, 4, 8),
]


@pytest.mark.parametrize(("policy", "params", "grads", "master", "moments"), BYTES)
def test_bytes_are_those_of_the_formats(cpu, policy, params, grads, master, moments):
    layer = nn.Linear(32, 16, bias=False)
    sizes = make_plan(layer, policy, hardware=cpu).bytes
    expected = {"params": params, "grads": grads, "master": master, "moments": moments}
    assert sizes == {role: 512 * each for role, each in expected.items()}


def test_a_plan_is_plain_data_that_json_can_carry(cpu):
    data = make_plan(Model(), "fp8-row; head: bf16", hardware=cpu).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["functional"]["format"] == "bf16"
    keys = "name kind forward grad_input grad_weight params output how reason parameters bytes"
    assert set(data["modules"][0]) == set(keys.split())


def test_a_model_without_storage_can_be_planned(cpu):
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    assert make_plan(model, "fp8-tensor", hardware=cpu).modules[0].parameters == 4096 * 4097


def test_this_machines_own_reasons_reach_the_plan():
    hardware = detect_hardware("cpu")
    module_plan = make_plan(nn.Linear(16, 16), "fp8-tensor", hardware=hardware).modules[0]
    assert module_plan.reason == "emulated: no CPU has e4m3 products"


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_a_norm_says_the_format_it_runs_in(cpu, reduce):
    module_plan = make_plan(nn.LayerNorm(4), f"bf16, reduce={reduce}", hardware=cpu).modules[0]
    assert module_plan.reason == f"kept {reduce}: normalisation"


def test_a_parametrised_weight_is_computed_in_fp32(cpu):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    by_name = rows(make_plan(layer, "bf16-pure", hardware=cpu))
    assert by_name["parametrizations.weight"].policy == Policy()
    assert by_name[""].policy.forward == "bf16"


def test_planning_leaves_a_copy_equal_to_the_model(cpu):
    model = Model()
    before = copy.deepcopy(model.state_dict())
    make_plan(model, "aggressive; head: fp32", hardware=cpu)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_weights_kept_in_fp8_are_counted_in_both_layouts(h200):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 5))
    found = make_plan(model, "fp8-tensor", hardware=h200)
    assert found.bytes["fp8"] == 2 * 64 * 32  # the second is no multiple of 16
    assert make_plan(model, "fp8-row", hardware=h200).bytes["fp8"] == found.bytes["fp8"]
    wide = make_plan(model, "fp8-tensor, grad_input=bf16", hardware=h200)
    assert wide.bytes["fp8"] == 64 * 32


def test_weights_that_are_frozen_stay_as_they_are_with_nothing_beside_them(cpu, mlp):
    model = mlp()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    planned = make_plan(model, "bf16, params=bf16, master=split", hardware=cpu)
    nothing = {"grads": 0, "master": 0, "moments": 0}
    assert planned.module("0").bytes == {"params": 4 * (32 * 32 + 32), **nothing}
    assert planned.module("0").reason.endswith("(frozen: dtype unchanged)")
    assert planned.module("0").policy.params == "fp32"
    assert planned.module("3").bytes["params"] == 4 * 32 * 16 + 2 * 16
    assert planned.module("3").reason.endswith("(partly frozen: dtype unchanged)")
    wide = make_plan(model, "bf16", hardware=cpu)
    assert "frozen" not in "".join(each.reason for each in wide.modules)
    model[0].to(torch.bfloat16)
    narrow = make_plan(model, "bf16", hardware=cpu)
    assert narrow.module("0").bytes["params"] == 2 * (32 * 32 + 32)
    assert "frozen" in narrow.module("0").reason


def test_a_recurrent_layer_with_a_frozen_weight_is_planned_in_fp32(cpu):
    lstm = nn.LSTM(8, 8)
    lstm.bias_hh_l0.requires_grad_(False)
    planned = make_plan(lstm, "bf16, params=bf16, master=split", hardware=cpu).module("")
    assert planned.policy.params == "fp32"
    assert planned.bytes["params"] == 4 * sum(p.numel() for p in lstm.parameters())
    assert "partly frozen" in planned.reason


def test_a_trained_weight_is_not_widened_by_a_frozen_neighbour(cpu):
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    planned = make_plan(model, "bf16, params=bf16, master=split", hardware=cpu)
    assert planned.module("1").policy.params == "bf16"
    assert planned.module("1").bytes["params"] == 4 * 8


def test_a_plan_is_for_the_device_that_the_model_is_on():
    model = nn.Linear(4, 4)
    assert make_plan(model, "bf16") == make_plan(model, "bf16", hardware=detect_hardware("cpu"))
    with torch.device("meta"):
        nowhere = nn.Linear(4, 4)
    assert make_plan(nowhere, "bf16").hardware == detect_hardware("auto")


class Positions(nn.Module):
    """Computes in fp32 under every policy, and says so."""

    runs_in_fp32 = True

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4)])

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ self.weights[0]


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-delayed"])
def test_a_module_that_turns_autocast_off_is_planned_in_fp32(policy):
    model = nn.Sequential(nn.Linear(4, 4), Positions())
    plan = make_plan(model, policy)
    formats = {each.name: each.policy.forward for each in plan.modules}
    assert formats["1.weights"] == "fp32"
    assert formats["0"] != "fp32"


def test_an_exception_without_the_prefix_of_a_wrapper_suggests_the_full_path():
    model = nn.Sequential(nn.ModuleDict({"lm_head": nn.Linear(4, 4)}))
    with pytest.raises(ConfigError, match=r"\(did you mean 0\.lm_head\?\)"):
        make_plan(model, "bf16; lm_head: fp32")
