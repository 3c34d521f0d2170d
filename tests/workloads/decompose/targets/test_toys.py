"""Every toy by its name: what is said of it fits what it is."""

from fnmatch import fnmatchcase

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.targets.toys import toy_plan, toy_target

NAMES = ("tms_5-2", "tms_5-2-id", "tms_40-10", "tms_40-10-id", "tms_5-5")
NAMES += ("resid_mlp1", "resid_mlp2", "resid_mlp3", "induction")


@pytest.mark.parametrize("name", NAMES)
def test_its_sites_are_there_and_so_are_those_whose_truth_is_known(name):
    toy = toy_target(name, seeds=2, seed=0, device="meta")
    sites = {site.name: site for site in find_sites(toy.target, toy.sites)}
    assert toy.name == toy_plan(name).name == name
    assert set(toy.truth) <= set(sites)
    assert {*toy.tied, *toy.tied.values()} <= set(sites)
    assert all(any(fnmatchcase(site, each) for site in sites) for each in toy.sites)
    for site, truth in toy.truth.items():
        assert sites[site].components >= truth.size
        if truth.kind == "dense":
            assert truth.size == min(sites[site].d_in, sites[site].d_out)
    assert toy.target(toy.draw(3)).shape[:2] == (2, 3)


@pytest.mark.parametrize("name", ["tms_5", "tms_0-2", "tms_5-2-ID", "resid_mlp4", "tms_5-2\n", ""])
def test_a_name_that_is_none_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"model.toy must be tms_5-2 .* or induction, got"):
        toy_plan(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "steps"), [("tms_5-2", 3000), ("resid_mlp1", 300)])
def test_a_gpu_trains_what_is_right_too(name, steps):
    toy = toy_target(name, seeds=8, seed=0, device="cuda", steps=steps)
    assert toy.draw(4).device.type == toy.probe.device.type == "cuda"
    assert all(each.is_cuda for each in toy.target.state_dict().values())
    with torch.no_grad():
        given = toy.target(toy.probe).diagonal(dim1=1, dim2=2)
    assert (given > 0.6).all()
