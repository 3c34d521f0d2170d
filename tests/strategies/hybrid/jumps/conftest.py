"""Weights on given ways, and models small enough to be stepped in a millisecond."""

import contextlib

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.strategies.hybrid.jumps.access import ExactWeights
from narrowcast.strategies.hybrid.jumps.history import HistorySettings, WeightHistory


@pytest.fixture
def history_of():
    """Makes a history of weights that are somewhere at every time 0, 1, …, one interval apart."""

    def make(way, snapshots, *, every=10, **settings):
        settings = HistorySettings(
            **{"keep": "fp32", "most": snapshots, **settings, "every": every}
        )
        history = WeightHistory(way(0), settings)
        for time in range(snapshots):
            history.take(time * every, way(time))
        return history

    return make


@pytest.fixture
def randn():
    """Draws normal tensors, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


class ListedWeights:
    """Weights that are a list of fp32 tensors, without optimizer or buffers."""

    def __init__(self, weights):
        self.weights = weights
        self.names = [f"weight {i}" for i in range(len(weights))]
        self.resets = 0

    def read(self):
        return list(self.weights)

    def write(self, values):
        torch._foreach_copy_(self.weights, list(values))

    def snapshot(self, *, with_moments=False):
        return ExactWeights(tuple(w.clone() for w in self.weights))

    def restore(self, exact):
        self.write(exact.tensors)

    def refuse_reset(self):
        pass

    def reset_moments(self):
        self.resets += 1

    def aside(self):
        return contextlib.nullcontext()


@pytest.fixture
def listed():
    return ListedWeights


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def prepared():
    """Makes a small prepared model, with dropout and a batch norm."""

    def make(policy, *, optimizer="adamw", **settings):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(16, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4)
        )
        made = {
            "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=0.01),
            "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
            "adagrad": lambda: torch.optim.Adagrad(net.parameters(), lr=0.01),
        }[optimizer]()
        return nc.prepare(net, made, policy=policy, emulate=True, **settings)

    return make


@pytest.fixture
def train():
    """Takes steps of such a model, from one of them on."""

    def go(run, steps, *, first=0):
        for step in range(first, first + steps):
            with run.compute():
                loss = (run.model(X * (1 + step % 3)).float() - 1).square().mean()
            run.step(loss)
        return run

    return go
