"""A linear layer forward and backward, as each contender of `bench products` does it.

On a GPU everyone's passes are captured as a CUDA graph and replayed: what the device takes, and not
how fast a host launches kernels for a single layer with nothing around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import narrowcast
from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.timing import Step, forget_peak
from narrowcast.bench.peers.float8 import convert
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import probe
from narrowcast.hardware.replay import captured
from narrowcast.precision.plan.plan import Plan, make_plan

LARGEST_E4M3 = 448.0
SAMPLE_SEED = 0


@dataclass(frozen=True)
class Shape:
    """Tokens, numbers in, numbers out."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens}×{self.inputs}×{self.outputs}"

    @property
    def flops(self) -> float:
        """Operations of a forward and a backward pass."""
        return 6.0 * self.tokens * self.inputs * self.outputs

    @property
    def numbers(self) -> int:
        """Of input, weight and output together."""
        m, k, n = self.tokens, self.inputs, self.outputs
        return m * k + k * n + m * n


Made = Callable[[Shape], Step]


def layer_builder(contender: Contender, *, device: torch.device) -> Made:
    """Return what makes a contender's step for a shape."""
    made = _plain_builder(contender, device=device)
    if device.type != "cuda":
        return made

    def replayed(shape: Shape) -> Step:
        forget_peak(device)  # what a graph takes is only seen while it is captured
        return captured(made(shape), device=device)

    return replayed


def layer_plan(shape: Shape, device: torch.device, policy: str) -> Plan:
    """Return what a policy chooses for a layer of this shape, replayed on this device."""
    layer, hardware = _layer(shape, torch.device("meta")), probe(str(device))
    return make_plan(layer, policy, hardware=hardware, gemm_rows=shape.tokens, running="captured")


def _plain_builder(contender: Contender, *, device: torch.device) -> Made:
    options = contender.options
    match contender.kind:
        case "narrowcast":
            return lambda shape: _ours(shape, device, **options)
        case "torch":
            dtype = torch.bfloat16 if options["dtype"] == "bf16" else torch.float32
            return lambda shape: _plain(shape, device, dtype)
        case "torchao":
            return lambda shape: _torchao(shape, device, options["recipe"])
        case _:
            _require_fp8(device)
            return lambda shape: _raw(shape, device, by_row=options["scaling"] == "row")


def _ours(shape: Shape, device: torch.device, *, policy: str, compiled: bool) -> Step:
    model = _layer(shape, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared = narrowcast.prepare(model, optimizer, policy=layer_plan(shape, device, policy))
    forward = cast(nn.Module, torch.compile(model, dynamic=False)) if compiled else model
    x, _ = _operands(shape, device, torch.float32)
    with torch.no_grad(), prepared.compute():
        # What the layer returns decides in which format its input and its gradient come.
        dtype = model(x.detach()).dtype
    x, grad_output = _operands(shape, device, dtype)

    def step() -> None:
        # As an update would: a weight kept in fp8 is then made anew in every step, as a peer's is.
        torch.autograd.graph.increment_version(list(model.parameters()))
        with prepared.compute():
            out = forward(x)
        out.backward(grad_output)
        _forget(model, x)

    return step


def _plain(shape: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    return _stepping(_layer(shape, device).to(dtype), shape, device, dtype)


def _torchao(shape: Shape, device: torch.device, recipe: str) -> Step:
    _require_fp8(device)
    model = _layer(shape, device).to(torch.bfloat16)
    convert(model, recipe)
    compiled = cast(nn.Module, torch.compile(model, dynamic=False))
    return _stepping(compiled, shape, device, torch.bfloat16)


def _stepping(model: nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype) -> Step:
    x, grad_output = _operands(shape, device, dtype)

    def step() -> None:
        model(x).backward(grad_output)
        _forget(model, x)

    return step


def _raw(shape: Shape, device: torch.device, *, by_row: bool) -> Step:
    """Return the three products of a layer with operands in e4m3 already, second ones column-major.

    cuBLAS and CUTLASS take the first operand in rows and the second in columns, nothing else.
    """
    m, k, n = shape.tokens, shape.inputs, shape.outputs
    pairs = [_fp8_pair(rows, inner, columns, device, by_row=by_row) for rows, inner, columns in (
        (m, k, n), (m, n, k), (n, m, k)
    )]  # fmt: skip
    product: Any = torch._scaled_mm

    def step() -> None:
        for a, b, scale_a, scale_b in pairs:
            product(
                a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip

    return step


def _fp8_pair(
    rows: int, inner: int, columns: int, device: torch.device, *, by_row: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def operand(count: int) -> Tensor:
        drawn = torch.randn(count, inner, device=device, dtype=torch.bfloat16)
        return drawn.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)

    a, b = operand(rows), operand(columns).t()
    if not by_row:
        one = torch.ones((), device=device)
        return a, b, one, one
    return a, b, torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)


def _layer(shape: Shape, device: torch.device) -> nn.Sequential:
    torch.manual_seed(SAMPLE_SEED)
    return nn.Sequential(nn.Linear(shape.inputs, shape.outputs, bias=False, device=device))


def _operands(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an input that wants its gradient, and the gradient of the output."""
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)


def _forget(model: nn.Module, x: Tensor) -> None:
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None


def _require_fp8(device: torch.device) -> None:
    if device.type != "cuda":
        raise UnsupportedError("fp8 products need a GPU")
