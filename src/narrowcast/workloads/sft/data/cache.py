"""Tokens kept in a file, so that the same data is not cut twice."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError
from narrowcast.hardware.trial import cache_folder
from narrowcast.plain_files import expand_path, open_plain, read_plain
from narrowcast.runs.writing import explain_write_error, written_atomically
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data.report import Tally
from narrowcast.workloads.sft.data.rows import Row
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import Source, Sources
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import TokenRows

VERSION = 2
"""Of the file and of all that makes tokens; another one where the same rows give other tokens."""
MATTERS = (
    "format", "columns", "empty_response", "response_max_length", "instruction_max_length",
    "max_seq_length", "too_long",
)  # fmt: skip
"""Settings that tokens depend on, beside the template's own."""
PIECE = 2**20


class CachedRows(NamedTuple):
    """What is kept: the rows of train and validation sources, and what is told of them."""

    train: TokenRows
    validation: TokenRows | None
    about: dict[str, Any]


def token_cache_folder(data: SftData) -> Path:
    """Return the folder tokens are kept in; one that is not there is made."""
    named = data.pretokenize_cache_dir
    folder = cache_folder() / "sft" if named is None else expand_path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"data.pretokenize_cache_dir={folder} cannot be created: {explain_write_error(error)}. "
            "Write another folder, or data.pretokenize=false."
        ) from error
    return folder


def cache_key(sources: Sources, template: Template, data: SftData) -> str:
    """Return a SHA-256 of all that the tokens depend on: contents, tokenizer, settings."""
    whole = hashlib.sha256()
    settings = data.model_dump(include=set(MATTERS))
    tokenizer = template.tokenizer
    for part in (
        f"narrowcast sft tokens {VERSION}",
        json.dumps(settings, sort_keys=True),
        template.identity,
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        *(_content(source) for source in sources.train),
        "validation",
        *(_content(source) for source in sources.validation),
    ):
        whole.update(f"{len(part)} ".encode())
        whole.update(part.encode())
    return whole.hexdigest()


def save(folder: Path, key: str, stored: CachedRows) -> None:
    """Write tokens to a file of their own, which is whole or absent."""
    from safetensors.numpy import save_file

    arrays = _arrays("train", stored.train)
    if stored.validation is not None:
        arrays |= _arrays("validation", stored.validation)
    arrays["about"] = _as_array({"key": key, "about": stored.about})
    arrays["digest"] = _as_array(_digest(arrays))
    hint = "name another data.pretokenize_cache_dir, or write data.pretokenize=false"
    with written_atomically(_path(folder, key), hint=hint) as extra:
        save_file(arrays, extra)


def load(folder: Path, key: str) -> tuple[CachedRows | None, str]:
    """Return the tokens that were kept under `key`, if any; or why those there are of no use."""
    path = _path(folder, key)
    try:
        return _checked(read_plain(path), key), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return (
            None,
            f"cached tokens in {path} cannot be read ({error.strerror}) and are computed again",
        )
    except _DamagedError as error:
        return None, f"cached tokens in {path} are damaged ({error}) and are computed again"


class _DamagedError(Exception):
    """A file is not as it was written."""


def _checked(content: bytes, key: str) -> CachedRows:
    from safetensors import SafetensorError
    from safetensors.numpy import load as parsed

    try:
        arrays = parsed(content)
        if json.loads(arrays.pop("digest").tobytes()) != _digest(arrays):
            raise _DamagedError("the checksum does not match")
        said = json.loads(arrays["about"].tobytes())
        if said["key"] != key or not Tally.is_sound(said["about"]):
            raise _DamagedError("the cache was made for other data")
        validation = _rows(arrays, "validation") if "validation.tokens" in arrays else None
        return CachedRows(_rows(arrays, "train"), validation, said["about"])
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise _DamagedError(type(error).__name__) from error


def _path(folder: Path, key: str) -> Path:
    return folder / f"tokens-{key[:32]}.safetensors"


def _arrays(name: str, rows: TokenRows) -> dict[str, NDArray[Any]]:
    fields = {"tokens": rows.tokens, "learnt": rows.learnt, "offsets": rows.offsets}
    return {f"{name}.{field}": array for field, array in fields.items()}


def _rows(arrays: dict[str, NDArray[Any]], name: str) -> TokenRows:
    tokens, learnt, offsets = (arrays[f"{name}.{each}"] for each in ("tokens", "learnt", "offsets"))
    kinds = [array.dtype for array in (tokens, learnt, offsets)]
    if kinds != [np.int32, np.bool_, np.int64] or not (
        tokens.shape == learnt.shape == (offsets[-1],) and offsets[0] == 0 < np.diff(offsets).min()
    ):
        raise _DamagedError("the content is not token rows")
    return TokenRows(tokens=tokens, learnt=learnt, offsets=offsets)


def _as_array(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    names = sorted(arrays)
    return f"{' '.join(names)} {fingerprint(*(arrays[name] for name in names))}"


def _content(source: Source) -> str:
    """Return a SHA-256 of what a source holds: the bytes of a file, the rows of the Hub."""
    content = hashlib.sha256(source.name.encode() if source.file is None else b"")
    pieces = _bytes(source.file) if source.file is not None else map(_row_bytes, source.rows())
    for piece in pieces:
        content.update(piece)
    # The same bytes are other rows in a file of another kind.
    ending = "" if source.file is None else "".join(source.file.suffixes[-2:]).lower()
    return f"{content.hexdigest()} {ending}"


def _bytes(path: Path) -> Iterable[bytes]:
    try:
        with open_plain(path, follow=True) as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


def _row_bytes(row: Row) -> bytes:
    return json.dumps(dict(row.values), sort_keys=True, default=str).encode()
