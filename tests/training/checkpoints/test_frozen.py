"""Weights that nobody trains are made again by the task, and are in no checkpoint."""

import hashlib
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs import StepRecord
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint, save_checkpoint
from narrowcast.training.checkpoints.export import results_are_whole
from narrowcast.training.checkpoints.frozen import checksums
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.task import Hook
from narrowcast.training.train_loop import train_loop

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.complex64]


class Adapted(nn.Module):
    """A large layer that stays, in fp8 bytes, beside a small one that learns."""

    def __init__(self, base=torch.float8_e4m3fn, width=64):
        super().__init__()
        values = torch.randn(width, width).to(base)
        self.base = nn.Parameter(values, requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.rise = nn.Linear(1, width)
        self.fall = nn.Linear(width, 1)

    def forward(self, x):
        hidden = self.norm(torch.tanh(self.rise(x)))
        return self.fall(torch.tanh(hidden @ self.base.to(hidden.dtype) / 8))


def adapted(ready, *, seed=0, base=torch.float8_e4m3fn, policy="fp32", hooks=(), **settings):
    torch.manual_seed(seed)
    settings = {"steps": 8, "checkpoint": {"every": 3, "keep": 9}, **settings}
    return ready(policy, parts={"model": Adapted(base), "hooks": hooks}, **settings)


def course(made, **settings):
    records = train_loop(made.prepared, made.task, made.recipe, **settings)
    return [(r.step, r.loss) for r in records if isinstance(r, StepRecord)]


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_a_run_is_resumed_bit_for_bit_from_a_checkpoint_without_its_frozen_weights(
    ready, tmp_path, base, policy
):
    settings = {"base": base, "policy": policy, "ema": {"decay": 0.9}}
    made = adapted(ready, **settings)
    straight = course(made, folder=tmp_path)
    state = load_checkpoint(tmp_path / "checkpoints/step-000003")
    trained = {name for name, p in made.task.model.named_parameters() if p.requires_grad}
    buffers = {name for name, _ in made.task.model.named_buffers()}
    assert set(state["prepared"]["weights"]) == trained | buffers
    assert list(state["frozen"]) == ["base"]
    again = adapted(ready, **settings)
    assert course(again, resume=state, folder=tmp_path) == straight[3:]
    assert first_difference(again.prepared.state_dict(), made.prepared.state_dict()) is None


def test_a_checkpoint_is_as_small_as_what_learns(ready, tmp_path):
    made = ready("fp32", parts={"model": Adapted(torch.float32, width=512)}, steps=2)
    course(made, folder=tmp_path)
    base = 512 * 512 * 4
    saved = tmp_path / "checkpoints/step-000002/tensors.safetensors"
    assert saved.stat().st_size < base / 10
    assert load_file(tmp_path / "model.safetensors")["base"].nbytes == base  # whole all the same


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 1}, "it has other values"),
        ({"base": torch.bfloat16}, "it was float8_e4m3fn of 64×64 and is now bfloat16 of 64×64"),
    ],
)
def test_other_frozen_weights_are_refused_by_name_and_nothing_is_loaded(
    ready, tmp_path, other, said
):
    course(adapted(ready), folder=tmp_path)
    made = adapted(ready, **other)
    before = {name: each.clone() for name, each in made.task.model.state_dict().items()}
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match="does not hold the frozen weight base") as caught:
        train_loop(made.prepared, made.task, made.recipe, resume=state)
    assert said in str(caught.value)
    assert first_difference(dict(made.task.model.state_dict()), before) is None


def test_a_weight_that_is_trained_here_and_was_frozen_is_refused(ready, tmp_path):
    course(adapted(ready, base=torch.float32), folder=tmp_path)
    torch.manual_seed(0)
    model = Adapted(torch.float32)
    model.base.requires_grad_(True)
    made = ready("fp32", parts={"model": model}, steps=8, checkpoint={"every": 3, "keep": 9})
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match="float32 of 64×64 and is now trained"):
        train_loop(made.prepared, made.task, made.recipe, resume=state)


@pytest.mark.parametrize("behind", [False, True], ids=["in place", "through .data"])
def test_a_frozen_weight_that_a_hook_moves_is_in_the_checkpoint(ready, tmp_path, behind):
    """A teacher that follows its pupil takes no gradient, and changes all the same."""

    def follow(prepared, applied):
        base = prepared.model.base
        (base.data if behind else base).mul_(0.5)

    hooks = (Hook(name="teacher", after_step=follow),)
    made = adapted(ready, base=torch.float32, hooks=hooks)
    straight = course(made, folder=tmp_path)
    state = load_checkpoint(tmp_path / "checkpoints/step-000003")
    assert state["frozen"] == {}
    again = adapted(ready, base=torch.float32, hooks=hooks)
    assert course(again, resume=state) == straight[3:]
    assert torch.equal(again.task.model.base, made.task.model.base)


def test_a_checkpoint_that_holds_everything_is_taken_up(ready, tmp_path):
    """As they were saved before frozen weights were left out."""
    made = adapted(ready)
    straight = course(made, folder=tmp_path)
    state = load_checkpoint(tmp_path / "checkpoints/step-000003")
    del state["frozen"]
    state["prepared"]["weights"]["base"] = made.task.model.base.detach()
    save_checkpoint(tmp_path / "older", 3, state=state)
    again = adapted(ready, seed=1)  # the checkpoint is right, whatever the task has made
    assert course(again, resume=load_checkpoint(latest(tmp_path / "older"))) == straight[3:]


def test_checksums_tell_apart_what_sha256_tells_apart():
    torch.manual_seed(0)
    seen = {}
    for dtype in DTYPES:
        for shape in [(3,), (4, 5), (300, 1000), (2**18 * 8 + 5,), (0,), ()]:
            one = (torch.randn(shape) * 9).to(dtype)
            other, moved = one.clone(), one.clone().roll(1)
            if one.numel():
                bits = other.reshape(-1).view(torch.uint8)
                bits[-1] ^= 1
            for each in (one, other, moved):
                words = f"{each.dtype} {tuple(each.shape)} ".encode()
                bits = each.reshape(-1).view(torch.uint8).numpy().tobytes()
                digest = hashlib.sha256(words + bits).hexdigest()
                seen.setdefault(digest, set()).add(checksums([("x", each)])["x"])
    assert all(len(found) == 1 for found in seen.values())
    assert all(a != b for a, b in pairwise(sorted(found.pop() for found in seen.values())))


def test_a_checksum_is_of_the_values_wherever_they_lie_in_memory():
    whole = torch.randn(101, 50)
    part = whole[1:, 1:]
    same = checksums([("part", part), ("copy", part.clone()), ("turned", part.t().clone().t())])
    assert len(set(same.values())) == 1


@pytest.mark.gpu
def test_a_checksum_is_the_same_on_the_gpu():
    for dtype in DTYPES:
        one = (torch.randn(2**18 * 8 + 5) * 9).to(dtype)
        assert checksums([("x", one)]) == checksums([("x", one.cuda())])


def test_a_task_may_write_its_weights_itself(ready, tmp_path):
    def write(folder, prepared):
        (folder / "adapter").mkdir(exist_ok=True)
        (folder / "adapter/weights.txt").write_text("small")

    made = adapted(ready).but(write_results=write, weights_path="adapter")
    course(made, folder=tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert results_are_whole(tmp_path, step=8)
    (tmp_path / "adapter/weights.txt").unlink()
    assert not results_are_whole(tmp_path, step=8)


def test_a_task_that_does_not_write_its_weights_after_all_is_told(ready, tmp_path):
    made = adapted(ready).but(write_results=lambda folder, prepared: None, weights_path="adapter")
    with pytest.raises(ConfigError, match="got nothing in"):
        course(made, folder=tmp_path)
    assert not results_are_whole(tmp_path, step=8)


def test_weights_that_nobody_would_write_are_refused(ready):
    with pytest.raises(ConfigError, match="got 'adapter' without one"):
        adapted(ready).but(weights_path="adapter")
