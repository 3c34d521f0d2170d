"""The eager reference of `benchmarks/decompose.py`, against numpy, torch and numbers by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def target():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))


@pytest.fixture
def model(target):
    from decompose_reference.components import ComponentModel

    return ComponentModel(target, {"0": 7, "2": 4})


def masks_of(model, *, components, delta):
    from decompose_reference.components import Mask

    deltas = model.deltas()
    return {
        name: Mask(
            components=torch.full((5, model.components(name).V.shape[1]), components),
            delta=(deltas[name], torch.full((5,), delta)),
        )
        for name in model.names
    }


def test_all_components_and_the_whole_delta_are_the_target(model, target):
    x = torch.randn(5, 6)
    found = model(x, masks_of(model, components=1.0, delta=1.0))
    assert torch.allclose(found, target(x), atol=1e-5)


def test_only_the_bias_of_a_layer_is_left_without_components_and_delta(model, target):
    masks = masks_of(model, components=0.0, delta=0.0)
    found = model(torch.randn(5, 6), {"0": masks["0"]})
    expected = target[2](F.relu(target[0].bias)).expand(5, 3)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_masked_layer_is_what_numpy_makes_of_the_definition(model, target):
    from decompose_reference.components import Mask

    x, m, m_delta = torch.randn(5, 6), torch.rand(5, 7), torch.rand(5)
    routed = torch.tensor([True, True, False, True, False])
    mask = Mask(components=m, delta=(model.deltas()["0"], m_delta), routed=routed)
    found = model(x, {"0": mask}).detach().numpy()

    values = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    v, u = values["by_key.0.V"], values["by_key.0.U"]
    w, b = values["target.0.weight"], values["target.0.bias"]
    xs = x.double().numpy()
    y = ((xs @ v) * m.numpy()) @ u + m_delta.numpy()[:, None] * (xs @ (w - (v @ u).T).T) + b
    y = np.where(routed.numpy()[:, None], y, xs @ w.T + b)
    assert found == pytest.approx(np.maximum(y, 0) @ values["target.2.weight"].T, abs=1e-6)


def test_no_hook_is_left_even_where_the_target_raises(model, target):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(5, 9), masks_of(model, components=1.0, delta=1.0))
    assert all(not module._forward_hooks for module in target.modules())


def test_divergences_are_those_of_torch():
    from decompose_reference import losses

    one, two = torch.randn(4, 6, 11), torch.randn(4, 6, 11)
    expected = F.kl_div(two.log_softmax(-1), one.softmax(-1), reduction="sum") / 24
    assert losses.kl(one, two) == pytest.approx(expected.item(), rel=1e-6)
    assert losses.mse(one, two) == pytest.approx(F.mse_loss(one, two).item(), rel=1e-6)


def test_penalties_are_those_made_by_hand():
    from decompose_reference import losses

    upper = {
        "a": torch.tensor([[[0.5, 0.0]], [[1.0, 2.0]]]),  # means of squares: 0.625 and 2
        "b": torch.tensor([[[0.2]], [[0.4]]]),  # 0.1
    }
    assert losses.importance_minimality(upper, 2.0).item() == pytest.approx(2.725)
    assert losses.importance_minimality(upper, 1.0).item() == pytest.approx(2.05)
    deltas = {"a": torch.full((2, 3), 0.5), "b": torch.full((1, 2), 2.0)}
    assert losses.faithfulness(deltas).item() == (6 * 0.25 + 2 * 4) / 8


def test_squashing_passes_gradients_by_its_table():
    from decompose_reference.importance import lower_leaky, upper_leaky

    z = torch.tensor([-1.0, -1.0, 0.5, 0.5, 1.5, 1.5], requires_grad=True)
    grad = torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    (found,) = torch.autograd.grad(lower_leaky(z), z, grad)
    assert found.tolist() == pytest.approx([-0.01, 0, -1, 1, 0, 0])
    assert lower_leaky(z).tolist() == [0, 0, 0.5, 0.5, 1, 1]
    assert upper_leaky(z).tolist() == pytest.approx([0, 0, 0.5, 0.5, 1.005, 1.005])


def test_subsets_have_every_size_equally_often():
    from decompose_reference import losses

    torch.manual_seed(0)
    lower = {name: torch.zeros(40_000, 1) for name in "abcd"}
    where = torch.stack(list(losses.subset_routing(lower).values()))
    counts = torch.bincount(where.sum(0), minlength=5).tolist()
    assert counts[0] == 0
    # Four standard deviations of a binomial of 40,000 and a quarter.
    assert all(abs(count - 10_000) < 4 * (40_000 * 0.25 * 0.75) ** 0.5 for count in counts[1:])
    assert all(abs(share - 0.625) < 0.01 for share in where.float().mean(1).tolist())


def test_an_ascent_of_one_full_step_goes_to_the_corner_that_its_gradient_points_to():
    from decompose_reference import losses
    from decompose_reference.components import ComponentModel, Mask

    torch.manual_seed(1)
    model = ComponentModel(nn.Sequential(nn.Linear(3, 2)), {"0": 4})
    batch, lower = torch.randn(6, 3), {"0": torch.rand(6, 4)}
    deltas = {"0": model.deltas()["0"].detach()}
    start = torch.rand(1, 5)
    zeros = torch.zeros(6, 2)
    masks = losses.adversarial_masks(
        model,
        batch,
        zeros,
        lower,
        deltas,
        losses.mse,
        steps=1,
        step_size=1.0,
        draw=lambda *shape, device: start.clone().view(shape),
    )
    found = losses.reconstruction(model, batch, zeros, masks, losses.mse)

    def at(sources):
        m = lower["0"] + (1 - lower["0"]) * sources[:, :4]
        mask = Mask(components=m, delta=(deltas["0"], sources[:, 4].expand(6)))
        return losses.mse(zeros, model(batch, {"0": mask}))

    differences = torch.zeros(5)
    with torch.no_grad():
        for each in range(5):
            moved = start.clone()
            moved[0, each] += 1e-2
            differences[each] = at(moved) - at(start)
        expected = at((differences > 0).float()[None])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.fixture
def toy_run():
    """A decomposition of a toy in the reference, with components near the target's weights."""
    from decompose_reference import losses
    from decompose_reference.targets import pentagon
    from decompose_reference.training import Objective, Run, Settings

    def make(*, bf16):
        torch.manual_seed(0)
        objective = Objective(divergence=losses.mse, minimality=3e-3, stochastic=1.0, layerwise=1.0)
        settings = Settings(
            patterns={"linear*": 20},
            importance="mlp",
            hidden=(16,),
            objective=objective,
            lr=1e-2,
            steps=40,
            bf16=bf16,
            tied={"linear2": "linear1"},
        )
        target = pentagon()
        return Run(target, settings, device=torch.device("cpu")), target

    return make


@pytest.fixture
def language_run():
    """The same of a small language model, with subsets and an adversary."""
    pytest.importorskip("transformers")
    from decompose_reference import losses
    from decompose_reference.targets import language_model
    from decompose_reference.training import Objective, Run, Settings

    def make(*, bf16):
        target = language_model(layers=2, width=32, hidden=64, vocabulary=50)
        objective = Objective(
            divergence=losses.kl, minimality=1e-3, p=2.0, subset=0.5, pgd_subset=0.5
        )
        settings = Settings(
            patterns={"model.layers.*.self_attn.?_proj": 24, "model.layers.*.mlp.[ud]*": 24},
            importance="shared_mlp",
            hidden=(32,),
            objective=objective,
            lr=1e-3,
            steps=10,
            bf16=bf16,
        )
        run = Run(target, settings, device=torch.device("cpu"), output=lambda found: found.logits)
        return run, target

    return make


@pytest.mark.parametrize(("bf16", "within"), [(False, 1e-6), (True, 1e-3)])
def test_terms_of_a_toy_are_those_of_the_library_under_equal_masks(toy_run, bf16, within):
    from decompose_reference.side_by_side import terms

    run, target = toy_run(bf16=bf16)
    run.warm_up(20)
    batch = torch.rand(128, 5) * (torch.rand(128, 5) < 0.3)
    found = list(terms(run, batch, target))
    assert [each.name for each in found] == [
        "minimality", "stochastic", "layerwise", "faithfulness"
    ]  # fmt: skip
    for each in found:
        assert each.ours == pytest.approx(each.reference, rel=within, abs=within)


@pytest.mark.parametrize(("bf16", "within"), [(False, 1e-6), (True, 1e-3)])
def test_terms_of_a_language_model_are_those_of_the_library(language_run, bf16, within):
    from decompose_reference.side_by_side import terms

    run, target = language_run(bf16=bf16)
    found = list(terms(run, torch.randint(50, (4, 32)), target, output="logits"))
    assert [each.name for each in found] == ["minimality", "subset", "pgd_subset", "faithfulness"]
    for each in found:
        assert each.ours == pytest.approx(each.reference, rel=within, abs=within)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_few_steps_lower_the_loss_of_a_toy(toy_run, bf16):
    from decompose_reference import losses
    from decompose_reference.targets import sparse_features

    run, _ = toy_run(bf16=bf16)
    before = losses.faithfulness(run.model.deltas()).item()
    run.warm_up(20)
    assert losses.faithfulness(run.model.deltas()).item() < before / 4
    batches = sparse_features(256, 5, 0.05, device=run.device)
    logged = [run.step(next(batches)) for _ in range(40)]
    assert set(logged[0]) == {"minimality", "stochastic", "layerwise", "total"}
    first, last = (sum(each["total"] for each in part) for part in (logged[:5], logged[-5:]))
    assert last < first
    one, two = run.model.components("linear1"), run.model.components("linear2")
    assert torch.equal(one.V, two.U.T)
