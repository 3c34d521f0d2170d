"""Documents drawn from files: windows of text, or conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.config.files import missing_files
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_plain
from narrowcast.workloads.sft.data.packing import IGNORED
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import SftData, may_be_on_the_hub
from narrowcast.workloads.sft.ica.study.ablate import Document

TEXT = (".txt", ".md")
"""Suffixes of plain text."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Drawn documents and notes."""

    paths: tuple[str, ...]
    documents: tuple[Document, ...]
    available: int
    """Number of documents to draw from."""
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(each["input_ids"].numel() for each in self.documents)

    @property
    def named(self) -> str:
        count = f"{self.tokens:,} tokens of {len(self.documents)} documents"
        return f"{', '.join(self.paths)} ({count})"


def draw_documents(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    samples: int,
    max_length: int,
    tokens: int | None = None,
    seed: int = 0,
) -> Documents:
    """Draw documents of up to `max_length` tokens, and up to `tokens` in total."""
    plain = [expand_path(path).suffix.lower() in TEXT for path in paths]
    if not paths or (any(plain) and not all(plain)):
        raise ConfigError(
            "Give either texts (.txt) or rows (.json, .jsonl, .csv, .parquet), not both."
        )
    notes: tuple[str, ...] = ()
    if all(plain):
        rows = [row for path in paths for row in _windows(expand_path(path), tokenizer, max_length)]
    else:
        rows, notes = _conversations(tuple(paths), tokenizer, max_length, seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = sorted(torch.randperm(len(rows), generator=generator)[:samples].tolist())
    chosen = _within([rows[number] for number in drawn], tokens)
    return Documents(paths=tuple(paths), documents=tuple(chosen), available=len(rows), notes=notes)


def check_documents(paths: Sequence[str]) -> None:
    """Raise if a local file is missing, before a model is loaded or downloaded."""
    local = [p for p in paths if expand_path(p).suffix.lower() in TEXT or not may_be_on_the_hub(p)]
    if missing := missing_files(local):
        raise ConfigError(f"{missing[0]} does not exist. Write an existing path.")


def document(ids: Sequence[int], learnt: Sequence[bool] | None = None) -> Document:
    """Return tokens as a document; all but the first are predicted, or those marked `learnt`."""
    tokens = torch.tensor(ids)[None]
    if learnt is None:
        return {"input_ids": tokens, "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.where(torch.tensor(learnt)[None], IGNORED)}


def model_inputs(documents: Sequence[Document]) -> list[dict[str, Tensor]]:
    """Return documents without labels."""
    return [{k: v for k, v in each.items() if k != "labels"} for each in documents]


def check_tokens(documents: Sequence[Document], model: Any) -> None:
    """Raise if the model has no embedding for a token."""
    table = model.get_input_embeddings().weight.shape[0]
    highest = max(int(each["input_ids"].max()) for each in documents)
    if highest >= table:
        raise ConfigError(
            f"The tokenizer returns token {highest}, but the model has {table} embeddings. Use the "
            "tokenizer of this model."
        )


def _windows(path: Path, tokenizer: Any, length: int) -> list[Document]:
    try:
        text = read_plain(path).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}.") from None
    ids = tokenizer(text, verbose=False)["input_ids"]
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    matches = [document(each) for each in windows if len(each) > 1]
    if not matches:
        raise ConfigError(
            f"{path} must have at least two tokens, got {len(ids)}. Give a longer text."
        )
    return matches


def _conversations(
    paths: tuple[str, ...], tokenizer: Any, length: int, seed: int
) -> tuple[list[Document], tuple[str, ...]]:
    settings = SftData(
        path=paths,
        max_seq_length=length,
        too_long="cut",
        validation_split=0.0,
        use_existing_splits=False,
    )
    data = prepare_data(settings, tokenizer, seed=seed)
    rows = [data.train.rows.row(number) for number in range(len(data.train.rows))]
    matched = [document(tokens.tolist(), learnt.tolist()) for tokens, learnt in rows]
    return matched, tuple(data.report.lines())


def _within(rows: Sequence[Document], tokens: int | None) -> Sequence[Document]:
    """Return documents up to a number of tokens; the last is cut."""
    if tokens is None:
        return rows
    result, left = [], tokens
    for row in rows:
        cut = {name: each[:, :left] for name, each in row.items()}
        if left > 1 and bool((cut["labels"][:, 1:] != IGNORED).any()):
            result.append(cut)
        left -= row["input_ids"].numel()
    return result
