import pytest
import torch
from torch import nn

from narrowcast.config.sections import OptimizerSection
from narrowcast.errors import ConfigError
from narrowcast.training.optimizers import build_optimizer

CPU = torch.device("cpu")
KINDS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def train(model, optimizer, steps=5):
    x = torch.linspace(-1, 1, 30).reshape(10, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", KINDS)
def test_each_name_is_the_torch_optimizer_of_that_name(name):
    built = build_optimizer(OptimizerSection(name=name), small_model(), device=CPU)
    assert type(built) is KINDS[name]


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (
            OptimizerSection(lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.5),
            lambda g: torch.optim.AdamW(g, lr=0.1, betas=(0.8, 0.9), eps=1e-5, fused=True),
        ),
        (
            OptimizerSection(name="adam", lr=0.1, fused=False, weight_decay=0.5),
            lambda g: torch.optim.Adam(g, lr=0.1, fused=False),
        ),
        (
            OptimizerSection(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.5),
            lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, fused=True),
        ),
        (
            OptimizerSection(name="rmsprop", lr=0.1, momentum=0.9, eps=1e-3, weight_decay=0.5),
            lambda g: torch.optim.RMSprop(g, lr=0.1, momentum=0.9, eps=1e-3),
        ),
        (
            OptimizerSection(name="adafactor", lr=0.1, weight_decay=0.5),
            lambda g: torch.optim.Adafactor(g, lr=0.1),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, OptimizerSection) else "",
)
def test_every_setting_reaches_torch(settings, theirs):
    model = small_model()
    ours = train(model, build_optimizer(settings, model, device=CPU))
    model = small_model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.5},
        {"params": vectors, "weight_decay": 0.0},
    ]
    expected = train(model, theirs(groups))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_weight_decay_moves_matrices_and_leaves_vectors():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(OptimizerSection(lr=0.1, weight_decay=0.5), model, device=CPU)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old * (1 - 0.1 * 0.5) if p.ndim == 2 else old)


def test_a_frozen_parameter_is_not_given_to_the_optimizer():
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = build_optimizer(OptimizerSection(), model, device=CPU)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model[1:].parameters()}


def test_tied_weights_are_given_once():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = build_optimizer(OptimizerSection(), model, device=CPU)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(OptimizerSection(), small_model().requires_grad_(False), device=CPU)


@pytest.mark.parametrize(("asked", "given"), [(None, True), (True, True), (False, False)])
def test_fused_is_used_unless_refused(asked, given):
    optimizer = build_optimizer(OptimizerSection(fused=asked), small_model(), device=CPU)
    assert optimizer.param_groups[0]["fused"] is given


def test_a_device_without_a_fused_kernel_gets_none():
    device = torch.device("meta")
    optimizer = build_optimizer(OptimizerSection(), small_model().to(device), device=device)
    assert optimizer.param_groups[0]["fused"] is False
