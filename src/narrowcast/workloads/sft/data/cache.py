"""Cache of tokenised data."""

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
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import Row, Source, Sources
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import TokenRows

VERSION = 3
"""Of the file and the tokenisation; increase it if the same rows give other tokens."""
MATTERS = (
    "format", "columns", "empty_response", "response_max_length", "instruction_max_length",
    "max_seq_length", "too_long",
)  # fmt: skip
"""Settings that affect tokens, besides those of the template."""
PIECE = 2**20


class CachedRows(NamedTuple):
    """Content of a cache file: training and validation rows, and the tally."""

    train: TokenRows
    validation: TokenRows | None
    about: dict[str, Any]


def token_cache_folder(data: SftData) -> Path:
    """Return the cache folder, creating it if necessary."""
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
    """Return a SHA-256 of everything the tokens depend on."""
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
    """Write tokens atomically."""
    from safetensors.numpy import save_file

    parts = {"train": stored.train, "validation": stored.validation}
    arrays = {
        f"{name}.{field}": array
        for name, rows in parts.items()
        if rows is not None
        for field, array in rows.arrays().items()
    }
    arrays["about"] = _as_array(stored.about)
    arrays["digest"] = _as_array(_digest(arrays))
    hint = "name another data.pretokenize_cache_dir, or write data.pretokenize=false"
    with written_atomically(_path(folder, key), hint=hint) as extra:
        save_file(arrays, extra)


def load(folder: Path, key: str) -> tuple[CachedRows | None, str]:
    """Return the cached tokens, if any, and a note if they cannot be used."""
    path = _path(folder, key)
    try:
        return _checked(read_plain(path)), ""
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
    """The file is damaged."""


def _checked(content: bytes) -> CachedRows:
    from safetensors import SafetensorError
    from safetensors.numpy import load as parsed

    try:
        arrays = parsed(content)
        if json.loads(arrays.pop("digest").tobytes()) != _digest(arrays):
            raise _DamagedError("the checksum does not match")
        parts = [
            TokenRows(
                **{each: arrays[f"{name}.{each}"] for each in ("tokens", "learnt", "offsets")}
            )
            for name in ("train", "validation")
            if f"{name}.tokens" in arrays
        ]
        about = json.loads(arrays["about"].tobytes())
        return CachedRows(parts[0], parts[1] if len(parts) > 1 else None, about)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _DamagedError(type(error).__name__) from error


def _path(folder: Path, key: str) -> Path:
    return folder / f"tokens-{key[:32]}.safetensors"


def _as_array(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    names = sorted(arrays)
    return f"{' '.join(names)} {fingerprint(*(arrays[name] for name in names))}"


def _content(source: Source) -> str:
    """Return a SHA-256 of the content of a source."""
    content = hashlib.sha256(source.name.encode() if source.file is None else b"")
    pieces = _bytes(source.file) if source.file is not None else map(_row_bytes, source.rows())
    for piece in pieces:
        content.update(piece)
    # The same bytes are other rows in another file type.
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
