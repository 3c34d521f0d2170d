"""From a recipe to components: which sites there are, and which share them."""

import pytest
import torch
from transformers import GPT2Config

from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.decompose.build import build_parts
from narrowcast.workloads.decompose.components.decomposition import TiedComponents

META = torch.device("meta")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The shapes of a GPT-2, whose head is its embedding turned around."""
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=30, n_positions=16).save_pretrained(folder)
    return folder


def tied(*words, recipe="decompose/tms_5-2"):
    components = build_parts(load_recipe(recipe, words).recipe, device=META).model.decomposition
    return [
        name for name, each in components.components.items() if isinstance(each, TiedComponents)
    ]


def of_gpt2(folder, *words):
    names = ["sites.names=[lm_head, transformer.wte]", "sites.components=4", "data.length=8"]
    words = [f"model.path={folder}", "importance.kind=mlp", *names, *words]
    return tied(*words, recipe="decompose/lm")


def test_a_toy_ties_its_matrices_where_both_are_sites_and_nobody_says_otherwise():
    assert tied() == ["linear2"]
    assert tied("sites.tied=false") == []
    assert tied("sites.names=[linear1]", "sites.components=20") == []


def test_a_head_shares_the_components_of_its_embedding_where_that_is_asked(gpt2):
    assert of_gpt2(gpt2) == []
    assert of_gpt2(gpt2, "sites.tied=true") == ["lm_head"]


def test_to_tie_what_is_no_pair_is_refused(gpt2):
    with pytest.raises(ConfigError, match=r"Name both, or leave sites\.tied out"):
        tied("sites.names=[linear1]", "sites.components=20", "sites.tied=true")
    with pytest.raises(ConfigError, match=r"Name both, or leave sites\.tied out"):
        of_gpt2(gpt2, "sites.names=[lm_head]", "sites.tied=true")
    with pytest.raises(ConfigError, match=r"or write sites\.tied=false"):
        tied("sites.names=[linear1, linear2]", "sites.components=[20, 10]")


def test_identities_are_sites_enough(gpt2):
    words = [
        "sites.names=[]",
        "sites.identities=[transformer.h.*.attn.c_attn]",
        "sites.identity_components=4",
    ]
    asked = [f"model.path={gpt2}", "data.length=8", *words]
    parts = build_parts(load_recipe("decompose/lm", asked).recipe, device=META)
    names = [site.name for site in parts.model.decomposition.sites]
    assert names == ["transformer.h.0.attn.c_attn.pre_identity"]


def test_a_term_is_refused_under_the_name_it_was_asked_for_by():
    term = "losses.persistent_pgd_subset"
    words = [f"{term}.coefficient=1", f"{term}.scope=repeat_across_batch", f"{term}.repeat=3"]
    with pytest.raises(ConfigError, match=r"pgd_subset\.repeat must divide batch_size=1024"):
        tied(*words)
