"""FSDP2 on several ranks: a byte-level Llama in bf16 with split master weights, and a checkpoint.

Run: torchrun --nproc-per-node 2 examples/fsdp.py [policy]
"""

import os
import pydoc_data.topics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import narrowcast as nc

policy = sys.argv[1] if len(sys.argv) > 1 else "bf16, params=bf16, master=split"
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank, ranks = dist.get_rank(), dist.get_world_size()

text = " ".join(pydoc_data.topics.topics.values()).encode()  # text that comes with Python
rows = torch.tensor(list(text[: 4096 * 64])).view(-1, 64)
order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))  # same everywhere

torch.manual_seed(0)  # every rank builds the same model
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=4, **shape)
model = transformers.LlamaForCausalLM(config).to(device)

nc.fully_shard(model, policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)

for step, batch in enumerate(order[: 20 * 16].split(16)):
    mine = rows[batch][rank::ranks].to(device)  # this rank's share of the global batch
    with run.autocast():
        loss = model(input_ids=mine, labels=mine).loss
    outcome = run.step(loss)
    if step % 5 == 4:
        dist.all_reduce(mean := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.3f}, norm {outcome.grad_norm:.2f}")

nc.save_checkpoint(run, Path("checkpoints") / "step-20", extra={"step": 20})
if rank == 0:
    print(f"{run.steps_applied} steps applied on {ranks} ranks, checkpoint saved")
dist.destroy_process_group()
