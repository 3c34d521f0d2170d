"""TRL: its fused LM head multiplies in the formats of the plan.

TRL 1.16 replaces a model's forward and multiplies by `lm_head.weight` itself, past the module. If
the plan has fp8, emulation or a monitor for the head, the head is called in chunks of rows instead.
Supervised fine-tuning uses the loss kernel of `narrowcast.linear_cross_entropy` on a GPU, which
computes the gradients beside the loss. Otherwise TRL's own kernel runs, which computes the logits
again for them. None of these stores the logits of all tokens.
"""

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowcast.kernels.launch import unsupported_reason
from narrowcast.precision.fused.chunked_pass import chunked_log_probs
from narrowcast.precision.fused.linear_cross_entropy import plain_operand_dtype

log = logging.getLogger("narrowcast")

_KERNEL = "_ChunkedLogProbFunction"
_CHUNK_ELEMENTS = 2**26
"""Logits of one chunk: 256 MiB in fp32."""


def use_plan_in_fused_heads(model: nn.Module, *, equal_tokens: bool = False) -> Callable[[], None]:
    """Make the fused LM heads that TRL gave to a model use the plan; return how to undo it.

    Call it before `prepare`, which moves the forward of an object elsewhere. With `equal_tokens`
    the trainer's loss must be a mean or sum of the log-probabilities.
    """
    replaced: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        forward = vars(module).get("forward")
        function = getattr(forward, "__func__", None)
        # TRL gives its function the name of the forward it replaces, but not its code.
        if not inspect.isfunction(function) or function.__code__.co_name != "_fused_forward":
            continue
        theirs = function.__globals__.get(_KERNEL)
        if theirs is None:
            log.warning("the fused LM head of this TRL version ignores the plan of the LM head")
            continue
        if inspect.getclosurevars(function).nonlocals.get("cast_lm_head_to_fp32"):
            continue  # the user asked for fp32
        module.forward = types.MethodType(
            _with_kernel(function, _HeadKernel(module, theirs, equal_tokens=equal_tokens)), module
        )
        replaced.append((module, forward))

    def undo() -> None:
        for module, forward in replaced:
            module.forward = forward

    return undo


def _with_kernel(function: types.FunctionType, kernel: "_HeadKernel") -> types.FunctionType:
    """Return a copy of TRL's forward that calls another kernel."""
    namespace = {**function.__globals__, _KERNEL: kernel}
    copied = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)  # `generate` reads the wrapped signature
    return copied


def _can_chunk(hidden: Tensor) -> bool:
    return hidden.numel() > 0 and not unsupported_reason(hidden.device)


@final
class _HeadKernel:
    """Replaces TRL's autograd function in one model."""

    def __init__(self, model: nn.Module, theirs: Any, *, equal_tokens: bool) -> None:
        self._model, self._theirs, self._equal_tokens = model, theirs, equal_tokens

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return what TRL's kernel does: log-probabilities and statistics of each token."""
        model: Any = self._model
        head = model.get_output_embeddings()
        known = isinstance(head, nn.Linear) and weight is head.weight
        dtype = plain_operand_dtype(hidden, head) if known else None
        if not known or dtype is not None:
            is_loss = self._equal_tokens and set(outputs) == {"log_probs", "entropy", "is_top1"}
            unchanged = temperature == 1.0 and logit_scale == 1.0 and softcap is None
            if dtype is not None and is_loss and unchanged and _can_chunk(hidden):
                log_probs, entropy, is_top1 = chunked_log_probs(
                    hidden, weight, bias, targets, dtype=dtype
                )
                return log_probs, entropy, None, None, is_top1
            settings = (temperature, chunk_size, softcap, logit_scale, outputs)
            result: tuple[Tensor | None, ...] = self._theirs.apply(
                hidden, weight, bias, targets, *settings
            )
            return result
        rows = max(1, _CHUNK_ELEMENTS // head.out_features)
        parts = [
            checkpoint(
                _token_statistics, x, head, wanted, temperature, softcap, logit_scale, outputs,
                use_reentrant=False,
            )
            for x, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]  # fmt: skip
        return tuple(
            None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
        )


def _token_statistics(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    """Return log-probability, entropy, log of summed squares, mean logit and top-1 per token."""
    logits = head(hidden).float() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_z = torch.logsumexp(logits, -1)
    log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_z
    entropy = squares = means = top1 = None
    if "entropy" in outputs:
        entropy = log_z - (torch.softmax(logits, -1) * logits).sum(-1)
    plain = logits.detach()
    if "log_sum_sq_probs" in outputs:
        squares = torch.logsumexp(2 * plain, -1) - 2 * log_z.detach()
    if "mean_logits" in outputs:
        means = plain.mean(-1)
    if "is_top1" in outputs:
        top1 = plain.argmax(-1) == targets
    return log_probs, entropy, squares, means, top1
