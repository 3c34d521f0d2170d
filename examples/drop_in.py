"""A training loop in fp16 with any torch optimizer; one bad batch is skipped.

Run: python examples/drop_in.py [adamw|sgd|adafactor]
"""

import sys

import torch
import torch.nn.functional as F

import narrowcast as nc

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
optimizers = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=4e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
optimizer = optimizers[sys.argv[1] if len(sys.argv) > 1 else "adamw"](model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
run = nc.prepare(model, optimizer, policy="fp16", clip_norm=1.0, scheduler=scheduler)

inputs = torch.randn(4096, 64)
labels = inputs[:, :10].argmax(1)  # a function the model can learn
accumulate = 2
for step in range(60):
    for rows in torch.randint(0, 4096, (accumulate, 128)):
        x = inputs[rows] * (float("inf") if step == 30 else 1.0)  # one bad batch
        with run.autocast():
            loss = F.cross_entropy(model(x), labels[rows])
        run.backward(loss / accumulate)
    outcome = run.step()
    if not outcome.applied:
        print(f"step {outcome.step} skipped: {outcome.skip_reason}")
with torch.no_grad():
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.3f} after {run.steps_applied} of {run.steps_attempted} steps")
