import json

import pytest

from narrowcast.bench.contenders import (
    Contender,
    baseline_of,
    chosen,
    ours,
    policies_from,
    unlike,
)
from narrowcast.bench.step import BENCH, BUILDERS, PEERS
from narrowcast.errors import RecipeError


def test_policies_are_parted_by_bars_and_keep_their_commas():
    assert policies_from("bf16 | bf16, params=bf16; head: fp32") == (
        "bf16",
        "bf16, params=bf16; head: fp32",
    )
    assert policies_from("none") == ()


def test_a_misspelt_peer_gets_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean torch-fp32"):
        chosen("torch-fp23", PEERS)


def test_all_and_none_are_what_they_say():
    assert chosen("all", PEERS) == tuple(PEERS.values())
    assert chosen("none", PEERS) == ()


def test_nobody_to_measure_is_refused():
    with pytest.raises(RecipeError, match="nothing to measure"):
        BENCH.contenders(peers="none", policies="none", device_type="cpu")


def test_two_of_one_name_get_two_rows():
    assert [c.name for c in unlike(ours(["bf16", "bf16"]))] == [
        "narrowcast bf16",
        "narrowcast bf16 (2)",
    ]


def test_what_is_not_installed_says_so_and_is_no_baseline():
    absent = Contender(name="a", kind="x", requires=("no_such_module",), distribution="no-such")
    present = Contender(name="b", kind="x", requires=("no_such_module", "json"))
    assert absent.missing == "no-such is not installed"
    assert present.missing == ""
    assert baseline_of([absent, present], None) is present


def test_a_baseline_is_named_as_a_peer_or_as_a_policy():
    contenders = [PEERS["torch-fp32"], *ours(["bf16"])]
    assert baseline_of(contenders, "bf16") is contenders[1]
    assert baseline_of(contenders, "torch-fp32") is contenders[0]
    with pytest.raises(RecipeError, match="no contender is called 'fp16'"):
        baseline_of(contenders, "fp16")


@pytest.mark.parametrize("name", PEERS)
def test_a_contender_survives_json(name):
    peer = PEERS[name]
    assert Contender.from_json(json.loads(json.dumps(peer.to_json()))) == peer
    assert peer.kind in BUILDERS


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_defaults_of_every_bench_are_contenders(device_type):
    from narrowcast.bench import health, optimizer, products, quality, step

    for module in (step, optimizer, products, health, quality):
        assert module.BENCH.contenders(peers=None, policies=None, device_type=device_type)
