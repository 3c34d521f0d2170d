import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.forecast.heads import make_head
from narrowcast.workloads.forecast.models.network import make_network, window_scale
from narrowcast.workloads.forecast.models.shape import Shape
from narrowcast.workloads.forecast.models.transformers import BatchNormOfTokens, PatchTST
from narrowcast.workloads.forecast.settings import ForecastModel, Objective

MODELS = ("nlinear", "dlinear", "nhits", "patchtst", "itransformer", "lstm")
CPU = torch.device("cpu")
SMALL = {"width": 16, "dropout": 0.0}
HEADS = {"patchtst": {"heads": 4}, "itransformer": {"heads": 4}}


def network(name, *, head="point", lookback=40, horizon=12, **shape):
    settings = {"name": name, **HEADS.get(name, {})}
    if name not in ("nlinear", "dlinear"):
        settings |= SMALL
    made = make_head(Objective(head=head), device=CPU)
    sizes = Shape(lookback=lookback, horizon=horizon, outputs=made.outputs, **shape)
    return make_network(ForecastModel(**settings), sizes, made, seed=0, device=CPU).eval()


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("head", ["point", "quantile", "student_t"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.pairwise
def test_every_model_forecasts_all_rows_with_every_head_and_trains_every_weight(name, head):
    made = network(name, head=head, lookback=37, horizon=11)
    numbers = made(draw(3, 2, 37))
    assert numbers.shape == (3, 2, 11, made.head.outputs)
    made.head.losses(numbers, draw(3, 2, 11)).mean().backward()
    assert [name for name, each in made.named_parameters() if each.grad is None] == []


@pytest.mark.parametrize("name", ["nlinear", "patchtst", "itransformer", "lstm"])
def test_a_forecast_moves_with_the_level_of_its_window(name):
    made, x = network(name), draw(3, 2, 40)
    assert torch.allclose(made(x + 100), made(x) + 100, atol=1e-3)


@pytest.mark.parametrize("name", ["nlinear", "dlinear", "nhits", "patchtst", "lstm"])
def test_a_channel_does_not_see_the_others(name):
    made, x = network(name), draw(3, 2, 40)
    assert torch.allclose(made(x)[:, :1], made(x[:, :1]), atol=1e-5)


def test_channels_of_an_itransformer_see_each_other():
    made, x = network("itransformer"), draw(3, 2, 40)
    assert not torch.allclose(made(x)[:, :1], made(x[:, :1]), atol=1e-3)


def test_dlinear_begins_as_the_mean_of_its_window():
    made, x = network("dlinear"), draw(3, 2, 40)
    for layer in (made.body.trend, made.body.seasonal):
        nn.init.zeros_(layer.bias)
    mean = x.mean(-1, keepdim=True)[..., None].expand(-1, -1, 12, -1)
    assert torch.allclose(made(x), mean, atol=1e-5)


def test_nhits_interpolates_its_coefficients_like_torch():
    stack = network("nhits").body.stacks[0]
    residual, forecast = stack(draw(5, 40), None)
    numbers = stack.coefficients(stack.mlp(F.max_pool1d(draw(5, 40), 2, ceil_mode=True)))
    knots = numbers[:, 40:].view(5, 1, 3)
    reference = F.interpolate(knots, size=12, mode="linear")
    assert torch.allclose(forecast[..., 0], reference[:, 0], atol=1e-6)
    assert torch.equal(residual, numbers[:, :40])


def test_patchtst_has_the_patches_of_its_name():
    for lookback, patches in ((336, 42), (512, 64)):
        shape = Shape(lookback=lookback, horizon=96, outputs=1)
        assert PatchTST(ForecastModel(name="patchtst"), shape).tokens == patches


def test_batch_norm_of_tokens_equals_that_of_torch_over_all_tokens():
    own, reference, x = BatchNormOfTokens(6), nn.BatchNorm1d(6), draw(4, 5, 6)
    assert torch.allclose(own(x), reference(x.mT).mT, atol=1e-6)
    assert torch.allclose(own.running_var, reference.running_var)


@pytest.mark.parametrize("how", ["last", "mean", "standard", "robust", "none"])
def test_a_constant_window_scales_to_finite_numbers(how):
    centre, spread = window_scale(torch.full((2, 3, 8), 5.0), how)
    assert torch.isfinite((5.0 - centre) / spread).all()


@pytest.mark.parametrize("name", ["nhits", "lstm"])
def test_columns_that_are_known_ahead_reach_every_row_after_them(name):
    made = network(name, future=2, past=1, static=3)
    x, past, future, static = draw(3, 2, 40), draw(3, 1, 40), draw(3, 2, 52), draw(3, 3)
    before = made(x, past, future, static)
    for each in (past, future, static):
        each[:, -1] += 1
        after = made(x, past, future, static)
        assert not torch.allclose(before, after)
        before = after
    later = future.clone()
    later[..., -1] += 1
    assert not torch.allclose(made(x, past, later, static)[:, :, -1], before[:, :, -1])


@pytest.mark.parametrize("kind", ["past", "future", "static"])
def test_columns_that_a_model_cannot_read_raise(kind, tmp_path):
    (tmp_path / "a.csv").write_text("ds,y,x\n")
    words = [f"data.path={tmp_path / 'a.csv'}", f"data.{kind}=[x]"]
    with pytest.raises(UnsupportedError, match=rf"nlinear reads no {kind} columns.*model.name="):
        build_task(load_recipe("forecast/nlinear", words).recipe, device=CPU)


def test_a_setting_of_another_model_raises():
    with pytest.raises(ConfigError, match="nlinear has no width"):
        load_recipe("forecast/nlinear", ["model.width=64"])
    with pytest.raises(ConfigError, match="heads must divide width 100"):
        load_recipe("forecast/patchtst", ["model.width=100"])
    with pytest.raises(ConfigError, match="one number per stack"):
        load_recipe("forecast/nhits", ["model.pools=[2,1]"])
    with pytest.raises(ConfigError, match="quantiles needs head=quantile"):
        load_recipe("forecast/nlinear", ["objective.quantiles=[0.4,0.5]"])
