import json
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared():
    """A folder of real data by its name, or a skip that says what it needs."""

    def folder(name):
        for up in Path(__file__).parents:
            if (up / "shared/data" / name).is_dir():
                return up / "shared/data" / name
        return pytest.skip(f"needs the real data in ../shared/data/{name}")

    return folder


SMALL = (
    "epochs=null", "steps=4", "batch_size=8", "model.width=16", "model.layers=1",
    "model.dropout=0", "data.max_length=64", "eval.every=4", "health.every=0", "device=cpu",
    "precision.task=null", "precision.policy=fp32",
)  # fmt: skip


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Folders of finished runs of a few steps, by what they learn; each made when first asked."""
    import narrowcast as nc

    home, made = tmp_path_factory.mktemp("genomics"), {}

    def folder(name):
        if name not in made:
            recipe, words = RUNS[name](home)
            for _ in nc.train(f"genomics/{recipe}", [*SMALL, *words], out=home / name):
                pass
            made[name] = home / name
        return made[name]

    return folder


def bases(count, seed):
    return "".join(random.Random(seed).choices("ACGT", k=count))


def _pairs(home):
    rows = ["sequence,alternative,label"]
    for number in range(80):
        text, other = bases(40, number), "ACGT"[number % 4]
        kind = "harmful" if text[20] in "AC" else "<b>benign</b>"
        rows.append(f"{text},{text[:20]}{other if other != text[20] else 'N'}{text[21:]},{kind}")
    (home / "pairs.csv").write_text("\n".join(rows))
    (home / "pairs_test.csv").write_text("\n".join([rows[0], *rows[1:20]]))
    return "variant_effect", [f"data.path={home}/pairs.csv", f"data.test={home}/pairs_test.csv"]


def _values(home):
    rows = [f"{(text := bases(40, number))},{text.count('G') / 2}" for number in range(60)]
    (home / "values.csv").write_text("\n".join(["sequence,label", *rows]))
    smooth = ["objective.label_smoothing=0", "objective.target=value"]
    return "variant_effect", [f"data.path={home}/values.csv", *smooth]


def _letters(home):
    rows = []
    for number in range(40):
        text = bases(50, number)
        rows.append(json.dumps({"sequence": text, "label": ["other", "strong"] * 25}))
    (home / "letters.jsonl").write_text("\n".join(rows))
    return "annotation", [f"data.path={home}/letters.jsonl", "objective.labels=[other,strong]"]


def _base(home):
    (home / "genome.fa").write_text(f">one\n{bases(2000, 0)}\n>two\n{bases(1000, 1)}\n")
    return "generation", [f"data.path={home}/genome.fa"]


RUNS = {"pairs": _pairs, "values": _values, "letters": _letters, "base": _base}
