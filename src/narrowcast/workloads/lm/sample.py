"""Text out of a model: one token at a time, drawn from what it predicts or always the likeliest."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, DivergedError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.lm.text import Tokenizer


def sample(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    count: int,
    context: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocab: int | None = None,
) -> Iterator[int]:
    """Yield `count` tokens after `prompt`, drawn on the CPU; synchronises at every token."""
    if not prompt:
        raise ConfigError("The prompt is empty. Write at least one character.")
    if temperature < 0:
        raise ConfigError(f"temperature must be 0 (greedy) or more, got {temperature}.")
    if top_k is not None and top_k < 1:
        raise ConfigError(
            f"top_k must be 1 or more, got {top_k}. Leave it out to sample from all tokens."
        )
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad(), in_eval_mode(model):
            logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1, :vocab]
        tokens.append(_draw(logits.float().cpu(), temperature, top_k=top_k, generator=generator))
        yield tokens[-1]


def complete(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    count: int,
    context: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> str:
    """Return the text of `count` tokens that `model` writes after `prompt`."""
    drawn = sample(
        model,
        tokenizer.encode(prompt).tolist(),
        count=count,
        context=context,
        generator=torch.Generator().manual_seed(seed),
        temperature=temperature,
        top_k=top_k,
        vocab=tokenizer.size,
    )
    return tokenizer.decode(list(drawn))


@torch.no_grad()
def continue_all(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    seed: int,
    temperature: float,
    vocab: int,
) -> list[list[int]]:
    """Return `count` tokens after each prompt, all prompts in one batch; synchronises at each.

    Every pass has the same shape: what is still empty lies behind what the model reads. Draws on
    the CPU from its own generator. Ends early where the model predicts NaN or inf.
    """
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    ends = [len(prompt) for prompt in prompts]
    tokens = torch.zeros((len(prompts), max(ends) + count), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    at = torch.tensor(ends) - 1
    drawn = 0
    while drawn < count:
        logits = model(tokens.to(device))[range(len(prompts)), at.to(device), :vocab].float().cpu()
        if not logits.isfinite().all():
            break
        at, drawn = at + 1, drawn + 1
        for row, i, each in zip(tokens, at.tolist(), logits, strict=True):
            row[i] = _draw(each, temperature, top_k=None, generator=generator)
    return [row[end : end + drawn].tolist() for row, end in zip(tokens, ends, strict=True)]


def _draw(
    logits: Tensor, temperature: float, *, top_k: int | None, generator: torch.Generator
) -> int:
    if not logits.isfinite().all():
        raise DivergedError("The model predicts NaN or inf. Sample from an earlier checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    likeliest, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    # The largest first becomes 0: divided by however small a temperature, it stays finite.
    probability = ((likeliest - likeliest[0]) / temperature).softmax(0)
    return int(tokens[torch.multinomial(probability, 1, generator=generator)])
