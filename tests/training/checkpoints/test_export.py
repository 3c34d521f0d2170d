import pytest
import torch
from safetensors.torch import load_file, load_model

from narrowcast.errors import CheckpointError
from narrowcast.training.checkpoints.export import export_weights, results_are_whole
from narrowcast.training.train_loop import train_loop


def trained(made):
    list(train_loop(made.prepared, made.task, made.recipe))
    return made


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-pure", "aggressive"])
def test_a_plain_model_loads_every_weight_with_all_its_digits(ready, tmp_path, policy):
    made = trained(ready(policy, steps=5))
    export_weights(made.prepared, tmp_path / "model.safetensors")
    plain = type(made.task.model)()
    missing, unexpected = load_model(plain, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    for name, full in made.prepared.fp32_state_dict().items():
        assert torch.equal(plain.state_dict()[name], full.to(plain.state_dict()[name].dtype))


def test_a_tied_weight_is_in_the_file_once(ready, tmp_path):
    made = ready("aggressive")
    export_weights(made.prepared, tmp_path / "model.safetensors")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(made.task.model.state_dict()) - {"second.weight"}


def test_equal_weights_give_equal_bytes(ready, tmp_path):
    files = [tmp_path / "one", tmp_path / "other"]
    for file in files:
        export_weights(ready().prepared, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_that_was_there_is_replaced_whole(ready, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("older")
    export_weights(ready().prepared, path)
    assert load_file(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_is_not_there_is_said(ready, tmp_path):
    with pytest.raises(CheckpointError, match="the last checkpoint holds the same weights"):
        export_weights(ready().prepared, tmp_path / "missing" / "model.safetensors")


def test_a_task_writes_its_own_files_after_the_weights(ready, tmp_path):
    def write(folder, prepared):
        assert (folder / "model.safetensors").exists()
        (folder / "own.txt").write_text("mine")

    made = ready(steps=2).but(write_results=write)
    list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert (tmp_path / "own.txt").read_text() == "mine"
    assert results_are_whole(tmp_path, step=2)
    assert not results_are_whole(tmp_path, step=4)
    (tmp_path / "own.txt").write_text("thei")
    assert not results_are_whole(tmp_path, step=2)


def test_a_task_that_fails_at_its_files_keeps_the_weights_and_is_named(ready, tmp_path):
    def fail(folder, prepared):
        raise ZeroDivisionError

    made = ready(steps=2).but(write_results=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        list(train_loop(made.prepared, made.task, made.recipe, folder=tmp_path))
    assert load_file(tmp_path / "model.safetensors")
    (note,) = caught.value.__notes__
    assert note.startswith("This was write_results of the task (the weights are safe in")
    assert not results_are_whole(tmp_path, step=2)  # so that a resumed run does it again
