import pytest
import torch.nn.functional as F
from torch import nn

from narrowcast.integrations.transformers import transformers_callback


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_trainer_tells_what_is_found(tmp_path, digits, network):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x, y = digits
    rows = [{"x": a, "labels": b} for a, b in zip(x[:256], y[:256], strict=True)]
    found = []
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=4, per_device_train_batch_size=32, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = transformers_callback(policy="fp16", every=2, tell=found.append)

    class Ending(transformers.TrainerCallback):
        ends = True

        def on_step_end(self, args, state, control, **given):
            if self.ends:
                self.ends = False
                raise InterruptedError

    trainer = transformers.Trainer(
        model=Model(), args=arguments, train_dataset=rows, callbacks=[callback, Ending()]
    )
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.train()
    assert ("net.0", "output", "overflow of fp16") in [(f.module, f.role, f.what) for f in found]
    assert callback.watch.statistics.step == 4
