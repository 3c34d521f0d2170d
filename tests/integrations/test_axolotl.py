import json

import accelerate
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from narrowcast.errors import ConfigError

axolotl = pytest.importorskip("axolotl", reason="needs axolotl")
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import load_datasets  # noqa: E402
from axolotl.train import setup_model_and_trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{i}" for i in range(28)]
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}


@pytest.fixture(autouse=True)
def _process_state():
    accelerate.PartialState()  # axolotl holds one for the process, and tests reset it


@pytest.fixture
def base(tmp_path):
    """A folder with a small Llama and its tokenizer, as axolotl loads them."""
    folder = tmp_path / "base"
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def trainer_of(base, tmp_path, narrowcast, **changes):
    rows = [{"text": " ".join(WORDS[(i * 7 + j) % 28] for j in range(8))} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = {
        "base_model": str(base), "model_type": "LlamaForCausalLM",
        "datasets": [{"path": str(tmp_path / "rows.jsonl"), "ds_type": "json",
                      "type": "completion"}],
        "plugins": ["narrowcast.integrations.axolotl.NarrowcastPlugin"],
        "narrowcast": narrowcast, "output_dir": str(tmp_path / "out"),
        "dataset_prepared_path": str(tmp_path / "prepared"), "sequence_len": 32,
        "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 6,
        "learning_rate": 1e-2, "optimizer": "adamw_torch", "lr_scheduler": "cosine",
        "logging_steps": 1, "save_strategy": "no", "val_set_size": 0,
        "bf16": torch.cuda.is_available(),  # axolotl refuses it on a CPU
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(cfg | changes))  # JSON is YAML
    loaded = load_cfg(str(path))
    return setup_model_and_trainer(loaded, load_datasets(cfg=loaded))[0]


@pytest.mark.parametrize("adapter", [{}, LORA])
def test_config_trains_with_the_plug_in(base, tmp_path, adapter):
    settings = {"policy": "bf16, params=bf16, master=split", "max_skipped_steps": 3}
    trainer = trainer_of(base, tmp_path, settings, **adapter)
    before = {n: w.float().clone() for n, w in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, w in trainer.model.named_parameters() if not torch.equal(w, before[n])}
    assert moved == {n for n, w in trainer.model.named_parameters() if w.requires_grad}
    assert trainer.precision_run.plan.policy.params == "bf16"
    assert trainer.precision_run.steps_applied == 6
    assert "skipped_steps" in trainer.state.log_history[0]


def test_unknown_setting_raises(base, tmp_path):
    with pytest.raises(ConfigError, match="healthevery is not a setting"):
        trainer_of(base, tmp_path, {"policy": "bf16", "healthevery": 3})
