"""TRL's SFTTrainer with packing and LoRA adapters, in a policy's precision.

Run: python examples/trl_sft.py [policy]
"""

import sys
import tempfile
import warnings
from pydoc_data.topics import topics

import peft
import tokenizers
import torch
import transformers
import trl
from datasets import Dataset

import narrowcast as nc

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore", category=UserWarning)
policy = sys.argv[1] if len(sys.argv) > 1 else "bf16, params=bf16, master=split"

# Topics of Python's help, a small tokenizer trained on them, and a model that needs no download.
rows = [{"prompt": f"{name}:", "completion": text[:300]} for name, text in topics.items()]
bytes_to_tokens = tokenizers.ByteLevelBPETokenizer()
bytes_to_tokens.train_from_iterator(topics.values(), vocab_size=512, show_progress=False)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bytes_to_tokens._tokenizer, eos_token="<eos>", pad_token="<pad>"
)
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **shape)

trainer = trl.SFTTrainer(
    model=transformers.LlamaForCausalLM(config),
    args=trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=128,
        packing=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=peft.LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]),
)
nc.attach(trainer, policy=policy)
trainer.train()
trainer.save_model()  # the adapters, for peft
for entry in trainer.state.log_history[:-1]:
    print(f"step {entry['step']}: loss {entry['loss']:.3f}, skipped {entry['skipped_steps']:.0f}")
