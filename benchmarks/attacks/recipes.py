"""Recipes, words and policies that nobody would write: planned, trained, or refused in words."""

import json
import os
import signal
import time
from pathlib import Path
from random import Random

from attacks import tiny
from attacks.case import ANSWER_SECONDS, SECONDS, Case, steps_of, watch_until
from attacks.oracle import BAD_INPUT, DONE, INTERRUPTED, REFUSED_CODES, Verdict, refused, well_ended

NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1000000007",
    "1099511627776",
    "9223372036854775807",
    "9223372036854775808",
    "1" + "0" * 400,
    "7" * 5000,
    "0x10",
    "0o17",
    "1_000",
    "1e3",
    "1e39",
    "1e308",
    "1e400",
    "-1e-400",
    "1e-45",
    "0.5",
    "-0.0",
    ".inf",
    "-.inf",
    ".nan",
    "nan",
    "inf",
    "٣",
    "+5",
    "5.",
)
OTHERS = (
    "",
    "none",
    "null",
    "~",
    "true",
    "yes",
    "off",
    "[]",
    "{}",
    "[[[[]]]]",
    "[" * 3000,
    "{a: {b: c}}",
    "[1, 2",
    '"',
    "'",
    "&a [*a]",
    "*a",
    "!!python/object/apply:os.system [id]",
    "!!binary aGk=",
    "x" * 5000,
    "\x1b[31mred",
    "\u202egnp.exe",
    "a\tb",
    "=",
    "a=b=c",
    "../../etc/passwd",
    "%s%n",
    "${HOME}",
    "2026-01-01",
    "<<: x",
)
POLICY_PARTS = (
    "fp32",
    "bf16",
    "fp16",
    "fp8-tensor",
    "fp8-delayed",
    "fp8-row",
    "fp8-block",
    "e4m3",
    "e5m2",
    "default",
    "auto",
    "compute",
    "params",
    "grads",
    "master",
    "output",
    "head",
    "split",
    "kahan",
    "stochastic",
    "none",
    "=",
    "=",
    ",",
    ",",
    " ",
    "==",
    ";",
    ":",
    "blocks.*",
    "FP16",
    "fp6",
    "€",
    "\0",
    "(",
    "x" * 400,
)
LINES = (
    "\tsteps: 3",
    "steps: 3",
    "steps: 3\nsteps: 4",
    "model: {}",
    "model:",
    "model: []",
    "a: &a [*a]",
    "x: &x {x: *x}",
    "<<: *nothing",
    "? [complex, key]\n: 1",
    "- 1",
    "---",
    "...",
    "%YAML 9.9",
    "workload: nothing-like-it",
    "workload: [lm]",
    "name: ../../../elsewhere",
    "name: " + "n" * 4000,
    'name: "\\0"',
    "precision: {schedule: [{policy: fp32, until: -3}]}",
    "precision: {overrides: {'**': bf16}}",
    "faults: [{step: 1}]",
    "trackers: [tensorboard, nothing]",
    "1: 2",
    "null: 3",
    "data: {text: [a, [b]]}",
    "? ",
    "\ufeff",
    "\x85",
    "'",
    "steps: !!float 3",
)
SMALL = ("steps=2", "checkpoint.every=0", "eval.every=0")


STEP_SECONDS = 15
"""For the step in progress, which the first signal lets end; the second does not."""


def words(case: Case) -> Verdict:
    """Give settings values of every kind, and misspell some."""
    keys = _keys()
    given = []
    for _ in range(case.rng.choice((1, 1, 1, 2, 4))):
        key = case.turn(keys) if not given else case.rng.choice(keys)
        key = _misspelt(key, case.rng) if case.rng.random() < 0.1 else key
        value = _value(case.rng)
        given.append(f"{key}={value}" if case.rng.random() < 0.97 else f"{key}{value}")
    case.tell(" ".join(f"{word[:60]!r}" for word in given))
    return _planned_then_trained(case, (*tiny.RECIPES["bf16"], *given))


def policies(case: Case) -> Verdict:
    """Write policies out of the pieces of policies."""
    many = case.rng.randint(1, 9)
    policy = "".join(case.rng.choice(POLICY_PARTS) for _ in range(many)).replace("\0", "")
    if case.rng.random() < 0.5:
        roles = ("compute", "params", "grads", "master", "output", "head", "norm", "comput")
        chosen = case.rng.sample(roles, k=case.rng.randint(0, 3))
        pairs = [f"{role}={case.rng.choice(POLICY_PARTS[:10])}" for role in chosen]
        policy = ", ".join([case.rng.choice(POLICY_PARTS[:7]), *pairs])
    key = case.rng.choice(("precision.policy", "precision.policy", "precision.overrides.head"))
    case.tell(f"{key}={policy[:80]!r}")
    return _planned_then_trained(case, (*tiny.RECIPES["bf16"], f"{key}={policy}"))


def files(case: Case) -> Verdict:
    """Change the text of a recipe here and there."""
    file = case.folder / "mine.yaml"
    data = _recipe_text().encode()
    for _ in range(case.rng.choice((1, 1, 2, 5, 20))):
        data = _changed(data, case.rng)
    file.write_bytes(data)
    case.tell(f"a recipe of {len(data)} bytes, changed by chance")
    return _planned_then_trained(case, (str(file), *tiny.SHAPE))


def monsters(case: Case) -> Verdict:
    """Give a recipe that is no file, or too much of one: answered in seconds."""
    file = case.folder / "mine.yaml"
    makers = {
        "empty": lambda: file.write_text(""),
        "a folder": lambda: file.mkdir(),
        "a pipe": lambda: os.mkfifo(file),
        "zeros": lambda: file.symlink_to("/dev/zero"),
        "a link to itself": lambda: file.symlink_to(file.name),
        "a link to nothing": lambda: file.symlink_to("gone.yaml"),
        "60,000 unknown keys": lambda: file.write_text(
            _recipe_text() + "".join(f"key{n}: {n}\n" for n in range(60_000))
        ),
        "6,000 unknown keys in a section": lambda: file.write_text(
            "model:\n" + "".join(f"  key{n}: {n}\n" for n in range(6_000))
        ),
        "a deep list": lambda: file.write_text("steps: " + "[" * 50_000 + "]" * 50_000),
        "a deep mapping": lambda: file.write_text(
            "".join(f"{' ' * n}a:\n" for n in range(2_000)) + " " * 2_000 + "b"
        ),
        "a billion laughs": lambda: file.write_text(_laughs()),
        "a text of 30 MB": lambda: file.write_text("name: " + "x" * 30_000_000),
        "latin-1": lambda: file.write_bytes("description: Größe\n".encode("latin-1")),
        "zero bytes": lambda: file.write_bytes(b"steps: 3\0\n" * 10),
        "a million digits": lambda: file.write_text("steps: " + "9" * 1_000_000),
        "ten thousand phases": lambda: file.write_text(
            _recipe_text() + "\nfaults: [" + "{step: 1}, " * 10_000 + "]\n"
        ),
        "a huge sparse file": lambda: os.truncate(os.open(file, os.O_CREAT | os.O_RDWR), 2**40),
    }
    name = case.turn(list(makers))
    makers[name]()
    case.tell(f"a recipe: {name}")
    verb = case.rng.choice(("plan", "train"))
    out = ("--out", "run") if verb == "train" else ()
    case.run(verb, file, *out, codes=REFUSED_CODES, seconds=ANSWER_SECONDS)
    return Verdict.REFUSED


def command_lines(case: Case) -> Verdict:
    """Call verbs with words that are not theirs.

    None names a device: a program that puts a page in its place would take it from the machine.
    """
    verbs = ("train", "resume", "plan", "report", "compare", "recipes", "schema", "tutorial")
    pool = (
        "quickstart",
        "tutorial",
        "--out",
        "--quiet",
        "--json",
        "--html",
        "--steps",
        "steps=2",
        "-h",
        "--",
        "-",
        "",
        ".",
        "nothing-there",
        "x" * 5000,
        "a\nb",
        "é\udcff",
        "=",
        "=1",
        "steps",
        "--out=",
    )
    given = [case.rng.choice(pool) for _ in range(case.rng.randint(0, 4))]
    given = [case.turn(verbs), *given]
    if given[0] == "train":  # should it be accepted, then a small one
        given += [*tiny.SHAPE, *tiny.COURSE, *SMALL]
    case.tell(" ".join(f"{word[:30]!r}" for word in given))
    ended = case.run(*given, codes={DONE, *REFUSED_CODES})
    return Verdict.REFUSED if refused(ended) else Verdict.FINE


def _planned_then_trained(case: Case, given: tuple[str, ...]) -> Verdict:
    """Plan a recipe; where that is possible, train it, and stop it where it takes long."""
    planned = case.run("plan", *given, codes={DONE, *REFUSED_CODES}, seconds=ANSWER_SECONDS)
    if refused(planned) and case.rng.random() < 0.9:
        return Verdict.REFUSED
    run = case.folder / "run"
    command = case.start("train", *given, "--out", run)
    watch_until(command, lambda: steps_of(run) > 2, seconds=5)
    time.sleep(0.2)
    command.send(signal.SIGINT)
    watch_until(command, lambda: False, seconds=STEP_SECONDS)
    if command.running():
        command.send(signal.SIGINT)  # of ten thousand micro-batches, a step takes minutes
    codes = REFUSED_CODES if refused(planned) else {DONE, INTERRUPTED, *REFUSED_CODES}
    ended = well_ended(command.wait(SECONDS), codes=codes)
    if ended.code == BAD_INPUT and steps_of(run) > 0 and not refused(planned):
        case.tell(f"refused after steps were made: {ended.err[:100]}")
    return Verdict.REFUSED if refused(ended) else Verdict.FINE


def _keys() -> list[str]:
    from narrowcast.workloads import load_recipe

    loaded = load_recipe("quickstart", ())
    leaves = list(loaded.resolved())
    sections = sorted({key.rpartition(".")[0] for key in leaves if "." in key})
    return [*leaves, *sections, "nothing", "", "model.layers.x", "data..text", "further"]


def _value(rng: Random) -> str:
    """Draw a number of any size, one that is written strangely, or something else."""
    match rng.randrange(4):
        case 0:
            return str(round(10 ** rng.uniform(0, 14)))
        case 1:
            return f"{10 ** rng.uniform(-12, 12):.3g}"
        case 2:
            return rng.choice(NUMBERS)
        case _:
            return rng.choice(OTHERS)


def _misspelt(key: str, rng: Random) -> str:
    place = rng.randrange(len(key) + 1)
    return key[:place] + rng.choice(("", "x", ".", " ", "-", "É")) + key[place + 1 :]


def _recipe_text() -> str:
    import narrowcast.workloads.lm as lm

    return (Path(lm.__file__).parent / "recipes" / "quickstart.yaml").read_text()


def _changed(data: bytes, rng: Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            return data[:place] + rng.randbytes(1) + data[place + 1 :]
        case 1:
            return data[:place] + data[place + rng.randint(1, 40) :]
        case 2:
            return data[:place] + rng.choice(LINES).encode("utf-8", "surrogatepass") + data[place:]
        case 3:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines)), rng.choice(LINES).encode())
            return b"\n".join(lines)
        case 4:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            return b"\n".join(lines)
        case _:
            lines = data.split(b"\n")
            number = rng.randrange(len(lines))
            key, colon, _ = lines[number].partition(b":")
            value = rng.choice((*NUMBERS, *OTHERS)).encode("utf-8", "surrogatepass")
            lines[number] = key + colon + b" " + value
            return b"\n".join(lines)


def _laughs() -> str:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join([*lines, f"description: {json.dumps('x')}"]) + "\n"
