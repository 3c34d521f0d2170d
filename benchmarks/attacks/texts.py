"""Text files that are none, and texts that change between a run and its continuation."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from attacks import tiny
from attacks.case import (
    ANSWER_SECONDS,
    SECONDS,
    STOPPED_AFTER,
    Case,
    contents,
    require_equal,
    require_untouched,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, refused

SENTENCES = "".join(
    f"Line {n} tells of {n * 7919 % 1009} birds above the hill.\n" for n in range(300)
)
_WORDS = tiny.RECIPES["bf16"]

Make = Callable[[Path], None]
BAD_FILES: dict[str, Make] = {
    "empty": lambda path: path.write_bytes(b""),
    "blanks": lambda path: path.write_text(" \n\t" * 1000),
    "one byte": lambda path: path.write_bytes(b"a"),
    "one long character": lambda path: path.write_text("€"),
    "only a byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf"),
    "zero bytes": lambda path: path.write_bytes(b"a\0b" * 5000),
    "latin-1": lambda path: path.write_bytes(("für Größe\n" * 2000).encode("latin-1")),
    "utf-16": lambda path: path.write_bytes(SENTENCES.encode("utf-16")),
    "random bytes": lambda path: path.write_bytes(Random(1).randbytes(20_000)),
    "cut character": lambda path: path.write_bytes(SENTENCES.encode() + "€".encode()[:2]),
    "surrogates": lambda path: path.write_bytes(b"\xed\xa0\x80" * 5000),
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing-there"),
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to noise": lambda path: path.symlink_to("/dev/urandom"),
    "link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "huge and sparse": lambda path: _sparse(path),
    "missing": lambda path: None,
}
GOOD_FILES: dict[str, Make] = {
    "as it is": lambda path: path.write_text(SENTENCES),
    "byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + SENTENCES.encode()),
    "other line ends": lambda path: path.write_bytes(SENTENCES.replace("\n", "\r\n").encode()),
    "one huge line": lambda path: path.write_text(SENTENCES.replace("\n", " ") * 100),
    "no line end": lambda path: path.write_text(SENTENCES.rstrip()),
    "other alphabets": lambda path: path.write_text("Ω≈ç√∫ 你好 🙂 שלום\n" * 800),
    "control characters": lambda path: path.write_text("\x1b[31m\x07\x08\x7f text\n" * 2000),
    "a link": lambda path: _link(path),
}
ODD_NAMES = (
    "***",
    "**",
    "[",
    "[!]",
    "a" * 300,
    "a/" * 3000,
    "~",
    "~nobody-at-all/x",
    "",
    " ",
    ".",
    "/",
    "/proc/self/mem",
    "/dev/stdin",
    "\x1b[2J",
    "é\u0301\u202e",
    "[a, b]",
    "[]",
    "{}",
    "null",
    "-",
    "http://example.org/x.txt",
)


def bad_file(case: Case) -> Verdict:
    """Train on a file that holds no text: refused, and no folder is left."""
    name = case.turn(BAD_FILES)
    path, run = case.folder / "text.txt", case.folder / "run"
    BAD_FILES[name](path)
    verb = case.rng.choice(("train", "train", "plan"))
    case.tell(f"{verb} on a text file: {name}")
    out = ("--out", run) if verb == "train" else ()
    codes = {BAD_INPUT} if verb == "train" else {DONE, BAD_INPUT}
    ended = case.run(verb, *_WORDS, f"data.text={path}", *out, codes=codes, seconds=ANSWER_SECONDS)
    if run.exists():
        raise Found(Verdict.LOST, "refused, and left a run folder behind")
    return Verdict.REFUSED if refused(ended) else Verdict.FINE


def good_file(case: Case) -> Verdict:
    """Train on a file that is unusual and fine."""
    name = case.turn(GOOD_FILES)
    path, run = case.folder / case.rng.choice(("text.txt", "a b.txt", "[x].txt", "ü*.txt")), "run"
    case.tell(f"{name}, called {path.name}")
    GOOD_FILES[name](path)
    case.run("train", *_WORDS, f"data.text={path}", "--out", run, codes={DONE})
    return Verdict.FINE


def odd_name(case: Case) -> Verdict:
    """Name a text that cannot be."""
    name = case.turn(ODD_NAMES)
    case.tell(f"data.text={name[:40]!r}")
    words = (*_WORDS, f"data.text={name}", "--out", "run")
    case.run("train", *words, codes={BAD_INPUT}, seconds=ANSWER_SECONDS)
    return Verdict.REFUSED


CHANGES: dict[str, Callable[[str, Random], str]] = {
    "not at all": lambda text, rng: text,
    "written again": lambda text, rng: text,
    "one letter": lambda text, rng: _one_letter(text, rng),
    "two lines swapped": lambda text, rng: _swapped(text, rng),
    "other text of equal length": lambda text, rng: text[::-1],
    "shorter": lambda text, rng: text[: len(text) * 3 // 4],
    "longer": lambda text, rng: text + text[: len(text) // 4],
    "other line ends": lambda text, rng: text.replace("\n", "\r\n"),
    "byte order mark": lambda text, rng: "\ufeff" + text,
}


def changed_text(case: Case) -> Verdict:
    """Change the text of a run that stopped: refused, or equal where the change decides nothing."""
    text, run = case.folder / "text.txt", case.folder / "run"
    text.write_text(SENTENCES)
    words = (*_WORDS, f"data.text={text}")
    straight = case.folder / "straight"
    case.run("train", *words, "--out", straight, codes={DONE})
    command = case.start("train", *words, "--out", run)
    watch_until(command, lambda: steps_of(run) >= STOPPED_AFTER)
    command.kill()
    command.wait(SECONDS)
    change = case.turn((*CHANGES, "removed"))
    case.tell(f"the text: {change}")
    if change == "removed":
        text.unlink()
    elif change != "not at all":
        text.write_text(CHANGES[change](SENTENCES, case.rng), newline="")
    before = contents(run)
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if not refused(ended):
        require_equal(run, straight)
        return Verdict.EQUAL
    if change in ("not at all", "written again"):
        raise Found(Verdict.LOST, f"refused on the same text: {ended.err[:300]}")
    require_untouched(run, before)
    if change != "removed" and case.rng.random() < 0.4:
        return _accepted(case, run)
    text.write_text(SENTENCES)
    resumed_equal(case, run, straight)
    return Verdict.EQUAL


def _accepted(case: Case, run: Path) -> Verdict:
    """Go on with other data because somebody said so; the word is kept in the folder."""
    case.tell("--accept data")
    ended = case.run("resume", run, "--accept", "data")
    if ended.code != DONE:
        raise Found(Verdict.LOST, f"not accepted: {ended.err[:300]}")
    kept = "".join(path.read_text() for path in run.glob("*.json*") if path.is_file())
    if "accept" not in kept:
        raise Found(Verdict.SILENT, "other data was accepted, and nothing in the folder says so")
    return Verdict.FINE


def _one_letter(text: str, rng: Random) -> str:
    place = rng.randrange(len(text))
    return f"{text[:place]}#{text[place + 1 :]}"


def _swapped(text: str, rng: Random) -> str:
    lines = text.splitlines(keepends=True)
    one, other = rng.sample(range(len(lines)), k=2)
    lines[one], lines[other] = lines[other], lines[one]
    return "".join(lines)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _link(path: Path) -> None:
    path.with_name("kept.txt").write_text(SENTENCES)
    path.symlink_to("kept.txt")
