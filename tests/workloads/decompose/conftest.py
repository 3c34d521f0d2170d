"""A small GPT-2 that knows a rhyme, and a short decomposition of it."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import narrowcast as nc
from narrowcast.workloads.sft.models.loading import tiny_tokenizer

RHYME = "the cat sat on the mat. " * 200


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """The folder of a GPT-2 of two layers that knows the rhyme."""
    torch.manual_seed(0)
    silent = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 64}
    model, tokenizer = GPT2LMHeadModel(GPT2Config(**shape, **silent)), tiny_tokenizer()
    tokens = torch.tensor(tokenizer(RHYME, add_special_tokens=False)["input_ids"])[: 16 * 32]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(tokens.view(16, 32), labels=tokens.view(16, 32)).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def decomposed_gpt2(gpt2_folder, tmp_path_factory):
    """The folder of a decomposition of two of its matrices, in a few steps."""
    folder = tmp_path_factory.mktemp("decomposed")
    (folder / "rhyme.txt").write_text(RHYME)
    words = [f"model.path={gpt2_folder}", f"data.text=[{folder}/rhyme.txt]", "data.length=32",
             "sites.names=[transformer.h.0.mlp.c_fc, transformer.h.1.attn.c_proj]",
             "sites.components=16", "importance.hidden=[16]", "batch_size=4", "steps=20",
             "optimizer.lr=3e-3", "eval_tasks.batches=1", "eval_tasks.pgd_steps=0",
             "decomposition.warmup_steps=50", "precision.policy=fp32", "device=cpu",
             "health.every=0", "losses.minimality.coefficient=1e-3",
             "losses.minimality.p_final=null"]  # fmt: skip
    list(nc.train("decompose/lm", words, out=folder / "run"))
    return folder / "run"
