"""Ways to spoil a file: by a bit, by a value, or altogether."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Spoil = Callable[[Path, Random, Path], None]
"""Spoils a file, given the file of the same name in another run."""
DEPTH = 100_000
"""Of brackets within brackets: more than a parser that calls itself can follow."""
SHAPES = ("[]", "{}", "null", "1", '"text"', "[1, 2]", '{"sessions": 5}', '{"a": {"b": []}}')
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    "",
    "x" * 1000,
    "../../elsewhere",
    [],
    {},
    [[1]],
    {"a": 1},
)


def flip_a_bit(path: Path, rng: Random, other: Path) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: Random, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) or 1)])


def empty(path: Path, rng: Random, other: Path) -> None:
    path.write_bytes(b"")


def junk(path: Path, rng: Random, other: Path) -> None:
    path.write_bytes(rng.randbytes(rng.choice((1, 8, 300, 5000))))


def append_junk(path: Path, rng: Random, other: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.choice((b"\0", b"{", b"\n\n", b"\xff\xfe", b"[1]\n")))


def other_shape(path: Path, rng: Random, other: Path) -> None:
    path.write_text(rng.choice(SHAPES))


def deep(path: Path, rng: Random, other: Path) -> None:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    path.write_text(opening * DEPTH + "1" + closing * DEPTH)


def other_value(path: Path, rng: Random, other: Path) -> None:
    """Put another value somewhere into JSON, or take a key away, or give it another name."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    tree = json.loads(lines[number])
    places = list(_places(tree))
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.6 or isinstance(holder, list):
        holder[key] = rng.choice(VALUES)
    elif what < 0.8:
        del holder[key]
    else:
        holder[f"{key}x"] = holder.pop(key)
    lines[number] = json.dumps(tree)
    path.write_text("\n".join(lines) + "\n")


def delete(path: Path, rng: Random, other: Path) -> None:
    path.unlink()


def swap(path: Path, rng: Random, other: Path) -> None:
    shutil.copyfile(other, path)


def link_to_itself(path: Path, rng: Random, other: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link_to_nothing(path: Path, rng: Random, other: Path) -> None:
    path.unlink()
    path.symlink_to("nothing-there")


def link_to_the_same(path: Path, rng: Random, other: Path) -> None:
    """Keep the file elsewhere, as somebody with a small disk does."""
    elsewhere = path.parent.parent / f"kept {path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def link_to_zeros(path: Path, rng: Random, other: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder_instead(path: Path, rng: Random, other: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path, rng: Random, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CONTENT: tuple[Spoil, ...] = (flip_a_bit, cut, empty, junk, append_junk, swap, delete)
JSON: tuple[Spoil, ...] = (other_shape, deep, other_value, other_value, other_value)
SPECIAL: tuple[Spoil, ...] = (
    link_to_itself,
    link_to_nothing,
    link_to_the_same,
    link_to_zeros,
    folder_instead,
    pipe_instead,
)


def ways(name: str) -> tuple[Spoil, ...]:
    """Return the ways to spoil a file of that name."""
    is_json = name.endswith((".json", ".jsonl"))
    return (*CONTENT, *(JSON if is_json else ()), *SPECIAL)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every holder and key in a tree of JSON."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    found = []
    for key in keys:
        found.append((tree, key))
        found += _places(tree[key])
    return found
