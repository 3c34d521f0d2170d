"""Byte-level BPE, trained here or read from files; the package `tokenizers` does the work."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from narrowcast.config.problems import shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import read_plain
from narrowcast.workloads.lm.text import Tokens

PIECE_CHARACTERS = 1_000_000
"""Handed to the BPE engine at once: it keeps some hundred bytes a token until it is done."""
LARGEST_FILE = 2**28
"""Bytes of a vocabulary or of its merges, a hundred times GPT-2's."""


class BpeTokenizer:
    """Byte-level BPE as in GPT-2: frequent sequences of bytes are tokens, and any byte is one."""

    def __init__(self, model: models.BPE) -> None:
        self._engine = tokenizers.Tokenizer(model)
        self._engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._engine.decoder = decoders.ByteLevel()

    @classmethod
    def trained(cls, text: str, *, size: int) -> "BpeTokenizer":
        """Train at most `size` tokens on `text`; the same text gives the same tokens."""
        tokenizer = cls(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer._engine.train_from_iterator(_pieces(text), trainer)
        return tokenizer

    @classmethod
    def loaded(cls, folder: Path) -> "BpeTokenizer":
        """Read vocab.json and merges.txt, as GPT-2's are published."""
        vocab = read_vocabulary(folder)
        path = folder / "merges.txt"
        lines = [line for line in _read(path).split("\n") if line]
        merges = [tuple(line.split(" ")) for line in lines if not line.startswith("#version")]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
                raise ConfigError(
                    f"{path} merges {' '.join(merge)!r}, which is not in {folder / 'vocab.json'}. "
                    "Use both files of the same tokenizer, or write data.tokenizer=bpe."
                )
        return cls(models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges]))

    @property
    def size(self) -> int:
        return self._engine.get_vocab_size()

    def encode(self, text: str) -> Tokens:
        dtype = np.uint16 if self.size <= 2**16 else np.int32
        parts = [np.array(self._engine.encode(piece).ids, dtype=dtype) for piece in _pieces(text)]
        joined: Tokens = np.concatenate([np.empty(0, dtype=dtype), *parts])
        return joined

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.decode(list(tokens), skip_special_tokens=False)

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        lengths = np.zeros(self.size, dtype=np.int64)
        for token, index in self._engine.get_vocab().items():
            # The byte-level alphabet writes every byte as one character.
            lengths[index] = len(token)
        return lengths


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Read `folder`/vocab.json; raise if it cannot spell every byte."""
    path = folder / "vocab.json"
    text = _read(path)
    try:
        vocab: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). Use the tokenizer's own vocab.json, or write "
            "data.tokenizer=bpe to train one."
        ) from error
    ids = vocab.values() if isinstance(vocab, dict) else []
    if not ids or not all(type(index) is int for index in ids) or {*ids} != {*range(len(ids))}:
        raise ConfigError(
            f"{path} must map each token to its number, counted from 0. Use the tokenizer's own "
            "vocab.json, or write data.tokenizer=bpe to train one."
        )
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
    if missing:
        raise ConfigError(
            f"{path} must have all 256 bytes; {len(missing)} are missing, the first is "
            f"{missing[0]!r}. Use a byte-level vocabulary such as GPT-2's, or write "
            "data.tokenizer=bpe."
        )
    return dict(vocab)


def _read(path: Path) -> str:
    try:
        return read_plain(path, most=LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{shown_path(path)} cannot be read ({why}). data.tokenizer must be bytes, bpe, or a "
            "folder with vocab.json and merges.txt."
        ) from error


def _pieces(text: str) -> Iterator[str]:
    """Cut `text` at line ends between two visible characters, where GPT-2's pattern cuts anyway."""
    start = 0
    while start < len(text):
        cut = re.compile(r"(?<=\S\n)(?=\S)").search(text, start + PIECE_CHARACTERS)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end
