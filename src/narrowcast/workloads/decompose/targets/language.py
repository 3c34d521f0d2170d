"""Language models that are decomposed, and the text they are decomposed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.plain_files import expand_path
from narrowcast.runs.folder import RESOLVED
from narrowcast.workloads.decompose.targets.check import check_language
from narrowcast.workloads.decompose.targets.pretrained import find_model
from narrowcast.workloads.decompose.targets.trained_here import find_run
from narrowcast.workloads.decompose.targets.windows import ChosenWindows, split

CHECKED_WINDOWS = 4
"""Held-out windows that a model is asked about before it is decomposed."""


@final
@dataclass(frozen=True, kw_only=True)
class Language:
    """A trained language model, frozen, and windows of text."""

    name: str
    target: nn.Module
    """Takes tokens (batch, length); in fp32, on its device."""
    output: str | None
    """The attribute of its result that is its logits; none: the result is."""
    vocabulary: int
    train: ChosenWindows
    held_out: ChosenWindows
    digest: str
    """Another one for other text."""
    cross_entropy: float
    """Nats a token on a few held-out windows."""


def language_target(
    name: str, *, text: Sequence[str], length: int, device: torch.device | str
) -> Language:
    """Load a language model and its text, and refuse one that never trained; waits for the device.

    `text` are files, by path or glob; for a run of this library none means the run's own. On the
    meta device only the model's shapes count, and no text is read.
    """
    device, path = torch.device(device), expand_path(name)
    if (path / RESOLVED).is_file():
        result = find_run(name, path, text=text, length=length, device=device)
    else:
        result = find_model(name, path, text=text, length=length, device=device)
    target = result.model.requires_grad_(False).eval()
    train, held_out = split(result.windows)
    cross_entropy = 0.0
    if device.type != "meta":
        target = target.to(device)
        cross_entropy = _cross_entropy(target, result.output, held_out, device)
        check_language(name, cross_entropy=cross_entropy, vocabulary=result.vocabulary)
    return Language(
        name=name,
        target=target,
        output=result.output,
        vocabulary=result.vocabulary,
        train=train,
        held_out=held_out,
        digest=result.digest,
        cross_entropy=cross_entropy,
    )


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first of a row: (batch, length - 1), fp32."""
    flat = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return flat.view(tokens.shape[0], -1)


@torch.no_grad()
def _cross_entropy(
    target: nn.Module, output: str | None, windows: ChosenWindows, device: torch.device
) -> float:
    numbers = list(range(min(CHECKED_WINDOWS, len(windows))))
    tokens = windows.__getitems__(numbers).to(device)
    raw = target(tokens)
    logits = raw if output is None else getattr(raw, output)
    return next_token_losses(logits, tokens).double().mean().item()
