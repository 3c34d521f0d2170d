"""Text generation with transformers: greedy, or with the saved generation settings."""

import contextlib
import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from narrowcast.errors import ConfigError
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.dtensor import gathered_root
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.models.loading import context_length


def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    ends: Collection[int],
    padding: int,
) -> list[list[int]]:
    """Return greedy continuations up to the first of `ends` or `max_new_tokens`; synchronises."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=padding,
        use_cache=True,
    )
    return _generated(model, prompts, config, batch_size=batch_size, ends=ends)


def generate_as_saved(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    padding: int,
) -> list[list[int]]:
    """Return the tokens after each prompt with the model's generation settings; synchronises."""
    config: Any = copy.deepcopy(model.generation_config)
    config.max_new_tokens, config.num_return_sequences = max_new_tokens, 1
    if config.pad_token_id is None:
        config.pad_token_id = padding
    ends = model_ends(model)
    return _generated(model, prompts, config, batch_size=batch_size, ends=ends)


@torch.no_grad()
def _generated(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    batch_size: int,
    ends: Collection[int],
) -> list[list[int]]:
    most, padding = config.max_new_tokens, config.pad_token_id
    require_room(model, prompts, max_new_tokens=most)
    device = next(model.parameters()).device
    results: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    with (
        preserve_rng(device),
        in_eval_mode(model),
        gathered_root(model),
        _only(config, model),
        _uncompiled(),
    ):
        torch.manual_seed(0)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ids, mask = _filled([prompts[number] for number in chosen], padding, device)
            out: Tensor = model.generate(input_ids=ids, attention_mask=mask)  # type: ignore[operator]
            for number, row in zip(chosen, out[:, ids.shape[1] :].tolist(), strict=True):
                stop = next((at for at, token in enumerate(row) if token in ends), len(row))
                results[number] = row[:stop]
    return [results[number] for number in range(len(prompts))]


def require_room(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> None:
    """Raise for prompts that are empty or too long for the model."""
    room = context_length(model)
    if any(not prompt for prompt in prompts):
        raise ConfigError("The prompt is empty. Give it at least one token.")
    longest = max(map(len, prompts), default=0)
    if room is not None and longest + max_new_tokens > room:
        short = room - longest
        advice = f"Write eval_tasks.max_new_tokens={short}." if short > 0 else "Remove such rows."
        raise ConfigError(
            f"A prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's "
            f"{room} tokens. {advice}"
        )


def model_ends(model: nn.Module) -> frozenset[int]:
    """Return the stop tokens of the model's generation settings."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    match own:
        case int():
            return frozenset({own})
        case list():
            return frozenset(own)
        case _:
            return frozenset()


def set_stop_tokens(model: Any, ends: Sequence[int]) -> None:
    """Add stop tokens to the saved settings of a model."""
    own = model_ends(model)
    if not own.issuperset(ends):
        model.generation_config.eos_token_id = [*ends, *sorted(own.difference(ends))]
        model.config.eos_token_id = ends[0]


def _filled(
    prompts: Sequence[Sequence[int]], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    empty = [width - len(prompt) for prompt in prompts]
    ids = [[padding] * n + list(prompt) for n, prompt in zip(empty, prompts, strict=True)]
    mask = [[0] * n + [1] * (width - n) for n in empty]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextlib.contextmanager
def _only(config: GenerationConfig, model: nn.Module) -> Iterator[None]:
    """Use `config` alone: `generate` takes missing settings from the model's own."""
    owners: list[Any] = [m for m in model.modules() if "generation_config" in vars(m)]
    stored = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = config
    try:
        yield
    finally:
        for owner, own in zip(owners, stored, strict=True):
            owner.generation_config = own


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled blocks eagerly: each new cache length would be compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
