"""Warm up in fp32, train in fp8, finish in bf16: one model, one optimizer, no restart.

Run: python examples/schedule.py
"""

import torch
import torch.nn.functional as F

import narrowcast as nc

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
run = nc.prepare(model, optimizer, policy="fp32", clip_norm=1.0, scheduler=scheduler)

inputs = torch.randn(4096, 64)
labels = inputs[:, :16].argmax(1)  # a function the model can learn
phases = {10: "fp8-delayed", 50: "bf16, params=bf16, master=split"}
for step in range(60):
    if step in phases:
        planned = nc.plan(model, phases[step], hardware=run.plan.hardware)
        before = run.fp32_state_dict()["0.weight"].clone()
        for change in run.set_policy(planned):
            print(f"step {step + 1}: {change.module}: {change.before} → {change.after}")
        assert torch.equal(run.fp32_state_dict()["0.weight"], before)  # bit-exact
    rows = torch.randint(0, 4096, (128,))
    with run.autocast():
        loss = F.cross_entropy(model(inputs[rows]), labels[rows])
    run.step(loss)
with torch.no_grad():
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
print(f"accuracy {accuracy:.3f} after {run.steps_applied} of {run.steps_attempted} steps")
