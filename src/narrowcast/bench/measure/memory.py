"""How many contenders fit on the device at once: a rough estimate, before anything is built.

While it trains, a contender takes 16 bytes a parameter (fp32 weight, gradient and two moments), 34
bytes a token, layer and number of width for what the backward pass needs (Korthikanti et al. 2022,
16-bit activations, attention without scores), and 14 bytes a logit (once in 16 bits, three times
in 32). For gpt-350m that is 29.6 GiB; torch's eager autocast was measured at 28.1. Between its
turns a contender keeps its state alone. `CONTEXT_BYTES` a process come on top.
"""

import torch

from narrowcast.bench.model import shapes_of
from narrowcast.config.sections import Recipe

CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU for its kernels, measured on an H200 with torch 2.11."""
USABLE_SHARE = 0.85
"""Of the device's memory; the rest is for fragments and for other processes."""
STATE_BYTES = 16
ACTIVATION_BYTES = 34
LOGIT_BYTES = 14


def training_bytes(recipe: Recipe) -> int:
    """Estimate what one contender takes while it trains the model of `recipe`."""
    model = shapes_of(recipe).model
    parameters = sum(p.numel() for p in model.parameters())
    tokens, width = recipe.batch_size * model.length, model.embed.embedding_dim
    activations = ACTIVATION_BYTES * tokens * width * model.layers
    logits = LOGIT_BYTES * tokens * model.vocab
    return STATE_BYTES * parameters + activations + logits + CONTEXT_BYTES


def usable_bytes(device: torch.device, *, total_bytes: int) -> int:
    """Return what contenders may take together: of what is free on a GPU, of all on a CPU."""
    free = total_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE_SHARE * free)
