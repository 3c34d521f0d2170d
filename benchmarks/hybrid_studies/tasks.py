"""Tasks as values: a model, its batches, its two held-out parts and a budget of steps.

Of every task a *selection* part chooses (the learning rate, the read-out) and a *report* part is
reported; nothing is chosen on the latter. `CHOSEN_ON` are the tasks on which the constants of the
methods were chosen; of the others only the cosine baseline was looked at before they were fixed.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_studies.data import Pair, characters, epochs, held_out
from hybrid_studies.models import GPT, CharMLP, dna_cnn, image_cnn, image_mlp, table_mlp

STOPS = (0.5, 0.7, 0.8)
"""Shares of the plan at which a run of unknown budget may be stopped."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, for how long, and where it is judged."""

    name: str
    steps: int
    """N: the budget that everything is compared at."""
    batch: int
    lr: float
    """Where the grid of learning rates of the baseline begins."""
    make: Callable[[], nn.Module]
    """The model; its random numbers come from torch's seed."""
    loss: Callable[[Tensor, Tensor], Tensor]
    train: Callable[[torch.Generator], Iterator[Pair]]
    selection: Pair
    report: Pair
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = 0.0
    seeds: int = 3
    """How many are reported; more where a run is cheap."""
    tuning_seeds: int = 1
    """How many learning rates are tuned with."""
    budgets: tuple[float, ...] = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7)
    """Shares of N that tuned cosine is trained for."""
    refined: bool = True
    """Whether its rate is tuned by roots of two as well, and for the outermost budgets."""
    stops: tuple[float, ...] = STOPS
    """Shares of the plan at which a run is looked at before its end."""
    banked: bool = True
    """Whether averages are kept beside every method."""
    clip: float | None = None
    """The norm that gradients are clipped to."""
    device: Literal["cpu", "cuda"] = "cpu"
    compute: Literal["fp32", "bf16"] = "fp32"
    chunk: int = 1024
    """Held-out examples that are passed at once."""

    def computing(self) -> AbstractContextManager[Any]:
        """Hold this over the passes of a plain model."""
        bf16 = self.compute == "bf16"
        return torch.autocast(self.device, torch.bfloat16) if bf16 else nullcontext()

    def evaluate(self, model: nn.Module, part: Pair) -> float:
        """Return the mean loss of `model` on a held-out part."""
        inputs, targets = part
        model.eval()
        losses, sizes = [], []
        with torch.no_grad():
            for first in range(0, len(inputs), self.chunk):
                chunk = inputs[first : first + self.chunk], targets[first : first + self.chunk]
                losses.append(self.loss(model(chunk[0]), chunk[1]))
                sizes.append(len(chunk[0]))
        model.train()
        means = torch.stack(losses).tolist()  # the only wait for a device
        return sum(mean * size for mean, size in zip(means, sizes, strict=True)) / len(inputs)

    def selection_batches(self) -> Iterator[Pair]:
        """Yield the selection part in batches as large as those of training."""
        inputs, targets = self.selection
        yield from zip(inputs.split(self.batch), targets.split(self.batch), strict=True)

    def selection_steps(self) -> float:
        """Return what one look at the selection part costs: a forward is a third of a step."""
        return len(self.selection[0]) / self.batch / 3


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def squared_error(found: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(found.squeeze(-1), targets)


def char_mlp(data: Path) -> Task:
    ids, vocab = characters(data)
    cut, context = int(0.9 * len(ids)), 12

    def windows(at: Tensor) -> Pair:
        return ids[at[:, None] + torch.arange(context)], ids[at + context]

    def train(generator: torch.Generator) -> Iterator[Pair]:
        while True:
            yield windows(torch.randint(cut - context - 1, (128,), generator=generator))

    held = held_out(len(ids) - cut - context - 1, parts=(4096, 12288)) + cut
    return Task(
        name="char-mlp", steps=2000, batch=128, lr=8e-3,
        make=lambda: CharMLP(vocab, context=context, embedding=24, hidden=192),
        loss=F.cross_entropy, train=train,
        selection=windows(held[:4096]), report=windows(held[4096:]),
    )  # fmt: skip


def char_gpt(data: Path) -> Task:
    ids, vocab = characters(data)
    cut, length = int(0.9 * len(ids)), 32
    return language(
        ids[:cut], ids[cut:], name="char-gpt", steps=600, batch=8, lr=2e-3, length=length,
        make=lambda: GPT(vocab, length=length, width=96, layers=2, heads=4),
        parts=(96, 256),
    )  # fmt: skip


def digits_cnn(data: Path) -> Task:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return images(
        torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels),
        name="digits-cnn", steps=600, batch=32, lr=8e-3, held=720,
        make=lambda: image_cnn(8, channels=16), noise=0.3, seeds=6,
    )  # fmt: skip


def mnist_mlp(data: Path, *, optimizer: Literal["adamw", "sgd"] = "adamw") -> Task:
    with np.load(data / "mnist" / "mnist_train10000_test2000.npz") as file:
        pixels = np.concatenate([file["x_test"], file["x_train"]])
        labels = np.concatenate([file["y_test"], file["y_train"]])
    sgd = optimizer == "sgd"
    return images(
        torch.tensor(pixels, dtype=torch.float32)[:, None] / 255, torch.tensor(labels).long(),
        name="mnist-mlp-sgd" if sgd else "mnist-mlp", steps=800, batch=64,
        lr=0.05 if sgd else 1e-3, held=2000, make=lambda: image_mlp(28, hidden=96), noise=0.3,
        optimizer=optimizer, seeds=5,
    )  # fmt: skip


def mnist_mlp_sgd(data: Path) -> Task:
    return mnist_mlp(data, optimizer="sgd")


def promoters(data: Path) -> Task:
    # All core promoters, not only those with a TATA box: the development part of the latter has
    # 613 sequences, and its halves are too few to tell methods apart.
    parts = {}
    for part in ("train", "dev"):
        with gzip.open(data / "gue" / "prom_core_all" / f"{part}.csv.gz", "rt") as file:
            rows = list(csv.reader(file))[1:]
        bases = np.frombuffer("".join(row[0] for row in rows).encode(), np.uint8)
        onehot = bases.reshape(len(rows), -1)[:, None] == np.array([*b"ACGT"])[None, :, None]
        parts[part] = (
            torch.tensor(onehot, dtype=torch.float32),
            torch.tensor([int(row[1]) for row in rows]),
        )
    inputs, labels = parts["dev"]
    order = held_out(len(labels), parts=(len(labels),))
    half = len(order) // 2
    return Task(
        name="promoters", steps=600, batch=64, lr=2e-3, make=lambda: dna_cnn(channels=24),
        loss=F.cross_entropy, train=lambda generator: epochs(*parts["train"], 64, generator),
        selection=(inputs[order[:half]], labels[order[:half]]),
        report=(inputs[order[half:]], labels[order[half:]]), seeds=4,
    )  # fmt: skip


def wikitext(data: Path) -> Task:
    """Continue a byte-level model of children's stories on encyclopaedic text."""
    old, train, held = (
        torch.from_numpy(np.fromfile(data / "text" / name, np.uint8)).long()
        for name in ("tinystories_head.txt", "wikitext2_valid.txt", "wikitext2_test.txt")
    )
    make = lambda: GPT(256, length=32, width=64, layers=2, heads=4)  # noqa: E731
    first = language(
        old, held, name="stories", steps=600, batch=8, lr=3e-3, length=32, make=make,
        parts=(8, 8),
    )  # fmt: skip
    start: dict[str, Tensor] = {}

    def continued() -> nn.Module:
        if not start:
            start.update(learnt(first))
        model = make()
        model.load_state_dict(start)
        return model

    return language(
        train, held, name="wikitext-continued", steps=500, batch=8, lr=1e-3, length=32,
        make=continued, parts=(96, 256),
    )  # fmt: skip


def protein(data: Path) -> Task:
    """Regress the fitness of GB1 variants on the residues at the four sites that vary."""
    with zipfile.ZipFile(data / "flip_gb1" / "splits.zip") as archive:
        text = archive.read("splits/sampled.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    letters = np.array([[*row["sequence"].encode()] for row in rows], np.uint8)
    sites = letters[:, (letters != letters[0]).any(0)]
    onehot = (sites[:, :, None] == np.unique(sites)[None, None, :]).reshape(len(rows), -1)
    inputs = torch.tensor(onehot, dtype=torch.float32)
    targets = torch.tensor([float(row["target"]) for row in rows])
    targets = (targets - targets.mean()) / targets.std()
    order = held_out(len(rows), parts=(len(rows),))
    selection, report, train = order[:1000], order[1000:2500], order[2500:]
    return Task(
        name="protein-mlp", steps=500, batch=64, lr=2e-3,
        make=lambda: table_mlp(inputs.shape[1], hidden=64), loss=squared_error,
        train=lambda generator: epochs(inputs[train], targets[train], 64, generator),
        selection=(inputs[selection], targets[selection]), report=(inputs[report], targets[report]),
        seeds=8, tuning_seeds=2,
    )  # fmt: skip


CHOSEN_ON: dict[str, Callable[[Path], Task]] = {
    "char-mlp": char_mlp,
    "char-gpt": char_gpt,
    "digits-cnn": digits_cnn,
}
HELD_BACK: dict[str, Callable[[Path], Task]] = {
    "mnist-mlp": mnist_mlp,
    "mnist-mlp-sgd": mnist_mlp_sgd,
    "promoters": promoters,
    "wikitext-continued": wikitext,
    "protein-mlp": protein,
}
TASKS = CHOSEN_ON | HELD_BACK


def language(
    train_ids: Tensor, held_ids: Tensor, *, length: int, parts: tuple[int, int], name: str,
    steps: int, batch: int, lr: float, make: Callable[[], nn.Module],
) -> Task:  # fmt: skip
    """Return next-token training on random windows; AdamW as GPTs are trained with."""

    def windows(ids: Tensor, at: Tensor) -> Pair:
        found = ids[at[:, None] + torch.arange(length + 1)]
        return found[:, :-1], found[:, 1:]

    def train(generator: torch.Generator) -> Iterator[Pair]:
        while True:
            at = torch.randint(len(train_ids) - length - 1, (batch,), generator=generator)
            yield windows(train_ids, at)

    held = held_out((len(held_ids) - 1) // length, parts=parts) * length
    return Task(
        name=name, steps=steps, batch=batch, lr=lr, make=make, loss=token_loss, train=train,
        selection=windows(held_ids, held[: parts[0]]), report=windows(held_ids, held[parts[0] :]),
        weight_decay=0.1,
    )  # fmt: skip


def images(
    pixels: Tensor, labels: Tensor, *, held: int, noise: float, name: str, steps: int, batch: int,
    lr: float, make: Callable[[], nn.Module], seeds: int,
    optimizer: Literal["adamw", "sgd"] = "adamw",
) -> Task:  # fmt: skip
    """Return classification; fresh noise on training pixels keeps a long budget worth having."""
    if name.startswith("mnist"):
        held_at, train_at = torch.arange(held), torch.arange(held, len(labels))
    else:
        order = held_out(len(labels), parts=(len(labels),))
        held_at, train_at = order[:held], order[held:]

    def train(generator: torch.Generator) -> Iterator[Pair]:
        for inputs, targets in epochs(pixels[train_at], labels[train_at], batch, generator):
            yield inputs + noise * torch.randn(inputs.shape, generator=generator), targets

    half = held // 2
    return Task(
        name=name, steps=steps, batch=batch, lr=lr, make=make, loss=F.cross_entropy, train=train,
        selection=(pixels[held_at[:half]], labels[held_at[:half]]),
        report=(pixels[held_at[half:]], labels[held_at[half:]]), optimizer=optimizer,
        seeds=seeds, tuning_seeds=2,
    )  # fmt: skip


def learnt(task: Task) -> dict[str, Tensor]:
    """Return the state that a plain run of a task ends with; always the same."""
    torch.manual_seed(77)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    batches = task.train(torch.Generator().manual_seed(77))
    for _, (inputs, targets) in zip(range(task.steps), batches, strict=False):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()
