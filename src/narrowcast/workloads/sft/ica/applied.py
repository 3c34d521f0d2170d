"""Functional networks in a run, found before its first step or loaded from its checkpoint."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs.writing import replace_file
from narrowcast.training.task import Hook
from narrowcast.workloads.sft.ica.blocks import Blocks, find_blocks
from narrowcast.workloads.sft.ica.entry import functional_networks
from narrowcast.workloads.sft.ica.freeze import Freeze
from narrowcast.workloads.sft.ica.ica import ICA
from narrowcast.workloads.sft.ica.masks import Masks
from narrowcast.workloads.sft.ica.networks import (
    Channels,
    FunctionalNetworks,
    Provenance,
    Site,
    parse_layers,
)
from narrowcast.workloads.sft.ica.networks_file import (
    load_networks,
    networks_from_json,
    networks_to_json,
    save_networks,
)
from narrowcast.workloads.sft.ica.page import MASKED, NETWORKS
from narrowcast.workloads.sft.ica.selection import selector_from
from narrowcast.workloads.sft.ica.settings import IcaSection


@final
class Applied:
    """Networks of a model in a run: the task adds `hook` and calls `write` at the end."""

    def __init__(
        self,
        model: nn.Module,
        section: IcaSection,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        seed: int,
        provenance: Provenance = Provenance(),  # noqa: B008  # frozen
    ) -> None:
        """Check the section; `batches`, training rows, are read when the run starts."""
        self._model, self._section, self._batches = model, section, batches
        self._seed, self._provenance = seed, provenance
        self._blocks = find_blocks(model)
        self._layers = parse_layers(section.ica_mask_layers, self._blocks.depth)
        self._template = _template(section, self._blocks)
        self.networks: FunctionalNetworks | None = None
        """None before the run begins."""
        # Before anything is compiled or captured; factors are changed in place.
        on_device = next(model.parameters()).device.type != "meta"
        masked = section.mode is not None and on_device
        self.masks = Masks(model, site=self.site) if masked else None
        self._freeze: Freeze | None = None

    @property
    def site(self) -> Site:
        return self._section.site if self._template is None else self._template.layout.site

    @property
    def hook(self) -> Hook:
        return Hook(
            name="functional networks",
            one_rank=True,
            before_first_step=self._begin,
            after_step=self._after_step,
            state_dict=self._state,
            load_state_dict=self._resume,
            notices=self.notices,
        )

    def notices(self) -> list[str]:
        """Return the number of channels and the findings."""
        if self.networks is None:
            return []
        count = sum(map(len, self._channels().values()))
        total = len(self._layers) * self.networks.layout.width
        taken = f"{self._named}: {count:,} of {total:,} channels"
        findings = self.networks.provenance.findings
        return [taken, *(f"functional networks: {finding}" for finding in findings)]

    @property
    def _named(self) -> str:
        ids = self._section.component_ids
        return f"networks of component{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"

    def lines(self) -> list[str]:
        """Return notes on what the run will do."""
        section = self._section
        where = "found when the run starts"
        if self._template is not None:
            where = f"from {section.ica_template_path}"
        lines = [f"{self._named}: {where}"]
        terms = {"lesion": "silenced", "preserve": "kept alone", "scale": "multiplied"}
        if section.mode is not None:
            note = f" (mask_mode={section.mask_mode} is an old name of {section.mode})"
            lines.append(
                f"their channels are {terms[section.mode]} in training and evaluation, but not in "
                f"the saved model{note if section.mask_mode != section.mode else ''}"
            )
        if section.freezes:
            lines.append("their weight rows are frozen")
        return lines

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Disable the masks inside the block."""
        if self.masks is None:
            yield
            return
        self.masks.clear()
        try:
            yield
        finally:
            self._mask()

    def write(
        self, folder: Path, evaluate: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """Write the networks, and metrics with and without masks, to the run folder."""
        assert self.networks is not None
        save_networks(self.networks, folder / NETWORKS)
        if self.masks is None or evaluate is None:
            return
        masked = dict(evaluate())
        with self.lifted():
            lifted = dict(evaluate())
        measured = {"mode": self._section.mode, "masked": masked, "lifted": lifted}
        replace_file(folder / MASKED, (json.dumps(measured, indent=1) + "\n").encode())

    def _begin(self, prepared: Prepared) -> None:
        self._take(self._template or self._find_networks(prepared))
        if self._section.freezes:
            self._freeze = Freeze(self._model, self._channels(), site=self.site)
            self._freeze.take(prepared)

    def _find_networks(self, prepared: Prepared) -> FunctionalNetworks:
        section = self._section
        ica = ICA(
            components=section.ica_components,
            ica_dtype=section.ica_dtype,
            max_iter=section.max_iter,
            clip_activations=section.clip_activations,
            seed=self._seed,
        )
        with prepared.autocast():
            return functional_networks(
                self._model,
                self._batches,
                ica=ica,
                selector=selector_from(
                    percentile=section.ica_percentile,
                    zscore=section.ica_zscore,
                    top_k=section.ica_top_k,
                    two_sided=section.ica_two_sided,
                ),
                layers=self._layers,
                site=section.site,
                skip_first=section.skip_first,
                provenance=self._provenance,
            )

    def _take(self, networks: FunctionalNetworks) -> None:
        self.networks = networks
        self._mask()

    def _mask(self) -> None:
        if self.masks is None or self.networks is None:
            return
        masks, channels = self.masks.clear(), self._channels()
        match self._section.mode:
            case "lesion":
                masks.lesion(channels)
            case "preserve":
                others = self.networks.others(channels)
                masks.lesion({layer: others[layer] for layer in self._layers if layer in others})
            case "scale":
                assert self._section.scale is not None
                masks.scale(channels, self._section.scale)

    def _channels(self) -> Channels:
        assert self.networks is not None
        return self.networks.channels(self._section.component_ids, layers=self._layers)

    def _after_step(self, prepared: Prepared, _applied: Tensor) -> None:
        if self._freeze is not None:
            self._freeze.restore_in(prepared)

    def _state(self) -> dict[str, Any]:
        assert self.networks is not None
        frozen = {} if self._freeze is None else self._freeze.state_dict()
        return {"networks": networks_to_json(self.networks), "frozen": frozen}

    def _resume(self, state: dict[str, Any]) -> None:
        networks = networks_from_json(state["networks"])
        if self._template is not None and networks != self._template:
            raise CheckpointError(
                f"The networks in {self._section.ica_template_path} changed since the run started. "
                "Restore that file, or start a new run."
            )
        _check_blocks(networks, self._blocks)
        self._take(networks)
        if self._section.freezes:
            self._freeze = Freeze.resumed(
                self._model, self._channels(), state["frozen"], site=self.site
            )


def _template(section: IcaSection, blocks: Blocks) -> FunctionalNetworks | None:
    """Load the networks file of a recipe and check that its components exist."""
    ids = section.component_ids
    if section.ica_template_path is None:
        layers = len(parse_layers(section.ica_mask_layers, blocks.depth))
        count = section.ica_components * (1 if section.site == "mlp_output" else layers)
        if strange := [number for number in ids if number >= count]:
            raise ConfigError(
                f"ica.ica_component_ids must be between 0 and {count - 1}, got {strange[0]}. Write "
                "one of these, or more ica.ica_components."
            )
        return None
    networks = load_networks(Path(section.ica_template_path).expanduser())
    _check_blocks(networks, blocks)
    networks.channels(ids)  # raises for components that do not exist
    return networks


def _check_blocks(networks: FunctionalNetworks, blocks: Blocks) -> None:
    networks.require_fit(depth=blocks.depth, width=blocks.width(networks.layout.site))


def sampled(data: Any, count: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Return rows of `Packs` drawn by the seed, one per batch and without padding."""
    rows = data.rows
    generator = torch.Generator().manual_seed(seed)
    drawn = sorted(torch.randperm(len(rows), generator=generator)[:count].tolist())
    return [{"input_ids": torch.tensor(rows.row(number)[0])[None].long()} for number in drawn]
