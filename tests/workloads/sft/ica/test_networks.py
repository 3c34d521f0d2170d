import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import (
    FunctionalNetworks,
    Layout,
    Provenance,
    Score,
    load_networks,
    save_networks,
)
from narrowcast.workloads.sft.ica.networks_file import networks_from_json, networks_to_json

LAYOUT = Layout(layers=(0, 2, 3), width=8, depth=4)


def made(networks, **parts):
    return FunctionalNetworks(networks=networks, **{"layout": LAYOUT, **parts})


TWO = made({0: {0: (1, 2), 3: (7,)}, 1: {0: (2, 3)}})

channels = st.sets(st.integers(0, 7), min_size=1).map(lambda s: tuple(sorted(s)))
finite = st.floats(allow_nan=False, allow_infinity=False)
any_networks = st.builds(
    made,
    st.dictionaries(st.integers(0, 99), st.dictionaries(st.sampled_from((0, 2, 3)), channels)),
    provenance=st.builds(
        Provenance,
        name=st.text(),
        model=st.text(),
        data=st.text(),
        seed=st.none() | st.integers(),
        findings=st.lists(st.text(), max_size=2).map(tuple),
    ),
)


@given(
    networks=any_networks,
    score=st.builds(Score, explained=finite, negentropy=finite, stability=finite),
)
def test_networks_come_back_from_json(networks, score):
    scored = made(
        networks.networks,
        provenance=networks.provenance,
        scores=dict.fromkeys(networks.components[:1], score),
    )
    assert networks_from_json(networks_to_json(scored)) == scored


def test_a_file_comes_back_and_is_not_left_half_written(tmp_path):
    path = tmp_path / "new" / "networks.json"
    save_networks(TWO, path)
    assert load_networks(path) == TWO
    assert [each.name for each in path.parent.iterdir()] == ["networks.json"]


def test_templates_of_the_source_system_are_read():
    text = json.dumps(
        {
            "name": "groupwise_v1",
            "layout": {"captured_layers_sorted": [0, 1], "hidden_size": 16},
            "templates": {"0": {"0": [1, 15]}, "1": {}},
        }
    )
    networks = networks_from_json(text)
    assert networks.networks == {0: {0: (1, 15)}, 1: {}}
    assert networks.layout == Layout(layers=(0, 1), width=16)
    assert networks.provenance.name == "groupwise_v1"


def changed(**parts):
    return json.dumps(json.loads(networks_to_json(TWO)) | parts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the file must have format, layout, .* got list"),
        ("{}", "the file must have .* got nothing"),
        (changed(extra=1), "got extra, format"),
        (changed(format="x"), "format must be narrowcast"),
        (changed(networks=[]), "networks must be an object"),
        (changed(networks={"-1": {}}), "Keys of networks must be numbers from 0, got '-1'"),
        (changed(networks={"01": {}}), "Keys of networks must be numbers from 0, got '01'"),
        (changed(networks={"²": {}}), "Keys of networks must be numbers from 0, got '²'"),
        (changed(networks={"0": {"0": [True]}}), r"networks.0.0 must be a whole number, got True"),
        (changed(networks={"0": {"0": [1.0]}}), "must be a whole number"),
        (changed(networks={"0": {"0": 1}}), "networks.0.0 must be a list"),
        (changed(networks={"0": {"0": [8]}}), "between 0 and 7"),
        (changed(networks={"0": {"0": [2, 1]}}), "ascending"),
        (changed(networks={"0": {"0": [1, 1]}}), "must be unique"),
        (changed(networks={"0": {"0": []}}), "Leave out layers without"),
        (changed(networks={"0": {"1": [1]}}), "has layer 1, but the layout has layers 0, 2, 3"),
        (changed(layout={"layers": [0], "width": 8}), "layout must have .* got layers, width"),
        (
            changed(scores={"7": {"explained": 1, "negentropy": 1, "stability": 1}}),
            "scores must be for existing comp",
        ),
        (
            networks_to_json(TWO).replace('"scores": {}', '"scores": {"0": NaN}'),
            "NaN is not a",
        ),
        (networks_to_json(TWO).replace('"1": {', '"0": {', 1), "The key '0' occurs twice"),
    ],
)
def test_what_is_not_understood_is_refused(text, why):
    with pytest.raises(ConfigError, match=why):
        networks_from_json(text)


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read as networks: .*No such file"):
        load_networks(tmp_path / "gone.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary cannot be read as networks"):
        load_networks(tmp_path / "binary")


def test_the_union_of_networks():
    assert TWO.channels([0, 1]) == {0: (1, 2, 3), 3: (7,)}
    assert TWO.channels() == TWO.channels([0, 1])
    assert TWO.channels([0], layers=[3]) == {3: (7,)}


def test_all_others():
    assert TWO.others({0: (1, 2), 2: tuple(range(8))}) == {
        0: (0, 3, 4, 5, 6, 7),
        3: tuple(range(8)),
    }


@given(networks=any_networks)
def test_channels_and_all_others_are_all_channels(networks):
    chosen = networks.channels() if networks.components else {}
    others = networks.others(chosen)
    for layer in LAYOUT.layers:
        both = [*chosen.get(layer, ()), *others.get(layer, ())]
        assert sorted(both) == list(range(8))


def test_a_component_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="component must be one of 0, 1, got 5"):
        TWO.channels([0, 5])
    with pytest.raises(ConfigError, match="components is empty"):
        TWO.channels([])


def test_networks_are_matched_by_what_they_share():
    other = made({4: {0: (2, 3)}, 5: {0: (1, 2), 3: (6,)}, 6: {2: (0,)}})
    found = [(m.component, m.other, m.iou) for m in TWO.match(other)]
    assert found == [(0, 5, 0.5), (1, 4, 1.0)]
    everything = [(m.component, m.other) for m in TWO.match(other, top=2)]
    assert everything == [(0, 5), (0, 4), (1, 4), (1, 5)]


@given(one=any_networks, other=any_networks)
def test_iou_is_symmetric_and_one_for_the_same(one, other):
    for mine in one.components:
        assert one.iou(mine, one, mine) == 1
        for theirs in other.components:
            assert one.iou(mine, other, theirs) == other.iou(theirs, one, mine)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"depth": 4, "width": 16}, "have 8 channels per layer, but this model has 16. Build"),
        ({"depth": 6, "width": 8}, "are for 4 layers, but this model has 6. Build"),
    ],
)
def test_a_model_of_another_shape_is_refused(shape, why):
    TWO.require_fit(depth=4, width=8)
    with pytest.raises(ConfigError, match=why):
        TWO.require_fit(**shape)


def test_a_template_of_unknown_depth_needs_its_layers():
    unknown = made({0: {3: (1,)}}, layout=Layout(layers=(0, 3), width=8))
    unknown.require_fit(depth=4, width=8)
    with pytest.raises(ConfigError, match="have layer 3, but this model has 3 layers"):
        unknown.require_fit(depth=3, width=8)
