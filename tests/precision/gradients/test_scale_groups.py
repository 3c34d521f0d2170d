"""Parts of the model with a loss scale of their own."""

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


def prepared(built, parts, *, policy="fp32", scale=None, **settings):
    scale = scale or nc.LossScale(growth_interval=1)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    return nc.prepare(
        built, optimizer, policy=policy, loss_scale=scale, scale_groups=parts, **settings
    )


def part_scales(run):
    saved = run.state_dict()["scales"]["parts"]
    return {glob: float(scale["value"]) for glob, scale in saved.items()}


def whole_scale(run):
    return float(run.state_dict()["scales"]["losses"]["loss"]["value"])


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("parts", [["2"], ["0", "2"], ["[02]"], ["3"]])
def test_parts_train_exactly_like_the_plain_model(parts, clip_norm):
    mine = model()
    plain = copy.deepcopy(mine)
    run = prepared(mine, parts, clip_norm=clip_norm)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(6):
        assert run.step(mine(X).square().mean()).applied
        plain(X).square().mean().backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        theirs.step()
        theirs.zero_grad()
    assert all(value > 1 for value in part_scales(run).values())  # they did scale
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        if clip_norm is None:  # powers of two change no digit
            assert torch.equal(a, b)
        else:  # the norm is summed from scaled norms, and one factor does both
            torch.testing.assert_close(a, b, rtol=2.0**-20, atol=2.0**-20)


def test_a_part_backs_off_alone():
    built = model()
    run = prepared(built, ["0", "2"], scale=nc.LossScale())
    handle = built[2].weight.register_hook(lambda g: g * float("inf"))
    assert not run.step(built(X).square().mean()).applied
    handle.remove()
    assert part_scales(run) == {"0": 1.0, "2": 0.5}
    assert whole_scale(run) == 2.0**16


def test_the_whole_backs_off_where_no_part_is_to_blame():
    built = model()
    run = prepared(built, ["2"], scale=nc.LossScale())
    built[3].weight.register_hook(lambda g: g * float("inf"))
    run.step(built(X).square().mean())
    assert whole_scale(run) == 2.0**15
    assert part_scales(run) == {"2": 1.0}


def test_the_whole_backs_off_once_a_part_cannot():
    built = model()
    run = prepared(built, ["2"], scale=nc.LossScale())
    built[2].weight.register_hook(lambda g: g * float("nan"))
    for _ in range(15):
        run.step(built(X).square().mean())
    assert (part_scales(run)["2"], whole_scale(run)) == (2.0**-15, 2.0**16)
    run.step(built(X).square().mean())
    assert (part_scales(run)["2"], whole_scale(run)) == (2.0**-15, 2.0**15)


class Faint(nn.Module):
    """A part in which gradients become too small for fp16 between its two layers."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        nn.init.constant_(self.part[1].weight, 2.0**-20)
        self.part[1].requires_grad_(False)

    def forward(self, x):
        return self.part(x) * 2.0**-10


@pytest.mark.usefixtures("guarded")
def test_a_scale_of_its_own_rescues_gradients_that_fp16_flushes():
    still = nc.LossScale(init_scale=1.0, max_scale=1.0, growth_interval=1)

    def first_moved(parts):
        torch.manual_seed(0)
        built = Faint()
        run = prepared(built, parts, policy="fp16", scale=still)
        before = built.part[0].weight.detach().clone()
        for _ in range(20):
            with run.autocast():
                loss = built(X).sum()
            run.step(loss)
        return not torch.equal(built.part[0].weight, before)

    assert not first_moved([])
    assert first_moved(["part"])


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match="'prat' matches no module"):
        prepared(Faint(), ["prat"])


def test_groups_of_which_one_is_inside_another_are_refused():
    built = nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 2))
    for parts in (["0", "0.0"], ["0.0", "0"], ["0", "[0]"]):
        with pytest.raises(ConfigError, match="overlaps with another group"):
            prepared(built, parts)


def test_a_weight_shared_with_the_rest_of_the_model_is_refused():
    built = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    built[2].weight = built[0].weight
    with pytest.raises(ConfigError, match="shares a weight with a module outside its group"):
        prepared(built, ["2"])


def test_parts_without_a_loss_scale_are_refused():
    built = model()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a policy that uses it"):
        nc.prepare(built, optimizer, policy="bf16", scale_groups=["2"])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("policy", ["fp16", "fp16, params=bf16, master=split", "fp8-tensor"])
def test_parts_and_rewritten_modules_go_together(policy):
    built = model()
    run = prepared(built, ["2"], policy=policy)
    for _ in range(5):
        with run.autocast():
            loss = built(X).square().mean()
        run.step(loss)
    assert run.stats().applied > 0
    assert all(p.isfinite().all() for p in built.parameters())
    run.release()
    assert type(built[2]) is nn.Linear
