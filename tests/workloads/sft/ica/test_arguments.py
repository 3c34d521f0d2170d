"""Arguments of a wrong type raise one of our errors and are never taken for something else."""

import numpy as np
import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import (
    ICA,
    ArraySignals,
    Freeze,
    FunctionalNetworks,
    ICAMask,
    Layout,
    Masks,
    Percentile,
    TopK,
    ZScore,
    ablate,
    functional_networks,
    load_networks,
    save_networks,
)
from narrowcast.workloads.sft.ica.signals import storage_for

IDS = torch.arange(24).view(3, 8)
NETWORKS = FunctionalNetworks(networks={0: {0: (1,)}}, layout=Layout(layers=(0, 1, 2), width=16))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("components", "5"),
        ("components", True),
        ("restarts", 2.5),
        ("max_iter", None),
        ("seed", "x"),
        ("tol", "a"),
        ("tol", True),
        ("standardise", "no"),
        ("solver", 3),
        ("contrast", None),
    ],
)
def test_settings_of_ica_have_their_types(name, value):
    with pytest.raises(ConfigError, match=name):
        ICA(**{name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Percentile("98"),
        lambda: Percentile(None),
        lambda: ZScore("2"),
        lambda: ZScore(2.0, two_sided="no"),
        lambda: TopK(2.5),
        lambda: TopK("5"),
        lambda: ArraySignals("signals"),
        lambda: ICA(components=2).fit(torch.zeros(9, 3)),
        lambda: ICA(components=2).fit(np.zeros((9, 3))),
        lambda: NETWORKS.channels(0),
    ],
)
def test_values_have_their_types(make):
    with pytest.raises(ConfigError, match="must be"):
        make()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "gpt2"),
        ("batches", {"input_ids": IDS}),
        ("batches", IDS),
        ("batches", None),
        ("a batch", [IDS]),
        ("ica", 5),
        ("selector", 98),
        ("layers", 1),
        ("a layer", ["a"]),
        ("site", "mlp"),
        ("provenance", "mine"),
    ],
)
def test_arguments_of_the_search_have_their_types(make_model, name, value):
    key = {"a batch": "batches", "a layer": "layers"}.get(name, name)
    given = {"model": make_model("llama"), "batches": [{"input_ids": IDS}], key: value}
    with pytest.raises(ConfigError, match=f"{name} must be"):
        functional_networks(**given)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda model: Masks(model, site="mlp"), "site"),
        (lambda model: Masks(model).lesion([1, 2]), "channels"),
        (lambda model: Masks(model).lesion({"0": (1,)}), "channels"),
        (lambda model: Masks(model).preserve({0: (1.5,)}), "channels"),
        (lambda model: Masks(model).scale({0: 1}, 2.0), "channels"),
        (lambda model: Masks(model).scale({0: (1,)}, "2"), "factor"),
        (lambda model: Freeze(model, [1]), "channels"),
        (lambda model: Freeze(model, {0: (1,)}, site="mlp"), "site"),
        (lambda model: ablate(model, [], 5), "networks"),
        (lambda model: ablate(model, [], NETWORKS, random_masks="2"), "random_masks"),
        (lambda model: ablate(model, [{"input_ids": IDS}] * 2, NETWORKS), "documents"),
        (lambda model: ICAMask(num_components="5").compute(model, [{"input_ids": IDS}]), "compon"),
    ],
)
def test_arguments_of_what_is_done_with_networks_have_their_types(make_model, use, what):
    with pytest.raises(ConfigError, match=f"{what}.* must"):
        use(make_model("llama"))


def test_numbers_of_numpy_and_dtypes_of_torch_are_taken(make_model):
    assert ICA(components=np.int64(3), tol=np.float32(1e-3)).components == 3
    assert Masks(make_model("llama")).lesion({0: tuple(np.arange(3))}).factors()[0, :4].sum() == 1
    assert storage_for(torch.bfloat16).dtype == torch.bfloat16


def test_a_path_may_be_text(tmp_path):
    save_networks(NETWORKS, str(tmp_path / "n.json"))
    assert load_networks(str(tmp_path / "n.json")) == NETWORKS
