"""torch's own: unscale, clip, AdamW, and a copy in bf16 to compute with."""

import torch

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.updates.weights import Weights, trial_of

PASS_BYTES = 4 + 4 + 2 * (4 + 4 + 4) + 2
"""fp32 gradient for the norm and again for the update; weight and moments there and back; copy."""


def build(weights: Weights, *, fused: bool) -> Trial:
    """Return the update of mixed precision with GradScaler, in fused or foreach kernels."""
    parameters = weights.parameters
    way = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(parameters, **weights.settings(), **way)  # type: ignore[arg-type]
    # The scale stays at one: gradients are handed over again, and would vanish otherwise.
    scaler = torch.amp.GradScaler(weights.device.type, init_scale=1.0, growth_interval=10**9)
    copies = [p.detach().to(torch.bfloat16) for p in parameters]
    scaler.scale(torch.ones((), device=weights.device))  # it makes its tensors at the first call
    largest = weights.recipe.clip_norm

    def update() -> None:
        scaler.unscale_(optimizer)
        if largest is not None:
            torch.nn.utils.clip_grad_norm_(parameters, largest)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(copies, [p.detach() for p in parameters])

    return trial_of(weights, update, bytes_per_parameter=PASS_BYTES)
