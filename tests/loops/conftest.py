"""How two loops are compared: one of plain torch, and the same with narrowcast dropped in.

A loop returns its losses, the modules it trained or kept, and its optimizers. In fp32 all of it
must be the same to the last bit.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc

PARAMS_BF16 = "bf16, params=bf16, master=split"
# fp16 begins low enough for no step to be skipped: a plain loop skips none.
NARROW = (
    {"policy": "bf16"},
    {"policy": "fp16", "loss_scale": nc.LossScale(init_scale=1024.0)},
    {"policy": "fp8-tensor"},
)
# What one product adds to the relative error of what passes through it: two operands are rounded,
# each by half a unit of its format; e5m2, the format of gradients in fp8, has the widest.
UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8-tensor": 2.0**-3, PARAMS_BF16: 2.0**-8}


@dataclasses.dataclass
class Trained:
    """What a loop leaves behind."""

    losses: Sequence[float]
    modules: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight, buffer and moment by a name, and the losses."""
        found = {"losses": torch.tensor(self.losses)}
        for i, module in enumerate(self.modules):
            found |= {f"{i}.{name}": value for name, value in module.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            found |= _leaves(optimizer.state_dict()["state"], f"optimizer {i}")
        return found


def _leaves(value: Any, name: str) -> dict[str, Tensor]:
    if isinstance(value, dict):
        inner = [_leaves(each, f"{name}.{key}") for key, each in value.items()]
        return {key: leaf for part in inner for key, leaf in part.items()}
    return {name: torch.as_tensor(value)} if isinstance(value, Tensor | float | int) else {}


def differences(mine: Trained, theirs: Trained) -> list[str]:
    """Return the names of all that is not the same to the last bit."""
    a, b = mine.tensors(), theirs.tensors()
    missing = sorted(a.keys() ^ b.keys())
    return missing + [
        name
        for name in a
        if name in b and not (a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]))
    ]


def check_same(mine: Trained, theirs: Trained) -> None:
    """Fail, by name, where anything differs."""
    assert len(mine.losses) > 1
    assert differences(mine, theirs) == []


def check_near(mine: Trained, theirs: Trained, *, products: int, policy: str, **_: Any) -> None:
    """Fail where a number is not finite, or a loss further off than its roundings explain.

    `products` are those that a number passes through from the data to the loss, one after another:
    at worst their errors add up. Those of one step and the next are unrelated, and add up as the
    root of their number. Half of the loss is more than any of these loops may be off.
    """
    for name, value in mine.tensors().items():
        assert value.isfinite().all(), name
    for k, (loss, exact) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
        allowed = min(0.5, products * math.sqrt(k + 1) * UNITS[policy])
        assert abs(loss - exact) <= allowed * max(1.0, abs(exact)), f"loss of step {k}"


@pytest.fixture(scope="session")
def machine() -> Any:
    """The module of the state machine, which `benchmarks/loops.py` runs for longer."""
    path = Path(__file__).parent / "machine.py"
    spec = importlib.util.spec_from_file_location("loop_machine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def autocast() -> Any:
    """torch's own mixed precision on a CPU, or a skip where a product in it ends the process."""

    def region(format_name: str) -> Any:
        reason = nc.detect_hardware("cpu").support(format_name).reason
        if "died" in reason:
            pytest.skip(f"needs a CPU that multiplies {format_name}: {reason}")
        return torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[format_name])

    return region


@pytest.fixture
def trained() -> Any:
    return Trained


@pytest.fixture
def same() -> Any:
    return check_same


@pytest.fixture
def near() -> Any:
    return check_near


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what takes a `narrow` policy in each, and what takes `narrow_or_params` in one more."""
    for name, given in {
        "narrow": NARROW,
        "narrow_or_params": [*NARROW, {"policy": PARAMS_BF16}],
    }.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, given, ids=lambda each: each["policy"])
