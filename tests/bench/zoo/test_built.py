"""What the user's builder may return, and what raises."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.bench.zoo.built import as_built, build_mine, parse_builder
from narrowcast.errors import ConfigError

CPU = torch.device("cpu")
X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def entropy(model, x, y):
    return F.cross_entropy(model(x), y)


class WithLoss(nn.Linear):
    """Returns its own loss, in the given form."""

    def __init__(self, as_what):
        super().__init__(3, 2)
        self.as_what = as_what

    def forward(self, x, labels):
        loss = F.cross_entropy(super().forward(x), labels)
        return {"mapping": {"loss": loss}, "tuple": (loss, None), "tensor": loss}[self.as_what]


def test_a_loss_function_gets_the_model_and_the_inputs():
    made = as_built((model(), entropy, (X, Y)), CPU)
    assert torch.equal(made.loss_fn(made.model, *made.inputs), entropy(model(), X, Y))
    assert made.model.training


@pytest.mark.parametrize("as_what", ["mapping", "tuple", "tensor"])
@pytest.mark.parametrize("batch", [{"x": X, "labels": Y}, (X, Y), [X, Y]])
def test_a_model_may_return_its_loss(as_what, batch):
    made = as_built((WithLoss(as_what), batch), CPU)
    expected = F.cross_entropy(nn.Linear.forward(made.model, X), Y)
    assert torch.equal(made.loss_fn(made.model, *made.inputs), expected)


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.requires_grad_(False)


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        (None, r"returned a NoneType. Return \(model, loss_fn, inputs\)"),
        ((1, 2, 3, 4), "returned 4 values. Return"),
        ((7, entropy, X), "returned an int as the model"),
        ((nn.Identity(), entropy, X), "a model without trainable parameters"),
        ((Frozen(), entropy, X), "a model without trainable parameters"),
        ((model(), X, X), "returned a Tensor as the loss function"),
        ((model(), entropy, "abc"), "returned a str as the batch. Return tensors"),
        ((model(), {"x": 3}), "returned a batch without a tensor"),
    ],
)
def test_a_builder_that_returns_no_model_and_batch_raises(returned, answer):
    with pytest.raises(ConfigError, match=answer):
        as_built(returned, CPU)


@pytest.mark.parametrize(
    ("loss_fn", "answer"),
    [
        (lambda model, x: model(x), "a loss of 4 × 2 numbers. Return its mean"),
        (lambda model, x: 3.0, "a loss that is a float. Return a scalar tensor"),
        (lambda model, x: model(x).sum().detach(), "a loss without gradients. Do not detach it"),
    ],
)
def test_a_loss_that_cannot_be_trained_raises(loss_fn, answer):
    made = as_built((model(), loss_fn, X), CPU)
    with pytest.raises(ConfigError, match=answer):
        made.loss_fn(made.model, *made.inputs)


@pytest.mark.parametrize("text", ["build", "mine.py:build", "mine:", ":build", "mine:a.b"])
def test_a_builder_name_without_module_and_function_raises(text):
    with pytest.raises(ConfigError, match=r"must be package\.module:build"):
        parse_builder(text)


def test_a_builder_is_found_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere", *sys.path])
    (tmp_path / "own_zoo_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    return nn.Linear(2, 1), lambda m, x: m(x).sum(), torch.ones(1, 2)\n"
    )
    made = build_mine("own_zoo_model:build", CPU)
    assert made.loss_fn(made.model, *made.inputs).shape == ()
    with pytest.raises(ConfigError, match="own_zoo_model has no function bild"):
        build_mine("own_zoo_model:bild", CPU)
    with pytest.raises(ConfigError, match="there is no module own_zoo_modle in"):
        build_mine("own_zoo_modle:build", CPU)


def test_a_missing_import_of_the_users_module_is_reported_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_zoo_other.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        build_mine("own_zoo_other:build", CPU)
