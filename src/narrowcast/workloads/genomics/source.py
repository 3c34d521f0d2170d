"""The domain that is adapted from, learnt before a run begins where no finished one has learnt it.

Plain fp32, a few hundred steps: what is measured is how a network that knows one domain learns
another. A large source is a run of its own, which `model.path` names.
"""

import torch
from torch import nn

from narrowcast.workloads.genomics.data.examples import Batch, Examples
from narrowcast.workloads.genomics.targets import Target

STEPS = 300
ROWS = 32
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0


def learn_source(
    network: nn.Module, target: Target, source: Examples, *, seed: int, device: torch.device
) -> None:
    """Train a network on the source domain; the same seed gives the same weights on a CPU."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        network.train()
        for _ in range(STEPS):
            rows = torch.randint(len(source), (ROWS,), generator=order).tolist()
            batch = on(device, source.__getitems__(rows))
            result = network(batch["tokens"], batch["mask"], batch.get("alternative"))
            optimizer.zero_grad()
            target.loss(result.float(), batch).backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()


def on(device: torch.device, batch: Batch) -> Batch:
    """Return a batch on a device."""
    return {key: value.to(device) for key, value in batch.items()}
