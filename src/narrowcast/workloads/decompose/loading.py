"""A finished decomposition as a model that runs with any mask."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError
from torch import Tensor

from narrowcast.config import from_resolved
from narrowcast.config.problems import shown_path
from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.plain_files import expand_path
from narrowcast.runs.folder import RESOLVED, RunFolder
from narrowcast.workloads.decompose.build import Subject, build_parts
from narrowcast.workloads.decompose.component_files import (
    COMPONENTS,
    SITES,
    changed_sites,
    load_components,
    read_tensors,
)
from narrowcast.workloads.decompose.components.decomposition import Passed
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.judging import judge, mean_measures
from narrowcast.workloads.decompose.model import DecompositionModel
from narrowcast.workloads.decompose.settings import EvalTasksSection

Masks = float | Mapping[str, Tensor | float] | Collection[str]
"""One number for all components, numbers per site, or the names of the components that are on."""


@final
class Decomposed:
    """A decomposed network: call it with masks. `load` returns one.

    Components are named `SITE:NUMBER`, such as `linear1:3`. Weights are frozen, so gradients only
    reach masks and inputs.
    """

    def __init__(
        self, model: DecompositionModel, *, subject: Subject, recipe: Recipe, alive: list[Tensor]
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.subject, self.recipe = subject, recipe
        self._sites = model.decomposition.sites
        self._alive = alive

    @property
    def sites(self) -> dict[str, int]:
        """The number of components of each site."""
        return {site.name: site.components for site in self._sites}

    @property
    def alive(self) -> dict[str, Tensor]:
        """Which components were alive at the end of the run, bool of (seeds, C) per site."""
        return {site.name: each for site, each in zip(self._sites, self._alive, strict=True)}

    def components(self, site: str) -> tuple[Tensor, Tensor]:
        """Return V, (seeds, d_in, C), and U, (seeds, C, d_out), of a site."""
        self._index(site)
        each = self.model.decomposition.components[site]
        return each.V, each.U

    def batch(self, number: int = 0, *, size: int = 8) -> Tensor:
        """Return held-out windows of tokens (size, length), or samples of a toy."""
        return self.subject.judged_on(number, size)

    def importances(self, x: Tensor) -> dict[str, Tensor]:
        """Return the causal importance of each component at each position, (..., C) per site."""
        step = self.model(x)
        names = (site.name for site in self._sites)
        lead = self._lead(x)
        return {
            name: each.reshape(*lead, each.shape[-1])
            for name, each in zip(names, step.lower, strict=True)
        }

    def __call__(
        self,
        x: Tensor,
        *,
        masks: Masks | None = None,
        off: Collection[str] = (),
        delta: float | None = None,
    ) -> Tensor:
        """Return the output of the network.

        Args:
            x: Tokens (batch, length), or the features of a toy (seeds, batch, features).
            masks: One number for all components, or a number or tensor per site that broadcasts to
                (..., C). Sites that are left out compute as in the target. A list of names turns
                these components on, and all others of all sites off. None: the target.
            off: Names of components to turn off; multiplies their masks by 0.
            delta: Share of the weight that the components do not explain. By default 0 with
                `masks`, and 1 without, so that `off` alone removes only these components.

        Raises:
            ConfigError: A name does not exist, or a mask has another shape.
        """
        chosen = self._masks(x, masks, off)
        share = (1.0 if masks is None else 0.0) if delta is None else float(delta)
        passed: Passed = self.model.decomposition(
            x, masks=[None if each is None else SiteMask(each, 0.0, share) for each in chosen]
        )
        return passed.output

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the run's last evaluation, computed again in fp32."""
        with preserve_rng(self._device):
            result = judge(self.model, self.subject, self.recipe)
        return mean_measures(result, self.recipe.section(EvalTasksSection).groups)

    @property
    def _device(self) -> torch.device:
        return self.model.decomposition.module(self._sites[0]).weight.device

    def _lead(self, x: Tensor) -> torch.Size:
        return x.shape[:-1] if x.is_floating_point() else x.shape

    def _masks(self, x: Tensor, masks: Masks | None, off: Collection[str]) -> list[Tensor | None]:
        """Return the mask of each site, (seeds, rows, C), or None where the target computes."""
        if isinstance(masks, int | float):
            masks = dict.fromkeys(self.sites, float(masks))
        elif masks is not None and not isinstance(masks, Mapping):
            masks = self._only(masks)
        lead = self._lead(x)
        result: list[Tensor | None] = [None] * len(self._sites)
        for name, value in (masks or {}).items():
            index = self._index(name)
            result[index] = self._shaped(name, value, (*lead, self._sites[index].components))
        for index, numbers in self._by_site(off).items():
            count = self._sites[index].components
            mask = result[index]
            if mask is None:
                mask = torch.ones(self.model.seeds, lead.numel() // self.model.seeds, count,
                                  device=self._device)  # fmt: skip
            keep = torch.ones(count, device=self._device)
            keep[numbers] = 0.0
            result[index] = mask * keep
        return result

    def _shaped(self, name: str, value: Tensor | float, shape: tuple[int, ...]) -> Tensor:
        mask = torch.as_tensor(value, dtype=torch.float32, device=self._device)
        try:
            return mask.expand(shape).reshape(self.model.seeds, -1, shape[-1])
        except RuntimeError:
            raise ConfigError(
                f"The mask of {name} must broadcast to {shape}, got {tuple(mask.shape)}. Write one "
                f"number per component, ({shape[-1]},), or a number for each position too."
            ) from None

    def _only(self, names: Collection[str]) -> dict[str, Tensor]:
        masks = {name: torch.zeros(count) for name, count in self.sites.items()}
        for index, numbers in self._by_site(names).items():
            masks[self._sites[index].name][numbers] = 1.0
        return masks

    def _by_site(self, names: Collection[str]) -> dict[int, list[int]]:
        """Return the numbers of components by site, from names such as `linear1:3`."""
        if isinstance(names, str):
            raise ConfigError(
                f"Components must be a list of names, got {names!r}. Write [{names!r}]."
            )
        result: dict[int, list[int]] = {}
        for name in names:
            site, _, number = name.rpartition(":")
            index = self._index(site, of=name)
            count = self._sites[index].components
            if not (number.isascii() and number.isdigit() and int(number) < count):
                raise ConfigError(
                    f"{site} has components 0 to {count - 1}, got {name!r}. Write e.g. {site}:0."
                )
            result.setdefault(index, []).append(int(number))
        return result

    def _index(self, site: str, *, of: str | None = None) -> int:
        names = [*self.sites]
        if site not in names:
            shown = ", ".join(names[:8]) + ", …" * (len(names) > 8)
            wrong = site if of is None else of
            raise ConfigError(
                f"The decomposition has no site of this name, got {wrong!r}. Its sites are "
                f"{shown}, and a component is e.g. {names[0]}:0."
            )
        return names.index(site)


def load(
    run: str | Path, overrides: Iterable[str] = (), *, device: str | torch.device = "cpu"
) -> Decomposed:
    """Load a finished decomposition.

    Args:
        run: Folder of a finished `decompose` run.
        overrides: Settings as KEY=VALUE, such as `model.path=FOLDER` if the target has moved, or
            `data.text=[FILE]` for other text.
        device: Where it runs: cpu, cuda, cuda:1 or auto.

    Raises:
        ConfigError: The run is not a finished decomposition.
        CheckpointError: Files are damaged, or the target has changed.
        UnsupportedError: The device does not exist here.
    """
    path = expand_path(str(run))
    recipe = _recipe(path, overrides)
    file = path / COMPONENTS
    if not file.is_file():
        raise ConfigError(
            f"{shown_path(file)} does not exist. Give the folder of a finished decompose run."
        )
    hardware = detect_hardware(str(device))  # raises if it is not available
    device = torch.device(hardware.device if str(device) == "auto" else device)
    parts = build_parts(recipe, device=device, trained=False)
    try:
        tensors, known = read_tensors(file)
        load_components(parts, tensors)
        sites = parts.model.decomposition.sites
        alive = [tensors[f"{SITES}{site.name}/alive"].to(device) for site in sites]
    except (SafetensorError, OSError, LookupError, RuntimeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{shown_path(file)} is damaged: {error}.") from error
    if changed := changed_sites(parts, known):
        raise CheckpointError(
            f"{changed[0]} has other weights than when it was decomposed. Restore the target of "
            "the run, or write model.path=FOLDER."
        )
    return Decomposed(parts.model, subject=parts.subject, recipe=recipe, alive=alive)


def _recipe(path: Path, overrides: Iterable[str]) -> Recipe:
    from narrowcast.workloads import workload_sections

    with RunFolder.open(path, needs=(RESOLVED,)) as folder:
        resolved = folder.read_json(RESOLVED)
    workload = resolved.get("workload", {}).get("value")
    if workload != "decompose":
        raise ConfigError(
            f"{shown_path(path)} is a run of workload {workload}. Give a run of decompose."
        )
    return from_resolved(resolved, overrides, sections=workload_sections).recipe
