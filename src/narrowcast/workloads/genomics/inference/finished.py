"""Load the network of a finished run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from narrowcast.config.problems import shown_path
from narrowcast.errors import CheckpointError, ConfigError, DivergedError, UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.precision.plan.policy import PRESETS, policy_from
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.workloads.genomics.build import make_network, retokenized
from narrowcast.workloads.genomics.data.examples import Batch, Examples, Ragged, on
from narrowcast.workloads.genomics.data.rows import Row
from narrowcast.workloads.genomics.inference.quantize import WeightsFormat, quantize_weights
from narrowcast.workloads.genomics.models.combined import Combined
from narrowcast.workloads.genomics.models.linear import Linear
from narrowcast.workloads.genomics.models.model import Network
from narrowcast.workloads.genomics.network_info import (
    LINEAR_WEIGHTS,
    PUBLISHED,
    NetworkInfo,
    load_into,
    read_network_info,
    read_run,
    read_weights,
)
from narrowcast.workloads.genomics.published.checkpoint import read_checkpoint
from narrowcast.workloads.genomics.published.transformer import (
    PublishedTokenizer,
    Transformer,
    build_transformer,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS, Alphabet
from narrowcast.workloads.genomics.sequences.tokenizers import Ids, Tokenizer, make_tokenizer
from narrowcast.workloads.genomics.targets import (
    EveryLetter,
    Labels,
    NextToken,
    OneClass,
    Target,
    Value,
)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A trained network on a device, with its tokenizer and policy."""

    name: str
    info: NetworkInfo
    tokenizer: Tokenizer
    target: Target
    network: Network
    device: torch.device
    combined: Combined
    """The network of both strands, and the linear model beside it."""
    prepared: Prepared | None
    """None for plain fp32."""
    published: PublishedTokenizer | None = None
    """The tokenizer of a published transformer."""
    weights_format: WeightsFormat = "full"
    quantized: int = 0
    """Layers whose weights are in 8 bits."""

    @property
    def alphabet(self) -> Alphabet:
        return self.tokenizer.alphabet

    def autocast(self) -> AbstractContextManager[object]:
        """Context manager that computes in the policy's precision."""
        return nullcontext() if self.prepared is None else self.prepared.autocast()

    def answers(self, rows: Sequence[Row]) -> tuple[Tensor, list[Ids]]:
        """Return outputs in fp32 on the CPU, and the tokens of each row. Synchronises."""
        tokens = [self.tokenizer.encode(row.sequence) for row in rows]
        examples = Examples(
            tokens=Ragged.joined(tokens, np.int64),
            alternatives=Ragged.joined(
                [self.tokenizer.encode(row.alternative) for row in rows], np.int64
            )
            if self.info.pairs
            else None,
            targets=None,
            padding=self.tokenizer.pad_id,
        )
        if self.published is not None:
            examples = retokenized(examples, rows, self.published, strands=self.info.both_strands)
        return self.predict_batch(examples.__getitems__(list(range(len(rows)))), rows), tokens

    def predict_batch(self, batch: Batch, rows: Sequence[Row]) -> Tensor:
        """Return the outputs of a batch; raise if they are not finite."""
        there = on(self.device, batch)
        try:
            with torch.no_grad(), self.autocast():
                result = self.combined(there)
            answer: Tensor = result.float().cpu()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UnsupportedError(
                f"{len(rows)} sequences of up to {batch['tokens'].shape[1]:,} tokens do not fit "
                f"into the memory of {self.device}. Write a smaller --batch-size."
            ) from error
        finite = answer.flatten(1).isfinite() if answer.dim() < 3 else answer.isfinite().all(-1)
        finite = finite.all(1) if answer.dim() < 3 else (finite | ~batch["mask"]).all(1)
        if not finite.all():
            row = rows[int((~finite).nonzero()[0, 0])]
            raise DivergedError(
                f"{row.location}: the network returns NaN or inf. Write --policy fp32, or use an "
                "earlier checkpoint."
            )
        return answer


def finished(
    name: str,
    *,
    device: str = "auto",
    policy: str = "fp32",
    weights_format: WeightsFormat = "full",
) -> Finished:
    """Load a finished run from its folder; int8 and e4m3 store most weights in 8 bits."""
    requested = policy_from(policy)
    location = torch.device(detect_hardware(device).device)
    stored, folder = read_network_info(name)
    tokenizer = make_tokenizer(
        stored.tokenizer, ALPHABETS[stored.alphabet], stored.kmer, stored.overlap
    )
    if tokenizer.vocab_size != stored.config.vocab_size:
        raise CheckpointError(
            f"{shown_path(folder)}: the tokenizer has {tokenizer.vocab_size} tokens, but the "
            f"network has {stored.config.vocab_size}. genomics.json is damaged; restore it from a "
            "copy."
        )
    target = _target(stored, tokenizer)
    published = None
    if stored.config.backbone == "published":
        published = read_checkpoint(folder / PUBLISHED, name=name)

    def transformer(place: torch.device) -> Transformer | None:
        return None if published is None else build_transformer(published, device=place)

    weights = read_run(stored, folder)
    meta = torch.device("meta")
    # Shapes first, which take no memory: what a damaged file says may be of any size.
    load_into(
        make_network(stored, tokenizer, target, seed=0, device=meta, transformer=transformer(meta)),
        weights,
        head=True,
    )
    network = make_network(
        stored, tokenizer, target, seed=0, device=location, transformer=transformer(location)
    )
    load_into(network, weights, head=True)
    network.eval()
    quantized = 0
    if weights_format != "full":
        quantized = quantize_weights(network, weights_format)
    prepared = None
    if requested != PRESETS["fp32"]:
        # A policy is of training, so there is an optimizer; nothing moves it.
        idle = torch.optim.SGD(network.parameters(), lr=0.0)
        prepared = prepare(network, idle, policy=requested, lost_updates_every=0)
    return Finished(
        name=name,
        info=stored,
        tokenizer=tokenizer,
        target=target,
        network=network,
        combined=_combined(stored, folder, network, tokenizer, location),
        device=location,
        weights_format=weights_format,
        quantized=quantized,
        prepared=prepared,
        published=None if published is None else PublishedTokenizer(published, tokenizer.alphabet),
    )


def _combined(
    stored: NetworkInfo, folder: Path, network: Network, tokenizer: Tokenizer, device: torch.device
) -> Combined:
    """Return what predicts: the network, and what genomics.json says is beside it."""
    linear = None
    if stored.linear is not None:
        weights = read_weights(folder, LINEAR_WEIGHTS)
        linear = Linear(stored.linear, weights["bias"].numel())
        own = linear.state_dict()
        if {key: value.shape for key, value in own.items()} != {
            key: value.shape for key, value in weights.items()
        }:
            raise CheckpointError(
                f"{shown_path(folder / LINEAR_WEIGHTS)} does not match genomics.json. Restore both "
                "from a copy."
            )
        linear.load_state_dict(weights)
    complement = None
    if stored.both_strands and stored.config.backbone != "published":
        assert tokenizer.complement is not None
        complement = torch.from_numpy(tokenizer.complement)
    combined = Combined(network, linear=linear, mix=stored.mix, complement=complement)
    return combined.to(device).eval()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out; torch has no error class for the host's."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def require_target(run: Finished, *, writes: bool, instead: str) -> None:
    """Check that a run was, or was not, trained to generate."""
    if isinstance(run.target, NextToken) != writes:
        raise ConfigError(
            f"{run.name} was trained for {run.info.task}, which this command does not support. "
            f"{instead}"
        )


def _target(saved: NetworkInfo, tokenizer: Tokenizer) -> Target:
    match saved.task, saved.target:
        case "generation", _:
            return NextToken(vocab_size=tokenizer.vocab_size, unknown=tokenizer.unknown_id)
        case "annotation", _:
            return EveryLetter(classes=saved.classes)
        case _, "value":
            return Value(centre=saved.centre, spread=saved.spread)
        case _, "labels":
            return Labels(classes=saved.classes)
        case _:
            return OneClass(classes=saved.classes)
