"""Signals of a language model: what its MLPs put out, or what their down projections are given.

The model runs without gradients and without dropout; rows of padding are left out; what was added
to listen is gone after every batch.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.ica.arguments import check_site, check_type, check_whole
from narrowcast.workloads.sft.ica.blocks import find_blocks
from narrowcast.workloads.sft.ica.networks import Layout, Site


@final
class ModelSignals:
    """The channels of chosen layers, side by side, for each token of some batches."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        layers: Sequence[int] | None = None,
        site: Site = "mlp_output",
        skip_first: int = 0,
    ) -> None:
        """Take batches that can be gone through again: a list or a data loader, no generator.

        A batch is what the model is called with; `attention_mask`, if there is one, is 0 at
        padding. The first `skip_first` tokens of each sequence are left out; sequences packed in
        one row are told apart by `position_ids`.
        """
        check_whole("skip_first", skip_first, least=0)
        check_site(site)
        if isinstance(batches, Mapping | Tensor) or not isinstance(batches, Iterable):
            raise ConfigError(
                f"batches must be a list of what the model is called with, got a "
                f"{type(batches).__name__}. Write [{{'input_ids': ids}}]."
            )
        if iter(batches) is batches:
            raise ConfigError("batches can be iterated only once. Pass a list or a data loader.")
        blocks = find_blocks(model)
        chosen = tuple(range(blocks.depth)) if layers is None else tuple(layers)
        for layer in chosen:
            check_whole("a layer", layer, least=0)
        self.layout = Layout(layers=chosen, width=blocks.width(site), depth=blocks.depth, site=site)
        self._model, self._batches, self._skip_first = model, batches, skip_first
        self._blocks = [blocks.blocks[layer] for layer in chosen]

    @property
    def channels(self) -> int:
        """Channels of all chosen layers."""
        return len(self._blocks) * self.layout.width

    @property
    def dtype(self) -> torch.dtype:
        """That of the model, as far as it has one."""
        return next(p.dtype for p in self._model.parameters() if p.is_floating_point())

    def __iter__(self) -> Iterator[Tensor]:
        rows = 0
        for batch in self._batches:
            check_type("a batch", batch, Mapping, "a mapping such as {'input_ids': ids}")
            chunk = self._signal_rows(batch)
            rows += len(chunk)
            yield chunk
        if self._skip_first and not rows:
            raise ConfigError(
                f"No sequence has more than skip_first={self._skip_first} tokens. Write a smaller "
                "skip_first, or give longer sequences."
            )

    def _signal_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        device = next(self._model.parameters()).device
        settings = {name: value.to(device) for name, value in batch.items()}
        heard: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(in_eval_mode(self._model))
            # A compiled model would not notice that somebody listens.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for location, block in enumerate(self._blocks):
                stack.callback(self._listen(block, location, heard).remove)
            self._model(**settings)
        if len(heard) < len(self._blocks):
            raise ConfigError(
                f"{len(self._blocks) - len(heard)} of {len(self._blocks)} layers were not run by "
                "the model. Select layers that are run."
            )
        here = heard[0].device  # a model may be spread over several
        rows = torch.cat([heard[i].to(here) for i in range(len(heard))], dim=-1)
        return rows[_counted(rows, settings, self._skip_first)]

    def _listen(self, block: Any, position: int, heard: dict[int, Tensor]) -> Any:
        if self.layout.site == "mlp_output":
            return block.output.register_forward_hook(
                lambda _module, _args, output: _keep(heard, position, output)
            )
        return block.down.module.register_forward_pre_hook(
            lambda _module, args: _keep(heard, position, args[0])
        )


def _keep(heard: dict[int, Tensor], location: int, value: Tensor) -> None:
    heard[location] = value.detach()


def _counted(rows: Tensor, batch: Mapping[str, Tensor], skip_first: int) -> Tensor:
    """Return which tokens are neither padding nor among the first of their sequence."""
    mask = batch.get("attention_mask")
    tokens = rows.new_ones(rows.shape[:-1], dtype=torch.bool)
    if mask is not None and mask.dim() == 2:
        tokens = mask.bool().to(rows.device)
    if not skip_first:
        return tokens
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2:
        positions = tokens.cumsum(-1) - 1
    return tokens & (positions.to(rows.device) >= skip_first)
