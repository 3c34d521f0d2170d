import gc
import logging
import signal
import sys
import types
import warnings

import pytest
import torch
from safetensors.torch import load_file

import narrowcast as nc
from narrowcast.cli.entry import run_command
from narrowcast.errors import CheckpointError, ConfigError, DivergedError, UnsupportedError
from narrowcast.runs import EvalRecord, RunFolder, StepRecord, same_trajectory

SIX = ["steps=6", "checkpoint.every=2"]


def steps_of(records):
    return [record for record in records if isinstance(record, StepRecord)]


def test_a_run_from_python_is_the_run_of_the_command_line(tiny, tmp_path):
    with nc.train(tiny, SIX, out=tmp_path / "here") as run:
        yielded = list(run)
    assert run_command(["train", tiny, *SIX, "--out", str(tmp_path / "there"), "--quiet"]) == 0
    with RunFolder.open(tmp_path / "here") as here, RunFolder.open(tmp_path / "there") as there:
        assert all(map(same_trajectory, here.records(), there.records()))
        assert here.records() == yielded
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("here", "there"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "here/report.html").exists()


def test_without_a_folder_a_run_writes_nothing_and_has_its_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    run = nc.train(tiny, SIX)
    first = {name: w.clone() for name, w in run.prepared.fp32_state_dict().items()}
    records = list(run)
    assert len(steps_of(records)) == 6
    assert isinstance(records[-1], EvalRecord)
    assert sorted(tmp_path.iterdir()) == before
    assert any(not torch.equal(first[n], w) for n, w in run.prepared.fp32_state_dict().items())


def test_a_loop_that_is_left_early_is_continued_bit_for_bit(tiny, tmp_path):
    with nc.train(tiny, SIX, out=tmp_path / "straight") as run:
        list(run)
    with nc.train(tiny, SIX, out=tmp_path / "left") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == 5:
                break
    with nc.resume(tmp_path / "left") as again:
        assert again.resumed_from == 4
        assert [record.step for record in steps_of(again)] == [5, 6]
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("straight", "left"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_drawn_in_the_loop_changes_nothing_in_the_run_and_the_run_nothing_outside(tmp_path):
    words = ["steps=4", "device=cpu", "batch_size=8", "health.every=0"]

    def losses(*, drawing):
        torch.manual_seed(7)
        run = nc.train("tutorial", words)
        run.model.register_forward_pre_hook(lambda *_: seen.append(torch.rand(())))
        drawn = []
        for _ in run:
            if drawing:
                drawn.append(torch.rand(()))
        return torch.stack(drawn) if drawing else None

    seen: list[torch.Tensor] = []
    losses(drawing=False)
    alone, seen = seen, []
    mine = losses(drawing=True)
    assert torch.equal(torch.stack(alone), torch.stack(seen))
    torch.manual_seed(7)
    nc.train("tutorial", words).close()  # to build a run draws what it draws
    assert torch.equal(mine, torch.rand(len(mine)))


def test_leaving_the_loop_leaves_the_process_and_the_model_as_they_were(tiny, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    run = nc.train(tiny, [*SIX, "health.every=1"], out=tmp_path / "run")
    for record in run:
        if isinstance(record, StepRecord):
            break
    run.close()
    assert signal.getsignal(signal.SIGINT) is handler
    run.prepared.release()  # which is refused while somebody watches the model


def test_a_finished_run_has_no_step_left_and_has_its_model(tiny, tmp_path):
    with nc.train(tiny, SIX, out=tmp_path / "run") as run:
        list(run)
        trained = run.prepared.fp32_state_dict()
    with nc.resume(tmp_path / "run") as again:
        assert steps_of(again) == []
        assert all(torch.equal(trained[n], w) for n, w in again.prepared.fp32_state_dict().items())


def test_a_recipe_is_planned_without_its_weights():
    plan = nc.plan_recipe("lm/gpt-2.8b", ["device=cpu"])
    assert sum(module.parameters for module in plan.modules) > 2.5e9


def test_a_phase_of_a_schedule_is_planned_by_number(tiny):
    words = ["precision.schedule=[{policy: fp32, until: 3}, {policy: bf16}]"]
    assert str(nc.plan_recipe(tiny, words, phase=2).policy) == "compute=bf16"
    with pytest.raises(ConfigError, match=r"phase must be from 1 to 2, .*got 3"):
        nc.plan_recipe(tiny, words, phase=3)


def test_words_beside_a_loaded_recipe_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"Pass them to load_recipe\(\)"):
        nc.train(nc.load_recipe(tiny), ["steps=3"])


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_built(tiny, tmp_path):
    with nc.train(tiny, ["steps=1"], out=tmp_path / "run") as run:
        list(run)
    with pytest.raises(ConfigError, match="already has a run"):
        nc.train(tiny, SIX, out=tmp_path / "run")


def test_what_the_trainer_refuses_leaves_no_folder(tiny, tmp_path):
    with pytest.raises(UnsupportedError, match="cuda_graph=true"):
        nc.train(tiny, ["cuda_graph=true"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trackers_without_a_folder_are_refused(tiny):
    with pytest.raises(ConfigError, match="trackers need a run folder"):
        nc.train(tiny, ["trackers=[tensorboard]"])


def test_a_tracker_that_fails_is_told_to_the_log_and_the_run_goes_on(tiny, tmp_path, caplog):
    out = tmp_path / "run"
    with nc.train(tiny, [*SIX, "trackers=[tensorboard]"], out=out) as run:
        (out / "tensorboard").write_text("in the way")
        with caplog.at_level(logging.WARNING):
            assert len(steps_of(run)) == 6
    assert "tensorboard" in caplog.text


def test_a_run_that_is_going_on_is_not_continued_in_the_same_process(tiny, tmp_path):
    folder = tmp_path / "run"
    with nc.train(tiny, SIX, out=folder) as run:
        for record in run:
            if record.step == 3:
                with pytest.raises(CheckpointError, match="This process is already writing to"):
                    nc.resume(folder)
    assert len(steps_of(run.folder.records())) == 6


def test_a_run_that_has_ended_or_was_left_is_continued_in_the_same_process(tiny, tmp_path):
    for record in nc.train(tiny, SIX, out=tmp_path / "run"):
        if record.step == 3:
            break
    run = nc.resume(tmp_path / "run")  # which nobody closes
    assert [record.step for record in steps_of(run)] == [3, 4, 5, 6]
    with nc.resume(tmp_path / "run", ["steps=8"]) as longer:
        assert [record.step for record in steps_of(longer)] == [7, 8]


def test_a_report_that_cannot_be_written_does_not_hide_that_a_run_diverged(tiny, tmp_path):
    def train_badly(run):
        for record in run:
            if record.step == 3 and not (tmp_path / "run/report.html").exists():
                (tmp_path / "run/report.html").mkdir()
                (tmp_path / "run/report.html/inside").touch()
                with torch.no_grad():
                    next(run.model.parameters()).fill_(torch.nan)

    with (
        nc.train(tiny, SIX, out=tmp_path / "run") as run,
        pytest.raises(DivergedError) as raised,
    ):
        train_badly(run)
    assert raised.value.exit_code == 4
    assert "The run has diverged" in str(raised.value)
    assert "report.html because it is a folder" in str(raised.value)
    assert "Report:" not in str(raised.value)


def test_finish_trains_as_the_loop_does_and_says_what_came_of_it(tiny, tmp_path, capsys):
    words = ["steps=4", "checkpoint.every=2", "precision.policy=fp16"]
    with nc.train(tiny, words, out=tmp_path / "looped") as run:
        records = list(run)
    result = nc.train(tiny, words, out=tmp_path / "finished").finish()
    with RunFolder.open(tmp_path / "finished") as folder:
        assert all(map(same_trajectory, folder.records(), records))
    (evaluated,) = [r for r in records if isinstance(r, EvalRecord)]
    assert result.metrics == evaluated.metrics
    assert (result.step, result.folder) == (4, tmp_path / "finished")
    assert result.skipped == sum(not record.applied for record in steps_of(records))
    assert min(r.loss for r in steps_of(records)) <= result.loss
    assert (result.folder / "report.html").exists()
    assert capsys.readouterr() == ("", "")  # neither a terminal nor a notebook


def test_finish_continues_the_counts_of_a_resumed_run(tiny, tmp_path):
    for record in nc.train(tiny, SIX, out=tmp_path / "run"):
        if record.step == 5:
            break
    run = nc.resume(tmp_path / "run")
    assert "step 4 of 6" in repr(run)
    assert run.finish(progress=False).step == 6
    result = nc.resume(tmp_path / "run").finish()
    assert (result.step, result.metrics) == (6, {})
    assert result.seconds > 0


def test_a_run_shows_in_its_repr_what_it_is_and_whether_it_was_trained(tiny, tmp_path):
    run = nc.train(tiny, ["steps=2"], out=tmp_path / "run")
    assert f"folder {tmp_path / 'run'}; not started; call finish() to train" in repr(run)
    for _ in run:
        assert "training" in repr(run)
    assert "step 2 of 2" in repr(run)
    assert "finished" in repr(run)
    with pytest.raises(ConfigError, match=r"finished\. Call nc\.resume\(\)"):
        run.finish()


def test_a_run_that_nobody_started_warns_by_default(tiny):
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        nc.train(tiny, SIX)
        gc.collect()
    (warning,) = [w for w in caught if "never started" in str(w.message)]
    assert "run.finish()" in str(warning.message)
    assert not issubclass(warning.category, ResourceWarning | DeprecationWarning)  # not shown


def test_a_run_that_was_closed_or_has_no_step_left_does_not_warn(tiny, tmp_path):
    with nc.train(tiny, ["steps=1"], out=tmp_path / "run") as run:
        pass
    nc.resume(tmp_path / "run").finish()
    assert "step 1 of 1" in repr(nc.resume(tmp_path / "run"))
    assert "closed" in repr(run)
    gc.collect()


def test_finish_draws_one_bar_in_a_notebook(tiny, monkeypatch):
    pages = []

    class Handle:
        def update(self, data, *, raw):
            pages.append(data["text/html"])

    def display(data, *, raw, display_id):
        assert (raw, display_id, pages) == (True, True, [])
        pages.append(data["text/html"])
        return Handle()

    ipython, ours = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ours.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ours)
    nc.train(tiny, ["steps=3"]).finish()
    assert pages[0].startswith('<progress max="3" value="1">')
    assert pages[-1].startswith('<progress max="3" value="3">')
    assert "loss" in pages[-1]


@pytest.mark.parametrize(("tty", "begins"), [(True, "\r\x1b[K━"), (False, "step 1/3  mean loss")])
def test_finish_shows_progress_on_stderr(tty, begins, tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty)
    nc.train(tiny, ["steps=3"]).finish(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(begins)
    assert "3/3  mean loss" in err
    assert err.endswith("\n")
