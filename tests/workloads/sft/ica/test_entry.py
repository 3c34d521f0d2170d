import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import (
    ICA,
    ICAMask,
    Masks,
    Percentile,
    Provenance,
    ZScore,
    check_fit,
    functional_networks,
    load_networks,
    save_networks,
)

ICA_OF_FEW = ICA(components=3, restarts=2, max_iter=500)


@pytest.fixture
def many(batches):
    chance = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(0, 64, (8, 16), generator=chance)} for _ in range(4)]


def test_networks_have_their_size_and_say_where_they_come_from(model, many, tmp_path):
    networks = functional_networks(
        model,
        many,
        ica=ICA_OF_FEW,
        selector=Percentile(90.0),
        provenance=Provenance(model="tiny", data="noise"),
    )
    assert networks.components == (0, 1, 2)
    # A tenth of 3 layers with 16 channels.
    assert [networks.size(c) for c in networks.components] == [5, 5, 5]
    assert sum(map(len, networks.channels().values())) <= 15
    known = networks.provenance
    assert (known.model, known.data, known.seed) == ("tiny", "noise", 0)
    assert (known.dtype, known.selector) == ("float32", "percentile=90")
    assert networks.scores[0].explained >= networks.scores[2].explained > 0
    path = tmp_path / "networks.json"
    save_networks(networks, path)
    assert load_networks(path) == networks
    check_fit(networks, model)
    with Masks(model) as masks:
        masks.lesion(networks.channels([0]))
        assert int((masks.factors() == 0).sum()) == 5


@pytest.mark.parametrize("percentile", [98.0, 95.0])
def test_a_percentile_fixes_the_size_of_every_network(make_model, many, percentile):
    networks = functional_networks(
        make_model("gpt2"), many, ica=ICA_OF_FEW, selector=Percentile(percentile)
    )
    share = (100 - percentile) / 100 * 48
    assert all(abs(networks.size(c) - share) <= 1 for c in networks.components)


def test_networks_are_the_same_each_time(make_model, many):
    model = make_model("gpt2")
    one, other = (functional_networks(model, many, ica=ICA_OF_FEW) for _ in range(2))
    assert one == other


def test_networks_of_another_model_are_refused(make_model, many):
    networks = functional_networks(
        make_model("gpt2"), many, ica=ICA_OF_FEW, site="down_input", selector=ZScore()
    )
    check_fit(networks, make_model("gpt2-lora"))
    with pytest.raises(ConfigError, match="have 64 channels per layer, but this model has 40"):
        check_fit(networks, make_model("llama"))


def test_some_layers(make_model, many):
    networks = functional_networks(make_model("gpt2"), many, ica=ICA_OF_FEW, layers="0,2:")
    assert networks.layout.layers == (0, 2)
    assert set(networks.channels()) <= {0, 2}
    with pytest.raises(ConfigError, match="has layer 3, but the model has 3 layers"):
        functional_networks(make_model("gpt2"), many, layers="3")


def test_layer_by_layer_every_network_is_in_one_layer(make_model, many):
    networks = functional_networks(
        make_model("llama"), many, ica=ICA_OF_FEW, selector=ZScore(1.96), site="down_input"
    )
    assert len(networks.components) == 9
    layers = [set(networks.networks[c]) for c in networks.components]
    assert all(layers[c] <= {c // 3} for c in range(9))
    assert networks.layout.width == 40
    assert networks.layout.site == "down_input"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto", None])
def test_the_familiar_name_works_with_every_dtype(make_model, many, dtype):
    mask = ICAMask(num_components=3, percentile=90.0, ica_dtype=dtype)
    networks = mask.compute(make_model("llama").bfloat16(), many)
    stored = {"bfloat16": "bfloat16", "float16": "float16"}.get(dtype, "float32")
    assert networks.provenance.dtype == stored
    assert networks.components == (0, 1, 2)
