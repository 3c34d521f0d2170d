import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from, tuples

from narrowcast.report.layers import bare_reason, format_shares, layers, width

names = lists(
    tuples(sampled_from(["blocks", "encoder.layers", "m"]), integers(0, 12), integers(0, 3)).map(
        lambda parts: ".".join(map(str, parts))
    ),
    unique=True,
    max_size=40,
)


def test_blocks_that_are_alike_are_one_row(module):
    (row,) = layers([module(f"blocks.{i}.mlp.up", parameters=10) for i in range(12)])
    assert row.label == "blocks.{0–11}.mlp.up"
    assert row.parameters == 120
    assert row.names[3] == "blocks.3.mlp.up"


def test_a_block_that_differs_has_its_own_row_where_it_stands(module):
    modules = [module(f"blocks.{i}.up") for i in range(6)]
    modules[2] = module("blocks.2.up", forward="fp32", reason="raised by an exception")
    assert [row.label for row in layers(modules)] == ["blocks.{0–1, 3–5}.up", "blocks.2.up"]


def test_two_alike_stay_two_rows(module):
    rows = layers([module("blocks.0.up"), module("blocks.1.up")])
    assert [row.label for row in rows] == ["blocks.0.up", "blocks.1.up"]


def test_rows_stand_in_the_order_of_the_plan(module):
    names = ["blocks.0.up", "head", "blocks.1.up"]
    assert [row.label for row in layers([module(name) for name in names])] == names


def test_two_indices_fold_into_two_ranges(module):
    (row,) = layers([module(f"stages.{i}.{j}.conv") for i in range(2) for j in range(3)])
    assert row.label == "stages.{0–1}.{0–2}.conv"


def test_a_digit_inside_a_name_is_not_an_index(module):
    rows = layers([module(f"conv{i}") for i in range(4)])
    assert [row.label for row in rows] == ["conv0", "conv1", "conv2", "conv3"]


def test_the_root_module_has_a_name_a_reader_understands(module):
    assert layers([module("")])[0].label == ". (the model itself)"


@given(names=names, kinds=lists(sampled_from(["Linear", "Conv1d"]), min_size=40, max_size=40))
def test_no_module_and_no_parameter_is_lost_or_counted_twice(names, kinds, module):
    modules = [
        module(name, kind=kind, parameters=7) for name, kind in zip(names, kinds, strict=False)
    ]
    rows = layers(modules)
    assert sorted(name for row in rows for name in row.names) == sorted(names)
    assert sum(row.parameters for row in rows) == 7 * len(names)
    kind_of = dict(zip(names, kinds, strict=False))
    assert all(kind_of[name] == row.kind for row in rows for name in row.names)


def test_shares_add_up_to_the_model_with_the_largest_first(gpt_modules):
    modules = gpt_modules(4)
    shares = format_shares(modules)
    assert sum(share.parameters for share in shares) == sum(m["parameters"] for m in modules)
    assert shares[0].name == "fp16"
    assert [s.parameters for s in shares] == sorted((s.parameters for s in shares), reverse=True)


@pytest.mark.parametrize(
    ("name", "family"),
    [("fp32", "full"), ("tf32", "full"), ("bf16", "half"), ("e4m3", "eight"), ("mxfp8", "eight"),
     ("nvfp4", "four"), ("e2m1", "four"), ("–", "other"), ("", "other")],
)  # fmt: skip
def test_formats_are_coloured_by_their_bits(name, family):
    assert width(name) == family


def test_a_reason_does_not_repeat_the_badge():
    assert bare_reason({"how": "emulated", "reason": "emulated: no bf16 here"}) == "no bf16 here"
    assert bare_reason({"how": "native", "reason": "kept fp32: a norm"}) == "kept fp32: a norm"


def test_a_module_without_some_fields_still_has_a_row():
    (row,) = layers([{"name": "head", "kind": "Linear"}])
    assert (row.forward, row.how, row.parameters) == ("–", "–", 0)
