"""An accelerate loop in fp16 with gradient accumulation; one bad batch per epoch is skipped.

Run: python examples/accelerate_loop.py [policy]
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import narrowcast as nc

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
pixels[100] = float("inf")  # one bad example
data = TensorDataset(pixels, torch.tensor(digits.target))
train_data, test_data = random_split(data, [1500, 297])

policy = sys.argv[1] if len(sys.argv) > 1 else "fp16"
accelerator = nc.Accelerator(policy, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * 24)
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model,
    optimizer,
    DataLoader(train_data, batch_size=32, shuffle=True),
    DataLoader(test_data, batch_size=64),
    scheduler,
)

for epoch in range(4):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct = 0
    for x, y in test_loader:
        with torch.no_grad():
            predicted = model(x.nan_to_num(posinf=0.0)).argmax(1)
        predicted, y = accelerator.gather_for_metrics((predicted, y))
        correct += (predicted == y).sum().item()
    accelerator.print(f"epoch {epoch}: accuracy {correct / len(test_data):.3f}")

logs = accelerator.precision_logs()
accelerator.print(f"{logs['skipped_steps']:.0f} steps skipped, lr {scheduler.get_last_lr()[0]:.2g}")
accelerator.end_training()
