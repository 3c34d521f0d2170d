"""Tasks for a GPU: a character model as nanoGPT has it, and GPT-2 small on a million tokens.

Both train in bf16 with fp32 weights. Tokens are on the device, and the places of windows are drawn
for many steps at once, so that no step waits for the host's. Every one has a tiny twin for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_studies.data import Pair, characters, held_out
from hybrid_studies.models import GPT
from hybrid_studies.tasks import Task, token_loss

Device = Literal["cpu", "cuda"]
TOKENS = "gpt2_tokens.npz"
TEXTS = ("tinyshakespeare.txt", "tinystories_head.txt", "wikitext2_valid.txt", "wikitext2_test.txt")
KEPT = 0.9
"""The share of each text that is trained on; its end is held out."""
DRAWN = 512
"""Steps whose windows are drawn at once."""
VOCABULARY = 50304
"""GPT-2's 50,257 in full 64s, which products of a GPU like better."""


def tokenised(data: Path) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on and those held out, from a file of them or from the texts."""
    if (data / TOKENS).exists():
        with np.load(data / TOKENS) as file:
            return tuple(
                torch.from_numpy(file[part].astype(np.int64)) for part in ("train", "held")
            )
    from narrowcast.workloads.lm.bpe import BpeTokenizer

    tokenizer = BpeTokenizer.loaded(data / "tok_gpt2")
    train, held = [], []
    for name in TEXTS:
        text = (data / "text" / name).read_text(encoding="utf-8")
        ids = torch.from_numpy(np.asarray(tokenizer.encode(text)).astype(np.int64))
        cut = int(KEPT * len(ids))
        train.append(ids[:cut])
        held.append(ids[cut:])
    return torch.cat(train), torch.cat(held)


def write_data(data: Path, out: Path) -> None:
    """Write all that the tasks here need into a folder of a few megabytes."""
    (out / "text").mkdir(parents=True, exist_ok=True)
    train, held = (part.numpy().astype(np.uint16) for part in tokenised(data))
    np.savez_compressed(out / TOKENS, train=train, held=held)
    name = "tinyshakespeare.txt"
    (out / "text" / name).write_bytes((data / "text" / name).read_bytes())
    print(f"{len(train):,} tokens to train on, {len(held):,} held out")


def nano_gpt(data: Path, *, quick: bool, device: Device, **more: Any) -> Task:
    """Train nanoGPT's train_shakespeare_char, with fewer steps."""
    ids, vocab = characters(data)
    cut = int(KEPT * len(ids))
    length = 32 if quick else 256
    shape = {"layers": 2, "heads": 2, "width": 32} if quick else {
        "layers": 6, "heads": 6, "width": 384,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "name": "nano-gpt", "steps": 40 if quick else 1200, "batch": 8 if quick else 64,
        "lr": 3e-2 if quick else 2e-3,
        "parts": (8, 16) if quick else (128, 300), "chunk": 16 if quick else 150,
    }  # fmt: skip
    return tokens_task(
        ids[:cut], ids[cut:], length=length, device=device,
        make=lambda: GPT(vocab, length=length, dropout=0.2, bias=False, tied=True, **shape),
        **fields | more,
    )  # fmt: skip


def nano_gpt_published(data: Path, *, quick: bool, **more: Any) -> Task:
    """Train it for as long as its README does, and look every 250 steps, as that does."""
    stops = tuple(each / 20 for each in range(1, 20))
    return nano_gpt(data, quick=quick, name="nano-gpt-5000", steps=60 if quick else 5000, lr=1e-3,
                    stops=(0.25, 0.5, 0.75) if quick else stops, **more)  # fmt: skip


def gpt_124m(data: Path, *, quick: bool, **more: Any) -> Task:
    """Train GPT-2 small on English: plays, stories and encyclopaedic text."""
    train, held = tokenised(data)
    length = 32 if quick else 512
    shape = {"layers": 2, "heads": 2, "width": 32} if quick else {
        "layers": 12, "heads": 12, "width": 768,
    }  # fmt: skip
    return tokens_task(
        train, held, length=length, name="gpt-124m", steps=20 if quick else 400,
        batch=2 if quick else 8, lr=3e-2 if quick else 6e-4,
        parts=(4, 8) if quick else (32, 160), chunk=16,
        make=lambda: GPT(VOCABULARY, length=length, tied=True, **shape), **more,
    )  # fmt: skip


def tokens_task(
    train_ids: Tensor, held_ids: Tensor, *, length: int, parts: tuple[int, int], device: Device,
    batch: int, make: Callable[[], nn.Module], **more: Any,
) -> Task:  # fmt: skip
    """Return next-token training on random windows; held out are windows side by side."""
    train_ids, held_ids = train_ids.to(device), held_ids.to(device)
    within = torch.arange(length + 1, device=device)

    def windows(ids: Tensor, at: Tensor) -> Pair:
        found = ids[at[:, None] + within]
        return found[:, :-1], found[:, 1:]

    def train(generator: torch.Generator) -> Iterator[Pair]:
        last = len(train_ids) - length - 1
        while True:
            for at in torch.randint(last, (DRAWN, batch), generator=generator).to(device):
                yield windows(train_ids, at)

    held = (held_out((len(held_ids) - 1) // length, parts=parts) * length).to(device)
    assert len(held) == sum(parts)
    return Task(
        batch=batch, make=make, loss=token_loss, train=train, weight_decay=0.1, clip=1.0,
        selection=windows(held_ids, held[: parts[0]]), report=windows(held_ids, held[parts[0] :]),
        budgets=(0.7, 0.85, 1.0, 1.2, 1.4), refined=False, banked=False,
        device=device, compute="bf16", **more,
    )  # fmt: skip


GPU_TASKS: dict[str, Callable[..., Task]] = {
    "nano-gpt": nano_gpt,
    "gpt-124m": gpt_124m,
    "nano-gpt-5000": nano_gpt_published,
}
