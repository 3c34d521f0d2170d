"""Generate sequences with a pretrained run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.errors import DivergedError, UnsupportedError
from narrowcast.workloads.genomics.inference.finished import Finished, is_out_of_memory
from narrowcast.workloads.genomics.models.model import generate
from narrowcast.workloads.genomics.results import ids_of_letters
from narrowcast.workloads.genomics.sequences.operations import gc

AT_ONCE = 16
"""Tokens between two progress updates."""
ROWS = 32
"""Sequences generated together."""
LINE = 60
"""Letters per FASTA line."""


@final
@dataclass(frozen=True, kw_only=True)
class Wish:
    """Options of generation."""

    prompt: str = ""
    """Letters that every sequence begins with; empty: one random letter."""
    length: int = 500
    """Letters to generate after the prompt."""
    count: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def sequences(run: Finished, wish: Wish, progress: Callable[[int], None]) -> Iterator[str]:
    """Yield generated sequences; `progress` is called with the letters so far."""
    generator = torch.Generator(run.device).manual_seed(wish.seed)
    prompt = run.alphabet.clean(wish.prompt, location="--prompt")
    done = 0
    for first in range(0, wish.count, ROWS):
        rows = min(ROWS, wish.count - first)
        tokens = _begun(run, prompt, rows, generator)
        inputs = len(prompt)
        while True:
            texts = [run.tokenizer.decode(row) for row in tokens.cpu().numpy()]
            shortest = min(len(text) for text in texts) - inputs
            progress(done + rows * shortest)
            if shortest >= wish.length:
                break
            tokens = _more(run, tokens, wish, min(AT_ONCE, wish.length - shortest), generator)
        done += rows * wish.length
        yield from (text[: inputs + wish.length] for text in texts)


def fasta(sequence: str, number: int, wish: Wish, *, bases: bool) -> str:
    """Return a FASTA record with the seed and temperature in its header."""
    said = f">sample_{number} seed={wish.seed} temperature={wish.temperature:g}"
    if bases:
        said += f" gc={gc(sequence):.4f}"
    lines = (sequence[at : at + LINE] for at in range(0, len(sequence), LINE))
    return "\n".join([said, *lines]) + "\n"


def _begun(run: Finished, prompt: str, rows: int, generator: torch.Generator) -> Tensor:
    if prompt:
        ids = torch.from_numpy(run.tokenizer.encode(prompt)).to(run.device)
        return ids.expand(rows, -1)
    # A vocabulary ends with its single letters.
    letters = torch.tensor(ids_of_letters(run.tokenizer)[-len(run.alphabet.letters) :])
    drawn = torch.randint(len(letters), (rows, 1), generator=generator, device=run.device)
    return letters.to(run.device)[drawn]


def _more(
    run: Finished, tokens: Tensor, wish: Wish, count: int, generator: torch.Generator
) -> Tensor:
    context = max(1, run.info.max_length - AT_ONCE)
    try:
        with run.autocast():
            more = generate(
                run.network.backbone,
                _Finite(run.network.head),
                tokens[:, -context:],
                count=count,
                temperature=wish.temperature,
                top_k=wish.top_k,
                top_p=wish.top_p,
                allowed=torch.tensor(ids_of_letters(run.tokenizer), device=run.device),
                generator=generator,
            )
            return torch.cat([tokens[:, :-context], more], dim=1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UnsupportedError(
            f"{tokens.shape[0]} sequences of {tokens.shape[1]:,} tokens do not fit into the memory "
            f"of {run.device}. Write a smaller --length or --count."
        ) from error


@final
class _Finite(nn.Module):
    """A head that raises if its logits are not finite."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        if not logits.isfinite().all():
            raise DivergedError("The network predicts NaN or inf. Use an earlier checkpoint.")
        return logits
