"""LoRA adapters (peft) on a frozen fp8 base, in your own loop with a Hugging Face model.

Run: python examples/adapters.py [MODEL FOLDER]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowcast as nc

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:  # a small one that needs no download
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, vocab_size=256))
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))

snr_db = nc.quantize_frozen(model)  # one byte per weight, one scale per row
print(f"{len(snr_db)} layers in e4m3, lowest SNR {min(snr_db.values()):.1f} dB")

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
run = nc.prepare(model, optimizer, policy="bf16", clip_norm=1.0)
text = torch.arange(64).repeat(4, 1)  # a sequence the model can learn
for step in range(40):
    with run.autocast():
        loss = model(input_ids=text, labels=text).loss
    run.backward(loss)
    run.step()
    if step % 10 == 0 or step == 39:
        print(f"step {step}: loss {loss.item():.3f}")

run.release()
nc.dequantize_frozen(model)  # back to plain layers, rounded to e4m3
model.merge_and_unload()
