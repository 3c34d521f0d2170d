"""The components of a finished run: one file, without the target that they were taken from."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads.decompose.build import Parts
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.matching import Components
from narrowcast.workloads.decompose.judging import DecompositionResult
from narrowcast.workloads.decompose.targets.language import Language

COMPONENTS = "components.safetensors"
SITES = "sites/"
"""Before the name of a site, and after it what is kept of it: V, U or alive."""
TARGETS = "targets"
"""In the file's metadata: the fingerprints of the weights of each site, one per seed."""
IMPORTANCE, TARGET = "importance.", "decomposition.target."


def save_components(
    folder: Path, weights: Mapping[str, Tensor], result: DecompositionResult, parts: Parts
) -> None:
    """Write V, U and which components are alive, by site; importance functions; a toy's target.

    A language model is where it was. The file appears whole or not at all.
    """
    components = parts.model.decomposition.components
    full = {id(p): weights[name] for name, p in parts.model.named_parameters()}
    stored: dict[str, Tensor] = {}
    for each in result.sites:
        name = f"{SITES}{each.site.name}/"
        stored[f"{name}V"], stored[f"{name}U"] = components[each.site.name].pair(full)
        stored[f"{name}alive"] = each.living
    for name, weight in weights.items():
        own = name.startswith(TARGET)
        if name.startswith(IMPORTANCE) or (own and not isinstance(parts.subject, Language)):
            stored[name] = weight
    # A copy of each: what is tied, or a view of another, would be refused.
    plain = {name: each.detach().cpu().contiguous().clone() for name, each in stored.items()}
    unfinished = folder / f".{COMPONENTS}.unfinished"
    targets = {each.site.name: _fingerprints(each.site, parts) for each in result.sites}
    save_file(plain, unfinished, metadata={TARGETS: json.dumps(targets)})
    unfinished.replace(folder / COMPONENTS)


def _fingerprints(site: Site, parts: Parts) -> list[str]:
    """Return a hash of the matrix of a site for each seed; seeds of a toy have their own."""
    weight = parts.model.decomposition.module(site).weight_t.detach().float().cpu()
    every = weight.expand(parts.model.seeds, -1, -1)
    return [hashlib.sha256(each.contiguous().numpy().tobytes()).hexdigest() for each in every]


def read_components(folder: Path, *, seed: int = 0) -> dict[str, Components]:
    """Return the components of every site of a finished run, of one of its seeds."""
    path = folder / COMPONENTS
    if not path.is_file():
        raise ConfigError(
            f"{shown_path(path)} does not exist. Give the folder of a finished decompose run."
        )
    try:
        with safe_open(path, framework="pt") as file:
            names = [key.removeprefix(SITES)[:-2] for key in file.keys() if key.endswith("/V")]  # noqa: SIM118
            seeds = file.get_slice(f"{SITES}{names[0]}/V").get_shape()[0]
            if seed >= seeds:
                raise ConfigError(
                    f"seed must be below {seeds}, the number of seeds of {shown_path(folder)}, got "
                    f"{seed}."
                )
            targets = json.loads((file.metadata() or {}).get(TARGETS, "{}"))
            if missing := [name for name in names if name not in targets]:
                raise CheckpointError(
                    f"{shown_path(path)} has no fingerprint of the target of {missing[0]}. Train "
                    "this decomposition again."
                )
            return {
                name: Components(
                    v=file.get_tensor(f"{SITES}{name}/V")[seed],
                    u=file.get_tensor(f"{SITES}{name}/U")[seed],
                    alive=file.get_tensor(f"{SITES}{name}/alive")[seed],
                    target=targets[name][seed],
                )
                for name in names
            }
    except (SafetensorError, OSError, LookupError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{shown_path(path)} is damaged: {error}.") from error
