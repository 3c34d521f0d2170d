"""What a network that writes has written when its run was over, beside the sequences held out."""

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import torch

from narrowcast.workloads.genomics.data.examples import Examples
from narrowcast.workloads.genomics.models.generate import generate
from narrowcast.workloads.genomics.network import Network
from narrowcast.workloads.genomics.sequences.operations import gc, kmer_counts
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer

ROWS, PROMPT, LENGTH = 8, 16, 192
"""Samples, tokens of a held-out sequence that each goes on from, and tokens that are written."""
SHOWN = 4
"""Samples whose letters are kept; all count in the spectrum."""
MOST_KMERS = 64
"""Of a spectrum: three bases, one residue."""
MOST_HELD_OUT = 2**22
"""Letters of the held-out sequences that are counted."""


def written_samples(
    network: Network, held_out: Examples, tokenizer: Tokenizer, *, seed: int
) -> dict[str, Any] | None:
    """Let a network go on from the beginnings of held-out sequences, and count its k-mers.

    None where no sequence is long enough to begin with.
    """
    lengths = np.diff(held_out.tokens.ends, prepend=0)
    rows = np.flatnonzero(lengths > PROMPT)[:ROWS]
    if not len(rows):
        return None
    device = next(network.parameters()).device
    prompts = np.stack([held_out.tokens[int(row)][:PROMPT].astype(np.int64) for row in rows])
    tokens = generate(
        network.backbone,
        network.head,
        torch.from_numpy(prompts).to(device),
        count=LENGTH,
        allowed=torch.tensor(ids_of_letters(tokenizer), device=device),
        generator=torch.Generator(device).manual_seed(seed),
    )
    texts = [tokenizer.decode(row) for row in tokens.cpu().numpy()]
    begun = [tokenizer.decode(row) for row in prompts]
    own = [text[len(prompt) :] for text, prompt in zip(texts, begun, strict=True)]
    real = list(_texts(held_out, tokenizer))
    return {
        "samples": [
            {"name": _name(held_out, row), "prompt": prompt, "written": text}
            for row, prompt, text in zip(rows[:SHOWN].tolist(), begun, own, strict=False)
        ],
        **_spectra(own, real, tokenizer),
        **(_gc(own, real) if tokenizer.alphabet.complement is not None else {}),
    }


def ids_of_letters(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that may be written: those of letters, no special one."""
    return [at for at, token in enumerate(tokenizer.tokens) if not token.startswith("[")]


def _name(examples: Examples, row: int) -> str:
    return examples.names[row] if examples.names else ""


def _texts(examples: Examples, tokenizer: Tokenizer) -> Iterable[str]:
    """Yield sequences until there are letters enough."""
    letters = 0
    for row in range(len(examples)):
        text = tokenizer.decode(examples.tokens[row].astype(np.int64))
        yield text
        letters += len(text)
        if letters > MOST_HELD_OUT:
            return


def _gc(own: list[str], real: list[str]) -> dict[str, Any]:
    return {"gc": {"written": gc("".join(own)), "held_out": gc("".join(real))}}


def _spectra(own: list[str], real: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the share of each k-mer in what was written and in what was held out."""
    alphabet = tokenizer.alphabet
    k = next(k for k in (3, 2, 1) if k == 1 or len(alphabet.letters) ** k <= MOST_KMERS)
    names = ["".join(letters) for letters in product(sorted(alphabet.letters), repeat=k)]
    shares = {}
    for key, texts in (("written", own), ("held_out", real)):
        counts = Counter[str]()
        for text in texts:
            counts.update(kmer_counts(text, k, alphabet))
        total = max(1, counts.total())
        shares[key] = [round(counts[name] / total, 6) for name in names]
    return {"spectrum": {"k": k, "kmers": names, **shares}}
