"""Law 2 where users meet it: the quickstart recipe in fp32 is a plain torch loop, bit for bit."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from narrowcast.training.data import Order
from narrowcast.workloads import build_task, load_recipe

STEPS = 6
WORDS = ["precision.policy=fp32", f"steps={STEPS}", "data.eval_windows=2"]


def plain_torch_weights():
    """The recipe written out by hand: nothing of the engine but the task and the data's order."""
    recipe = load_recipe("quickstart", WORDS).recipe
    task = build_task(recipe, device=torch.device("cpu"))
    model = task.model
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    # A warm-up of ten steps: these are its first.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    order = Order(samples=len(task.train_data), batch_size=recipe.batch_size, seed=recipe.seed)
    for k in range(STEPS):
        inputs, targets = task.train_data.__getitems__(order.indices(k))
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


@pytest.mark.usefixtures("forked_python")
def test_the_quickstart_in_fp32_is_a_plain_torch_loop_bit_for_bit(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "narrowcast", "train", "quickstart", *WORDS, "--quiet"]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=120)
    weights = load_file(out / "model.safetensors")
    expected = plain_torch_weights()
    assert weights.keys() <= expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
