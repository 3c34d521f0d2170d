import json
import zipfile

import numpy as np
import pytest
import torch

from narrowcast.cli.entry import run_command
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.runs import EvalRecord, RunFolder, StepRecord
from narrowcast.training.evaluation import evaluate
from narrowcast.workloads import load_recipe
from narrowcast.workloads.forecast import report, results
from narrowcast.workloads.forecast.settings import FRAME
from narrowcast.workloads.forecast.task import build_forecast, build_task

CPU = torch.device("cpu")
SMALL = ["horizon=12", "lookback=48", "batch_size=16", "data.eval_windows=32"]


def write_wide(path, *, rows=600, gap=None):
    """Write two noisy sines and a column that is known ahead and moves the first of them."""
    draw, hours = np.random.default_rng(0), np.arange(rows)
    known = (draw.random(rows) < 0.3).astype(float)
    a = 50 + 5 * np.sin(hours / 4) + 8 * known + draw.normal(0, 0.3, rows)
    b = -3 + 0.01 * np.cos(hours / 4) + draw.normal(0, 0.001, rows)
    dates = np.datetime64("2024-01-01T00:00") + hours * np.timedelta64(1, "h")
    lines = [f"{d},{x:.5f},{y:.5f},{z:g}" for d, x, y, z in zip(dates, a, b, known, strict=True)]
    if gap is not None:
        lines[gap] = f"{dates[gap]},,{b[gap]:.5f},{known[gap]:g}"
    path.write_text("\n".join(["date,a,b,promotion", *lines]))
    return np.stack([a, b], axis=1)


def build(words, recipe="forecast/nlinear"):
    return build_forecast(load_recipe(recipe, words).recipe, device=CPU)


def test_a_run_from_the_command_line_learns_and_reports_the_test_error(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train", "forecast/quickstart", "steps=40", *SMALL, "model.width=32", "eval.every=20"]
    assert run_command([*words, "--out", str(out)]) == 0
    assert "test quantile_loss" in " ".join(capsys.readouterr().out.split())
    with RunFolder.open(out) as run:
        judged = [r for r in run.records() if isinstance(r, EvalRecord)]
        steps = [r for r in run.records() if isinstance(r, StepRecord)]
    assert judged[-1].metrics["quantile_loss"] < judged[0].metrics["quantile_loss"]
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert {step.items for step in steps} == {16}


def test_test_errors_equal_those_of_the_last_value_repeated(tmp_path):
    # NLinear with weights of 0 is the repeat column of the published tables.
    table = write_wide(tmp_path / "a.csv")
    made = build([f"data.path={tmp_path / 'a.csv'}", "data.target=[a,b]", *SMALL])
    for parameter in made.network.parameters():
        torch.nn.init.zeros_(parameter)
    measured = made.measure(made.network, made.test)
    train = table[:420]
    scaled = (table - train.mean(axis=0)) / train.std(axis=0)
    starts = range(480 - 48, 600 - 48 - 12 + 1)
    errors = np.stack([scaled[s + 48 : s + 60] - scaled[s + 47] for s in starts])
    assert measured["mse"] == pytest.approx((errors**2).mean(), rel=1e-3)
    assert measured["mae"] == pytest.approx(abs(errors).mean(), rel=1e-3)


def test_filled_values_count_neither_in_the_loss_nor_in_the_errors(tmp_path):
    write_wide(tmp_path / "a.csv", gap=70)
    words = [f"data.path={tmp_path / 'a.csv'}", "data.target=[a,b]", *SMALL]
    made = build([*words, "data.fill=zero"])
    starts = torch.tensor([20])
    window = made.series.windows(starts)
    assert window.observed[0].sum() == 23
    with torch.no_grad():
        error = (made.network(window.x)[..., 0] - window.y).square()[window.observed]
        assert made.loss(made.network, starts).item() == pytest.approx(error.mean().item())
    assert made.count_observed(starts) == 23
    with pytest.raises(ConfigError, match="missing"):
        build(words)


def test_a_column_that_is_known_ahead_lowers_the_error(tmp_path):
    write_wide(tmp_path / "a.csv")
    words = [f"data.path={tmp_path / 'a.csv'}", "data.target=[a]", "steps=200", *SMALL]
    words += ["model.width=64", "eval.every=0", "eval.patience=0", "precision.task=none"]
    words += ["optimizer.lr=4e-3"]
    errors = []
    for future in ([], ["data.future=[promotion]"]):
        out = tmp_path / f"run{len(future)}"
        recipe = ["train", "forecast/nhits", *words, *future, "precision.policy=fp32"]
        assert run_command([*recipe, "--quiet", "--out", str(out)]) == 0
        with RunFolder.open(out) as run:
            errors.append([r for r in run.records() if isinstance(r, EvalRecord)][-1].metrics)
    assert errors[1]["mse"] < errors[0]["mse"] / 2


@pytest.mark.parametrize("how", ["standard", "robust", "none"])
def test_series_are_scaled_by_their_training_rows(tmp_path, how):
    table = write_wide(tmp_path / "a.csv")
    words = [f"data.path={tmp_path / 'a.csv'}", "data.target=[a,b]", f"data.scale={how}", *SMALL]
    scaled = build(words).series.values.T[:420].numpy()
    train = table[:420]
    reference = {
        "standard": (train - train.mean(axis=0)) / train.std(axis=0),
        "robust": (train - np.median(train, axis=0))
        / (np.subtract(*np.quantile(train, [0.75, 0.25], axis=0)) / 1.349),
        "none": train,
    }[how]
    np.testing.assert_allclose(scaled, reference, rtol=5e-3, atol=5e-3)


def test_parts_of_the_held_out_data_average_to_the_headline():
    made = build(["horizon=12", "lookback=48", "batch_size=11", "data.eval_windows=44"])
    held_out = made.held_out()
    parts = [held_out.headline(made.network, part).item() for part in range(held_out.parts)]
    assert held_out.parts == 4
    assert np.mean(parts) == pytest.approx(made.evaluate(made.network)["mse"], rel=1e-5)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_16_bit_policies_evaluate_close_to_fp32(policy):
    import narrowcast as nc

    words = ["model.width=16", "model.heads=2", "batch_size=8", *SMALL[:2], "data.eval_windows=16"]
    made = build(words, "forecast/patchtst")
    task = build_task(made.recipe, device=CPU)
    plain = made.evaluate(made.network.eval())["mse"]
    optimizer = torch.optim.AdamW(task.model.parameters())
    run = nc.prepare(task.model, optimizer, policy=policy)
    assert evaluate(run, task)["mse"] == pytest.approx(plain, rel=0.01)


def test_a_frame_in_memory_is_not_for_the_command_line():
    with pytest.raises(ConfigError, match=rf"data.path={FRAME} is the table of a .*Forecaster"):
        build([f"data.path={FRAME}"])


def test_horizon_and_lookback_need_no_section_on_the_command_line(tmp_path):
    data = load_recipe("forecast/nlinear", ["horizon=7", "lookback=9"]).recipe.data
    assert (data.horizon, data.lookback) == (7, 9)
    (tmp_path / "a.yaml").write_text(json.dumps({"workload": "forecast", "horizon": 7}))
    with pytest.raises(ConfigError, match=r"Did you mean data\.horizon"):
        load_recipe(tmp_path / "a.yaml")


def test_calendar_of_a_model_that_reads_none_raises(tmp_path):
    write_wide(tmp_path / "a.csv")
    words = [f"data.path={tmp_path / 'a.csv'}", "data.calendar=true", *SMALL]
    with pytest.raises(UnsupportedError, match=r"nlinear reads no calendar.*model.name=nhits"):
        build(words)


def test_the_report_of_a_run_compares_it_with_the_baselines(tmp_path, capsys):
    write_wide(tmp_path / "a.csv")
    words = ["train", "forecast/nlinear", f"data.path={tmp_path / 'a.csv'}", "data.target=[a,b]"]
    assert run_command([*words, *SMALL, "epochs=1", "--out", str(tmp_path / "run")]) == 0
    measured = results.read(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert report.verdict(measured) in said
    assert f"mse {measured.model.mse:.4f}, mae {measured.model.mae:.4f}" in said
    assert measured.windows == 600 - 480 - 12 + 1
    assert [each.level for each in measured.coverage] == [0.8, 0.95]
    page = (tmp_path / "run" / "report.html").read_text()
    assert report.verdict(measured) in page
    assert all(title in page for title in report.DRAWN)


def test_a_table_inside_an_archive_is_trained_on(tmp_path):
    write_wide(tmp_path / "a.csv")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "a.csv", "2024/a.csv")
        archive.writestr("2024/b.csv", "date,b\n")
    words = [f"data.path={tmp_path / 'all.zip'}/2024/a.csv", *SMALL]
    assert build(words).table.channels == ("a", "b", "promotion")
    (tmp_path / "all.zip").unlink()
    with pytest.raises(ConfigError, match=r"all.zip/2024/a.csv cannot be read: No such file"):
        build(words)
