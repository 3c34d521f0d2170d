"""Continue sequences letter by letter: greedily, or by chance among the likelier letters."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    head: nn.Module,
    tokens: Tensor,
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    allowed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `tokens`, (rows, length), with `count` more of them: (rows, length + count).

    `model` is causal, and `head` scores the next token. A temperature of 0 takes the likeliest.
    `top_k` keeps that many of the likeliest, `top_p` the fewest whose chances sum to it; `allowed`,
    the ids that may be drawn at all. Each letter reads the whole sequence again.
    """
    training = model.training, head.training
    model.eval(), head.eval()
    try:
        for _ in range(count):
            logits = head(model(tokens)[:, -1:])[:, 0].float()
            if allowed is not None:
                shut = torch.ones_like(logits, dtype=torch.bool).index_fill(1, allowed, False)
                logits = logits.masked_fill(shut, -torch.inf)
            chosen = choose(
                logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
            )
            tokens = torch.cat([tokens, chosen], dim=1)
    finally:
        model.train(training[0]), head.train(training[1])
    return tokens


def choose(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return one token a row, (rows, 1), of (rows, vocab) logits."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    likeliest, ids = (logits / temperature).sort(dim=-1, descending=True)
    chances = likeliest.softmax(-1)
    if top_k is not None:
        chances = chances.where(torch.arange(chances.shape[1], device=chances.device) < top_k, 0)
    if top_p is not None:
        # One is kept while those before it do not reach the sum: the first always.
        chances = chances / chances.sum(-1, keepdim=True)
        chances = chances.where(chances.cumsum(-1) - chances < top_p, 0)
    return ids.gather(1, torch.multinomial(chances, 1, generator=generator))
