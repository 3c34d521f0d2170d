"""transformers' Trainer in bf16 with split master weights: a byte-level Llama on English text.

Run: python examples/trainer.py [policy]
"""

import pydoc_data.topics
import sys
import tempfile

import torch
import transformers

import narrowcast as nc

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
policy = sys.argv[1] if len(sys.argv) > 1 else "bf16, params=bf16, master=split"

text = " ".join(pydoc_data.topics.topics.values())  # 700 kB of text that comes with Python
tokens = torch.tensor(list(text.encode()[: 64 * 2048])).view(-1, 64)
rows = [{"input_ids": row, "labels": row} for row in tokens]

config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
args = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=40,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=4,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(0)
trainer = transformers.Trainer(
    model=transformers.LlamaForCausalLM(config), args=args, train_dataset=rows
)
nc.attach(trainer, policy=policy)
trainer.train()

for entry in trainer.state.log_history[:-1]:
    print(f"step {entry['step']}: loss {entry['loss']:.3f}, norm {entry['grad_norm']:.2f}")
trainer.save_model()  # fp32 weights, which from_pretrained loads
model = transformers.LlamaForCausalLM.from_pretrained(args.output_dir)
print(f"{trainer.precision_run.steps_applied} steps applied, saved as {model.dtype}")
