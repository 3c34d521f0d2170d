"""What somebody's own builder may return, and what it is told otherwise."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.bench.zoo.built import as_built, build_mine, place_of
from narrowcast.errors import RecipeError

CPU = torch.device("cpu")
X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def entropy(model, x, y):
    return F.cross_entropy(model(x), y)


class WithLoss(nn.Linear):
    """Gives its own loss, in the way asked for."""

    def __init__(self, as_what):
        super().__init__(3, 2)
        self.as_what = as_what

    def forward(self, x, labels):
        loss = F.cross_entropy(super().forward(x), labels)
        return {"mapping": {"loss": loss}, "tuple": (loss, None), "tensor": loss}[self.as_what]


def test_a_loss_of_ones_own_is_taken_of_the_inputs():
    made = as_built((model(), entropy, (X, Y)), CPU)
    assert torch.equal(made.loss_of(made.model, *made.inputs), entropy(model(), X, Y))
    assert made.model.training


@pytest.mark.parametrize("as_what", ["mapping", "tuple", "tensor"])
@pytest.mark.parametrize("batch", [{"x": X, "labels": Y}, (X, Y), [X, Y]])
def test_a_model_may_give_its_loss_itself(as_what, batch):
    made = as_built((WithLoss(as_what), batch), CPU)
    expected = F.cross_entropy(nn.Linear.forward(made.model, X), Y)
    assert torch.equal(made.loss_of(made.model, *made.inputs), expected)


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        (None, r"returned a NoneType; return \(model, loss_of, inputs\)"),
        ((1, 2, 3, 4), "returned 4 things; return"),
        ((7, entropy, X), "returned an int in the place of the model"),
        ((nn.Identity(), entropy, X), "a model that has no parameters: there is nothing to train"),
        ((Frozen(), entropy, X), "a model that is frozen throughout"),
        ((model(), X, X), "returned a Tensor in the place of the loss"),
        ((model(), entropy, "abc"), "returned a str as its batch; give tensors"),
        ((model(), {"x": 3}), "returned a batch without a tensor"),
    ],
)
def test_what_is_no_model_with_a_batch_is_refused(returned, answer):
    with pytest.raises(RecipeError, match=answer):
        as_built(returned, CPU)


@pytest.mark.parametrize(
    ("loss_of", "answer"),
    [
        (lambda model, x: model(x), "a loss of 4 × 2 numbers; take its mean"),
        (lambda model, x: 3.0, "a loss that is a float; let it be a tensor"),
        (lambda model, x: model(x).sum().detach(), "a loss without gradients; do not detach it"),
    ],
)
def test_a_loss_that_cannot_be_trained_by_is_refused(loss_of, answer):
    made = as_built((model(), loss_of, X), CPU)
    with pytest.raises(RecipeError, match=answer):
        made.loss_of(made.model, *made.inputs)


@pytest.mark.parametrize("text", ["build", "mine.py:build", "mine:", ":build", "mine:a.b"])
def test_what_is_no_place_is_refused_with_one_that_is(text):
    with pytest.raises(RecipeError, match=r"write package\.module:build"):
        place_of(text)


def test_a_builder_is_found_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere", *sys.path])
    (tmp_path / "own_zoo_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    return nn.Linear(2, 1), lambda m, x: m(x).sum(), torch.ones(1, 2)\n"
    )
    made = build_mine("own_zoo_model:build", CPU)
    assert made.loss_of(made.model, *made.inputs).shape == ()
    with pytest.raises(RecipeError, match="own_zoo_model has no function bild; it has build"):
        build_mine("own_zoo_model:bild", CPU)
    with pytest.raises(RecipeError, match="there is no module own_zoo_modle, looked for in"):
        build_mine("own_zoo_modle:build", CPU)


def test_what_a_module_of_ones_own_misses_is_not_said_to_be_the_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_zoo_other.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        build_mine("own_zoo_other:build", CPU)
