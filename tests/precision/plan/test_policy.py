import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.precision.plan.policy import PRESETS, Policy, parse_policy, policy_from

COMPUTE = ("fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "mxfp8", "nvfp4")
ROLE_TEXTS = ("fp32", "bf16", "compute=fp16", "forward=bf16, grad_weight=fp32", "output=fp32")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    forward, grad_input, grad_weight = (draw(st.sampled_from(COMPUTE)) for _ in range(3))
    narrow = {"e4m3", "e5m2"} & {forward, grad_input, grad_weight}
    scalings = ("tensor", "row", "delayed") if narrow else ("none", "tensor", "row", "delayed")
    params = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    masters = {
        "fp32": ("none", "fp32"),
        "bf16": ("none", "fp32", "split", "kahan", "stochastic"),
        "fp16": ("fp32", "kahan", "stochastic"),
    }[params]
    master = draw(st.sampled_from(masters))
    globs = st.sampled_from(("head", "*.norm", "blocks.[01].*", "a?c", "*"))
    return Policy(
        forward=forward,
        grad_input=grad_input,
        grad_weight=grad_weight,
        scaling=draw(st.sampled_from(scalings)),
        output=draw(st.sampled_from(("", "fp32", "bf16", "fp16"))),
        params=params,
        grads=draw(st.sampled_from(("", "fp32", params))),
        master=master,
        moments=draw(st.sampled_from(("", params if master == "none" else "fp32"))),
        reduce=draw(st.sampled_from(("fp32", "bf16", "fp16"))),
        exceptions=tuple(draw(st.dictionaries(globs, st.sampled_from(ROLE_TEXTS))).items()),
    )


@given(policy=policies())
def test_the_text_of_every_policy_reads_back_as_that_policy(policy):
    assert parse_policy(str(policy), presets=PRESETS) == policy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_back_from_its_text(name):
    assert policy_from(str(PRESETS[name])) == PRESETS[name]


def test_the_example_of_the_design_is_read_role_by_role():
    policy = policy_from("compute=e4m3, params=bf16, master=split; *.norm: fp32; head: bf16")
    expected = Policy(
        forward="e4m3",
        grad_input="e4m3",
        grad_weight="e4m3",
        scaling="tensor",
        params="bf16",
        master="split",
        exceptions=(("*.norm", "fp32"), ("head", "bf16")),
    )
    assert policy == expected


def test_a_preset_may_be_changed_by_the_words_after_it():
    assert policy_from("bf16, params=bf16, master=kahan") == dataclasses.replace(
        PRESETS["bf16"], params="bf16", master="kahan"
    )


def test_compute_of_one_product_is_written_with_a_dot_or_without():
    dotted = policy_from("compute=bf16, compute.grad-weight=fp32")
    assert dotted == policy_from("compute=bf16, grad_weight=fp32")
    assert (dotted.forward, dotted.grad_weight) == ("bf16", "fp32")


def test_sixteen_bit_weights_get_a_master_unless_it_is_refused_in_writing():
    assert policy_from("bf16, params=bf16").master == "fp32"
    assert policy_from("bf16, params=bf16, master=none").master == "none"


REFUSALS = [
    ("", "the text is empty"),
    ("bf61", "did you mean bf16"),
    ("compute=bf61", "did you mean bf16"),
    ("compute=e4m4", "did you mean e4m3"),
    (
        "params=e4m3",
        r"params must be one of fp32, bf16, fp16, got e4m3 \(a format, but not for this role\)",
    ),
    ("comput=bf16", r"there is no role 'comput' \(did you mean compute\?\)"),
    ("bf16; head", "an exception must be `glob: format`"),
    ("bf16; head:", "an exception must be `glob: format`"),
    ("bf16; : fp32", "an exception must be `glob: format`"),
    ("bf16; head: bf61", "did you mean bf16"),
    ("bf16; head: master=split", "master applies to the whole model"),
    ("bf16; head: params=bf16", "an exception can only widen params to fp32"),
    ("master=split", "master=split needs 16-bit weights. Write params=bf16"),
    ("params=fp16, master=split", "master=split needs bf16 weights"),
    ("params=fp16, master=none", "Write master=fp32, kahan or stochastic"),
    ("forward=e4m3", "needs a scale. Write scaling=tensor"),
    ("accumulator=bf16", "accumulator must be one of fp32"),
    ("params=bf16, grads=fp16", "Write grads=fp32"),
    ("params=bf16, master=none, moments=fp32", "Write moments=bf16 or int8"),
]


@pytest.mark.parametrize(("text", "says"), REFUSALS)
def test_what_cannot_be_is_refused_with_what_to_write(text, says):
    with pytest.raises(ConfigError, match=says):
        policy_from(text)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError, match=r"master .*got splitt.*params .*got bf61"):
        Policy(params="bf61", master="splitt")


@pytest.mark.parametrize("glob", ["", "a:b", "a;b"])
def test_an_exception_that_could_not_be_read_back_is_refused(glob):
    with pytest.raises(ConfigError, match="an exception must be"):
        Policy(exceptions=((glob, "fp32"),))


def test_an_exception_holds_for_everything_inside_the_module_it_names():
    policy = policy_from("bf16; blocks.0: fp32")
    assert policy.for_module("blocks.0.attention.query").forward == "fp32"
    assert policy.for_module("blocks.01").forward == "bf16"
    assert policy.for_module("blocks").forward == "bf16"


def test_the_last_exception_that_matches_wins():
    policy = policy_from("bf16; blocks.*: fp32; *.head: fp16; blocks.1.head: tf32")
    assert policy.for_module("blocks.0.head").forward == "fp16"
    assert policy.for_module("blocks.1.head").forward == "tf32"
    assert policy.for_module("blocks.1.body").forward == "fp32"


def test_an_exception_begins_from_the_policy_and_not_from_another_exception():
    policy = policy_from("bf16; a: output=fp32; a.b: grad_weight=fp32")
    assert policy.for_module("a").output_format == "fp32"
    assert policy.for_module("a.b").output_format == "bf16"


def test_overrides_win_over_the_exceptions_a_policy_has():
    policy = policy_from("bf16; a: fp32; b: fp32").with_exceptions({"a": "tf32", "c": "fp32"})
    assert policy.exceptions == (("b", "fp32"), ("a", "tf32"), ("c", "fp32"))


@pytest.mark.parametrize("master", ["split", "kahan", "stochastic", "fp32", "none"])
def test_an_exception_may_keep_weights_in_fp32_under_every_master(master):
    policy = policy_from(f"bf16, params=bf16, master={master}; head: params=fp32")
    inside = policy.for_module("head")
    assert (inside.params, inside.master, inside.forward) == ("fp32", "none", "bf16")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("fp16", True),
        ("bf16", False),
        ("fp8-tensor", False),
        ("bf16; head: fp16", True),
        ("fp16; *: fp32", True),
        ("bf16, grad_weight=fp16", True),
        ("bf16, output=fp16", True),
        ("fp32, params=fp16", True),
        ("bf16, reduce=fp16", True),
        ("tf32", False),
    ],
)
def test_a_loss_scale_is_needed_exactly_where_gradients_meet_fp16(text, needed):
    assert policy_from(text).needs_loss_scale is needed


def test_the_issue_names_presets_and_all_of_them_exist():
    names = [
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "bf16-pure",
        "fp8-tensor",
        "fp8-row",
        "fp8-delayed",
        "conservative",
        "default",
        "aggressive",
        "auto",
    ]
    assert all(re.match(r"compute=|forward=", str(policy_from(name))) for name in names)


def test_the_head_of_an_fp8_policy_is_in_bf16_unless_something_else_is_written():
    policy = policy_from("fp8-delayed, params=bf16, master=split")
    other = policy.for_module("blocks.0.mlp.up")
    assert other.forward == "e4m3"
    for name in ("head", "lm_head", "model.lm_head"):
        head = policy.for_module(name)
        assert {head.forward, head.grad_input, head.grad_weight, head.output} == {"bf16"}
        assert (head.params, head.master, head.scaling) == ("bf16", "split", "none")
    assert policy.for_module("header") == policy.for_module("head.norm") == other
    assert policy_from("fp8-delayed; head: forward=e4m3").for_module("head").forward == "e4m3"
    assert policy_from("fp8-delayed, head=fp32").for_module("head").forward == "fp32"
    assert policy_from("fp8-delayed; head: fp32").for_module("head").forward == "fp32"
    assert policy_from("fp8-delayed, compute=fp32").for_module("head").forward == "fp32"
    with pytest.raises(ConfigError, match="head must be one of fp32, bf16, fp16"):
        policy_from("fp8-delayed, head=e4m3")


def test_a_head_in_fp16_needs_a_loss_scale():
    assert policy_from("fp8-delayed, head=fp16").needs_loss_scale
    assert not policy_from("fp8-delayed").needs_loss_scale
