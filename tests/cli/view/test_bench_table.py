import io

from rich.console import Console

from narrowcast.bench.zoo.running import Zoo
from narrowcast.bench.zoo.ways import AMP, BF16, LIGER, ZooTrial
from narrowcast.cli.view.bench_table import print_models, speed_against_amp


def row(way, mode, ms, **more):
    figures = {"peak_bytes": 2**30, "first_step_seconds": 1.5, "loss": 3.25, "failure": ""}
    return {"model": "unet", "way": way, "mode": mode, "ms": ms, **figures, **more}


def printed(rows, *, left_out=()):
    data = {"rows": rows, "device": "a GPU", "torch": "2"}
    console = Console(file=io.StringIO(), width=1000)
    print_models(console, Zoo(data=data, left_out=left_out, interrupted=False))
    return console.file.getvalue()


def test_the_table_has_ratios_failures_and_what_is_left_out():
    rows = [
        row(AMP, "eager", 20.0),
        row(BF16, "eager", 25.0),
        row(BF16, "graphed", 10.0),
        row(LIGER, "eager", 0.0, failure="liger-kernel is not installed"),
    ]
    text = printed(rows, left_out=(ZooTrial(model="lstm", way=AMP, mode="eager"),))
    lines = [line.split() for line in text.splitlines()]
    assert ["unet", "AMP", "eager", "20.00", "1.000", "1.00", "1.5", "s", "3.2500"] in lines
    assert ["bf16", "eager", "25.00", "0.800", "1.00", "1.5", "s", "3.2500"] in lines
    assert ["bf16", "graphed", "10.00", "2.000", "1.00", "1.5", "s", "3.2500"] in lines
    assert "unet, AMP + Liger, eager  liger-kernel is not installed" in text
    assert "graphed rows are compared with eager AMP" in text
    assert "left out, 1 rows: lstm, AMP, eager" in text


def test_first_steps_beside_others_are_marked():
    alone = printed([row(AMP, "compiled", 20.0)])
    assert "*" not in alone
    text = printed([row(AMP, "compiled", 20.0), row(BF16, "compiled", 20.0, together=4)])
    lines = [line.split() for line in text.splitlines()]
    assert ["bf16", "compiled", "20.00", "1.000", "1.00", "1.5", "s", "*", "3.2500"] in lines
    assert "* set up in parallel (--together), so first-step times cannot be compared" in text


def test_without_amp_there_is_no_ratio():
    failed = row(AMP, "eager", 0.0, failure="out of memory")
    alone = row(BF16, "eager", 5.0)
    assert speed_against_amp(alone, [failed, alone]) is None
