import json

import pytest

from narrowcast.bench.contenders import PEERS, Contender, select_baseline, select_contenders
from narrowcast.bench.peers import BUILDERS
from narrowcast.errors import ConfigError


def selected(*, peers="none", policies="none"):
    return select_contenders(peers=peers, policies=policies, device_type="cpu")


def test_policies_are_separated_by_bars_and_keep_their_commas():
    contenders = selected(policies="bf16 | bf16, params=bf16; head: fp32")
    assert [c.options["policy"] for c in contenders] == ["bf16", "bf16, params=bf16; head: fp32"]


def test_misspelt_peer_gets_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean torch-fp32"):
        selected(peers="torch-fp23")


def test_all_selects_every_peer():
    assert selected(peers="all") == tuple(PEERS.values())


def test_no_contender_at_all_raises():
    with pytest.raises(ConfigError, match="--peers and --policies are both none"):
        selected()


def test_contenders_with_the_same_name_are_numbered():
    names = [c.name for c in selected(policies="bf16 | bf16")]
    assert names == ["narrowcast bf16", "narrowcast bf16 (2)"]


def test_a_contender_that_is_not_installed_is_no_baseline():
    absent = Contender(name="a", kind="x", requires=("no_such_module",), distribution="no-such")
    present = Contender(name="b", kind="x", requires=("no_such_module", "json"))
    assert absent.missing == "no-such is not installed"
    assert present.missing == ""
    assert select_baseline([absent, present], None) is present


def test_a_baseline_is_named_by_peer_or_by_policy():
    contenders = selected(peers="torch-fp32", policies="bf16")
    assert select_baseline(contenders, "bf16") is contenders[1]
    assert select_baseline(contenders, "torch-fp32") is contenders[0]
    with pytest.raises(ConfigError, match="no contender is called 'fp16'"):
        select_baseline(contenders, "fp16")


def test_every_peer_survives_json_and_has_a_builder():
    for peer in PEERS.values():
        restored = Contender(**json.loads(json.dumps(peer.to_json())))
        assert restored.to_json() == peer.to_json()
        assert peer.kind in BUILDERS


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_defaults_of_a_device_are_contenders(device_type):
    assert select_contenders(peers=None, policies=None, device_type=device_type)
