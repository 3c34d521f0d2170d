import io

from rich.console import Console

from narrowcast.bench.zoo.bars import verdicts
from narrowcast.bench.zoo.running import Zoo
from narrowcast.bench.zoo.ways import AMP, BF16, LIGER, Trial
from narrowcast.cli.view.models_table import print_models


def row(way, mode, ms, **more):
    figures = {"peak_bytes": 2**30, "first_step_seconds": 1.5, "loss": 3.25, "failure": ""}
    return {"model": "unet", "way": way, "mode": mode, "ms": ms, **figures, **more}


def printed(rows, *, judged=True, left_out=()):
    data = {
        "rows": rows, "device": "a GPU", "torch": "2", "cold_caches": True, "judged": judged,
        "verdicts": [each.to_json() for each in verdicts(rows)] if judged else [],
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=1000)
    print_models(console, Zoo(data=data, left_out=left_out, interrupted=False))
    return console.file.getvalue()


def test_the_table_gives_ratios_verdicts_failures_and_what_is_left_out():
    rows = [
        row(AMP, "eager", 20.0),
        row(BF16, "eager", 25.0),
        row(BF16, "graphed", 10.0),
        row(LIGER, "eager", 0.0, failure="liger-kernel is not installed"),
    ]
    text = printed(rows, left_out=(Trial(model="lstm", way=AMP, mode="eager"),))
    lines = [line.split() for line in text.splitlines()]
    assert ["unet", "AMP", "eager", "20.00", "1.000", "1.00", "1.5", "s", "3.2500"] in lines
    assert ["bf16", "eager", "25.00", "0.800", "1.00", "1.5", "s", "3.2500"] in lines
    assert ["bf16", "graphed", "10.00", "2.000", "1.00", "1.5", "s", "3.2500"] in lines
    assert "unet, AMP + Liger, eager  liger-kernel is not installed" in text
    assert "graphed rows are against eager AMP" in text
    assert "unet: bf16, eager against AMP, eager  0.800  ≥ 0.99  falls short" in text
    assert "0 of 1 hold" in text
    assert "left out, 1 rows: lstm, AMP, eager" in text


def test_first_steps_beside_others_are_marked():
    alone = printed([row(AMP, "compiled", 20.0)])
    assert "*" not in alone
    text = printed([row(AMP, "compiled", 20.0), row(BF16, "compiled", 20.0, together=4)])
    lines = [line.split() for line in text.splitlines()]
    assert ["bf16", "compiled", "20.00", "1.000", "1.00", "1.5", "s", "*", "3.2500"] in lines
    assert "* set up beside others (--together): such a first step is not comparable" in text


def test_of_a_cpu_nothing_is_claimed():
    text = printed([row(AMP, "eager", 20.0), row(BF16, "eager", 25.0)], judged=False)
    assert "not judged" in text
    assert "falls short" not in text
