import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.integrations.lightning import lightning_callback


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_lightning_trainer_tells_what_is_found(tmp_path, digits, network):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    found = []
    data = torch.utils.data.TensorDataset(*digits)
    callback = lightning_callback(policy="fp16", every=2, tell=found.append)
    module = Module()
    lightning.Trainer(
        max_steps=4,
        accumulate_grad_batches=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=64))
    assert ("net.0", "output", "overflow of fp16") in [(f.module, f.role, f.what) for f in found]
    assert callback.watch.statistics.step == 4  # of the optimizer, not micro-batches
    callback.on_fit_start(None, module)
    callback.on_exception(None, module, ValueError())
    assert [type(m) for m in module.net] == [nn.Linear, nn.ReLU, nn.Linear]
