"""Lightning with the precision plug-in: digits in fp8, one bad batch, then resume.

Run: python examples/lightning_trainer.py
"""

import logging
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.integrations.lightning import NarrowcastPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, index):
        x, y = batch
        x = x * float("inf") if self.global_step == 7 else x  # one bad batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(epochs, **settings):
    torch.manual_seed(0)
    plugin, module = NarrowcastPrecision("fp8-delayed, params=bf16, master=split"), Classifier()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_epochs=epochs, plugins=[plugin], gradient_clip_val=1.0, **quiet)
    trainer.fit(module, DataLoader(data, batch_size=128), **settings)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return module, plugin


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    whole, plugin = fit(4)
    fit(2)
    resumed, _ = fit(4, ckpt_path=folder / "2.ckpt")
same = all(map(torch.equal, whole.parameters(), resumed.parameters()))
accuracy = (whole.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
print(f"accuracy {accuracy:.3f}, {plugin.stats.applied} of {plugin.stats.steps} steps applied")
print("resumed run is the same, bit for bit:", same)
