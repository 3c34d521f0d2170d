"""What a finished run leaves: its weights in one safetensors file, and the files of its task."""

from pathlib import Path

from narrowcast.errors import blamed_on
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs.writing import written_beside
from narrowcast.training.checkpoints.tensor_file import write_tensors
from narrowcast.training.checkpoints.tree import flatten
from narrowcast.training.task import Task

WEIGHTS = "model.safetensors"
PENDING = "results.pending"
"""There while a task writes its own files; where it is left, they are not whole."""


def write_results(prepared: Prepared, task: Task, folder: Path) -> None:
    """Write the weights to `folder`, and then whatever else the task has to leave.

    Where the task fails at that, the weights are there, and `narrowcast resume` tries it again.
    """
    if task.write_results is not None:
        (folder / PENDING).touch()
    export_weights(prepared, folder / WEIGHTS)
    if task.write_results is None:
        return
    with blamed_on(
        f"write_results of the task; the weights are safe in {folder / WEIGHTS}. Once it is "
        f"repaired, `narrowcast resume {folder}` writes the rest"
    ):
        task.write_results(folder, prepared)
    (folder / PENDING).unlink()


def export_weights(prepared: Prepared, path: Path) -> None:
    """Write the state of the model, every weight with all its digits, to `path`.

    The names are those of the model's own `state_dict`. Of tied weights the file has the first, as
    `safetensors.torch.load_model` expects it. Equal weights give equal bytes.
    """
    first: dict[int, str] = {}
    tied = {
        name
        for name, parameter in prepared.model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
    weights = prepared.full_weights()
    _, tensors = flatten({name: weights[name] for name in weights if name not in tied})
    with written_beside(path, hint="the last checkpoint holds the same weights") as beside:
        write_tensors(beside, tensors, metadata={"format": "pt"})
