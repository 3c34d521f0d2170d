"""The trained weights in one safetensors file that any PyTorch program can load."""

from pathlib import Path

from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.checkpoints.files import write_tensors, written_beside
from narrowcast.training.checkpoints.tree import flatten


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
