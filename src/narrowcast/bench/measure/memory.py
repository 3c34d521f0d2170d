"""How many contenders fit on the device at once: a rough estimate, before anything is built.

While it trains, a contender takes 16 bytes per parameter (fp32 weight, gradient and two moments),
34 bytes per token, layer and number of width for what the backward pass needs (Korthikanti et al.
2022, 16-bit activations, attention without scores), and 14 bytes per logit (once in 16 bits, three
times in 32). For gpt-350m that is 29.6 GiB; torch's eager autocast was measured at 28.1. Between
its turns a contender keeps its state alone. `CONTEXT_BYTES` per process come on top.

Of a model that is no GPT only the weights are known. From those of a transformer's block come 9
numbers per number of width (3 of qkv, 1 of out, 4 of up, 1 of down), for which it takes those 34
bytes: so 4 bytes per number that comes out of a weight, for each row it multiplies.
"""

import torch
from torch import nn

from narrowcast.bench.model import shapes_of
from narrowcast.config.sections import Recipe
from narrowcast.workloads.lm.model import GPT

CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a GPU for its kernels, measured on an H200 with torch 2.11."""
USABLE_SHARE = 0.85
"""Of the device's memory; the rest is for fragments and for other processes."""
STATE_BYTES = 16
ACTIVATION_BYTES = 34
LOGIT_BYTES = 14
OUTPUT_BYTES = 4


def training_bytes(recipe: Recipe) -> int:
    """Estimate what one contender takes while it trains the model of `recipe`."""
    task = shapes_of(recipe)
    parameters = sum(p.numel() for p in task.model.parameters())
    activations = activation_bytes(task.model, rows=task.gemm_rows)
    return STATE_BYTES * parameters + activations + CONTEXT_BYTES


def activation_bytes(model: nn.Module, *, rows: int) -> int:
    """Estimate what the backward pass needs of the forward pass of so many rows."""
    if isinstance(model, GPT):
        width = model.embed.embedding_dim
        return rows * (ACTIVATION_BYTES * width * model.layers + LOGIT_BYTES * model.vocab)
    outputs = sum(
        parameter.shape[0]
        for module in model.modules()
        if not isinstance(module, nn.Embedding)  # which multiplies nothing
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )
    return OUTPUT_BYTES * rows * outputs


def usable_bytes(device: torch.device, *, total_bytes: int) -> int:
    """Return what contenders may take together: of what is free on a GPU, of all on a CPU."""
    free = total_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE_SHARE * free)
