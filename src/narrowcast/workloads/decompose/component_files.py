"""The components of a finished run: one file, without the target that they were taken from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.workloads.decompose.build import Parts
from narrowcast.workloads.decompose.components.decomposition import Components as SiteComponents
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.toy_table import unit
from narrowcast.workloads.decompose.judging import DecompositionResult
from narrowcast.workloads.decompose.targets.language import Language

COMPONENTS = "components.safetensors"
SITES = "sites/"
"""Before the name of a site, and after it what is kept of it: V, U or alive."""
TARGETS = "targets"
"""In the file's metadata: the fingerprints of the weights of each site, one per seed."""
IMPORTANCE, TARGET = "importance.", "decomposition.target."
ALIKE = 0.9
"""A component was found again in the other run where its best cosine is above."""


@final
@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a site in one run: V (d_in, C), U (C, d_out), and which are alive (C)."""

    v: Tensor
    u: Tensor
    alive: Tensor
    target: str = ""
    """Fingerprint of the matrix that they were taken from."""


def save_components(
    folder: Path, weights: Mapping[str, Tensor], result: DecompositionResult, parts: Parts
) -> None:
    """Write V, U and alive components by site, importance functions, and a toy's target."""
    components = parts.model.decomposition.components
    full = {id(p): weights[name] for name, p in parts.model.named_parameters()}
    stored: dict[str, Tensor] = {}
    for each in result.sites:
        name = f"{SITES}{each.site.name}/"
        stored[f"{name}V"], stored[f"{name}U"] = components[each.site.name].pair(full)
        stored[f"{name}alive"] = each.living
    for name, weight in weights.items():
        own = name.startswith(TARGET)
        if name.startswith(IMPORTANCE) or (own and not _is_language(parts)):
            stored[name] = weight
    # A copy of each: what is tied, or a view of another, would be refused.
    plain = {name: each.detach().cpu().contiguous().clone() for name, each in stored.items()}
    unfinished = folder / f".{COMPONENTS}.unfinished"
    targets = {each.site.name: fingerprints(each.site, parts) for each in result.sites}
    save_file(plain, unfinished, metadata={TARGETS: json.dumps(targets)})
    unfinished.replace(folder / COMPONENTS)


def fingerprints(site: Site, parts: Parts) -> list[str]:
    """Return a hash of the matrix of a site, per seed."""
    weight = parts.model.decomposition.module(site).weight_t.detach().float().cpu()
    every = weight.expand(parts.model.seeds, -1, -1)
    return [hashlib.sha256(each.contiguous().numpy().tobytes()).hexdigest() for each in every]


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return all tensors of a file, and the fingerprints of the target by site."""
    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return tensors, json.loads((stored.metadata() or {}).get(TARGETS, "{}"))


def changed_sites(parts: Parts, known: Mapping[str, list[str]]) -> list[str]:
    """Return the sites whose weights do not have the fingerprints of a file."""
    sites = parts.model.decomposition.sites
    return [site.name for site in sites if known.get(site.name) != fingerprints(site, parts)]


@torch.no_grad()
def load_components(
    parts: Parts, tensors: Mapping[str, Tensor], *, with_target: bool = True
) -> None:
    """Copy components, importance functions and a toy's target into the model."""
    model = parts.model
    wanted: dict[str, Tensor] = {}
    for name, each in model.decomposition.components.items():
        if isinstance(each, SiteComponents):
            wanted |= {f"{SITES}{name}/V": each.V, f"{SITES}{name}/U": each.U}
    own = (IMPORTANCE, TARGET) if with_target and not _is_language(parts) else (IMPORTANCE,)
    wanted |= {name: each for name, each in model.state_dict().items() if name.startswith(own)}
    for name, tensor in wanted.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            shape = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise LookupError(f"{name} must be {tuple(tensor.shape)}, got {shape}")
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])


def start_from(parts: Parts, run: str) -> None:
    """Begin with the components and importance functions of a finished run."""
    file = expand_path(run) / COMPONENTS
    if not file.is_file():
        raise ConfigError(
            f"decomposition.start_from={run} has no {COMPONENTS}. Give the folder of a finished "
            "decompose run."
        )
    try:
        tensors, known = read_tensors(file)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{shown_path(file)} is damaged: {error}.") from error
    if changed := changed_sites(parts, known):
        raise ConfigError(
            f"decomposition.start_from={run} has not decomposed these weights of {changed[0]}. "
            "Give a run on the same target with the same sites, and for a toy with the same seed."
        )
    try:
        load_components(parts, tensors, with_target=False)
    except LookupError as error:
        raise ConfigError(
            f"decomposition.start_from={run} has other components or importance functions: "
            f"{error}. Write the sites.components and importance settings of that run."
        ) from error


def _is_language(parts: Parts) -> bool:
    return isinstance(parts.subject, Language)


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


def likeness(
    first: Mapping[str, Components], second: Mapping[str, Components]
) -> list[dict[str, Any]]:
    """Return a row for each site that both have: alive, MMCS and how many are alike, of each."""
    shared = [name for name in first if name in second]
    if not shared:
        raise ConfigError(
            f"The runs have no site in common: {', '.join(first)}; and {', '.join(second)}. "
            "Compare decompositions of the same target."
        )
    rows = []
    for name in shared:
        one, other = first[name], second[name]
        if (one.v.shape[0], one.u.shape[1]) != (other.v.shape[0], other.u.shape[1]):
            raise ConfigError(
                f"{name} is {one.v.shape[0]} x {one.u.shape[1]} in one run and {other.v.shape[0]} "
                f"x {other.u.shape[1]} in the other. Compare decompositions of the same target."
            )
        if one.target != other.target:
            raise ConfigError(
                f"{name} has different weights in the two targets, so its components are not "
                "comparable. Compare decompositions of the same target; each seed of a toy trains "
                "its own target."
            )
        best = compare_runs(one, other)
        rows.append(
            {
                "site": name,
                "alive": [len(each) for each in best],
                "mmcs": [_mean(each) for each in best],
                "found": [int((each > ALIKE).sum()) for each in best],
                "chance": [_mean(each) for each in compare_runs(*_random(one, other))],
            }
        )
    return rows


def agreement(runs: Sequence[Mapping[str, Components]]) -> list[dict[str, Any]]:
    """Return a row per site: how alike the components of several runs are, pair by pair."""
    pairs = [likeness(one, other) for one, other in combinations(runs, 2)]
    shared = set.intersection(*({row["site"] for row in rows} for rows in pairs))
    result = []
    for name in (name for name in runs[0] if name in shared):
        rows = [row for rows in pairs for row in rows if row["site"] == name]
        mmcs = [value for row in rows for value in row["mmcs"]]
        first, others = runs[0][name], [run[name] for run in runs[1:]]
        everywhere = torch.stack([compare_runs(first, each)[0] > ALIKE for each in others]).all(0)
        result.append({
            "site": name,
            "alive": [int(run[name].alive.sum()) for run in runs],
            "mmcs": sum(mmcs) / len(mmcs),
            "lowest": min(mmcs),
            "in_all": int(everywhere.sum()),
            "chance": sum(each for row in rows for each in row["chance"]) / len(mmcs),
        })  # fmt: skip
    return result


def _random(*components: Components) -> list[Components]:
    """Return random components of the same shapes, of which as many are alive."""
    generator = torch.Generator().manual_seed(0)
    return [
        Components(
            v=torch.randn(each.v.shape, generator=generator),
            u=torch.randn(each.u.shape, generator=generator),
            alive=each.alive,
        )
        for each in components
    ]


def _mean(cosines: Tensor) -> float:
    return float(cosines.double().mean()) if len(cosines) else 0.0


def compare_runs(first: Components, second: Components) -> tuple[Tensor, Tensor]:
    """Return the best cosine of each alive component with one of the other run, or 0."""
    cosines = unit(first.v.T) @ unit(second.v.T).T * (unit(first.u) @ unit(second.u).T)
    cosines = cosines[first.alive][:, second.alive]
    if 0 in cosines.shape:
        return cosines.new_zeros(cosines.shape[0]), cosines.new_zeros(cosines.shape[1])
    return cosines.amax(dim=1), cosines.amax(dim=0)
