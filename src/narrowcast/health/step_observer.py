"""Observes one training step of any loop: its products, casts, gradients and optimizer steps.

A `TorchDispatchMode` sees every operation of the forward and the backward pass. Global module hooks
name the module of a forward operation. Autograd nodes have a sequence number, so an operation of
the backward pass belongs to the module that was active when its node was made.
"""

import bisect
import contextlib
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from narrowcast.numerics import BF16, FORMATS, FP32, TF32, BlockFormat, Format, format_named
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.modules.wrappers import EmulatedLinear
from narrowcast.precision.products.regions import InRegion

OUTSIDE = "(outside the model)"
"""The row of products that no module of the model makes, such as those of the loss."""
NARROW = (torch.bfloat16, torch.float16)
Phase = Literal["forward", "backward", "optimizer"]

_PLAIN = [each for each in FORMATS.values() if isinstance(each, Format) and each is not TF32]
_NAMES = {each.dtype: each.name for each in _PLAIN}
_NAMES |= {torch.float64: "fp64", torch.complex64: "complex64", torch.complex128: "complex128"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: bf16, e4m3, int8."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


_OPERANDS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "matmul", "_int_mm"), (0, 1)),
    **dict.fromkeys(("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), (0, 1)),
    **dict.fromkeys(("cudnn_convolution", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), (0, 1)),
    **dict.fromkeys(("convolution_backward", "_trilinear"), (0, 1, 2)),
    **dict.fromkeys(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"), (0, 1)),
}
"""Where the operands of torch's products are among their arguments."""
_ATTENTION = re.compile(r"_(scaled_dot_product|flash|efficient|cudnn)_.*attention(?!_math)")
_CUSTOM = re.compile(
    r"(^|_)(mm|gemm|matmul|linear|conv(olution)?\d?d?|attn|attention|scalar_mlp)(_|$)"
)
"""Names of custom operators that multiply: narrowcast's own, flash-attn, vision libraries."""
_GRAD_SCALER = "_amp_foreach_non_finite_check_and_unscale_"


def _operands(name: str, args: Sequence[Any], *, custom: bool) -> list[Tensor] | None:
    """Return the operands of a product; None for other operators."""
    positions: Sequence[int] | None = None if custom else _OPERANDS.get(name)
    if positions is None:
        if not (_CUSTOM if custom else _ATTENTION).search(name):
            return None
        positions = range(min(len(args), 4 if "backward" in name else 3))
    result: list[Tensor] = []
    for position in positions:
        value = args[position] if position < len(args) else None
        values = value if isinstance(value, list | tuple) else [value]
        result += [each for each in values if isinstance(each, Tensor)]
    floats = [t for t in result if t.is_floating_point() or t.is_complex()]
    return floats or result


def _flops(func: Any, name: str, args: Any, kwargs: Any, output: Any) -> int:
    """Return the floating-point operations of a product; 0 if unknown."""
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=output))
        except Exception:  # noqa: BLE001  # torch's formulas assert layouts that they know
            return 0
    first = next((t for t in _flat(output) if isinstance(t, Tensor)), None)
    if name.startswith("_scaled_dot_product") and len(args) > 3:
        backward = "backward" in name
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        return int((10 if backward else 4) * query.numel() * key.shape[-2])
    if name.startswith(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")):
        weights = [t for t in _flat(args[1:5]) if isinstance(t, Tensor) and t.dim() >= 2]
        passes = 2 if "backward" in name else 1
        rows = args[0].numel() // max(args[0].shape[-1], 1)
        return int(2 * passes * rows * sum(t.numel() for t in weights))
    positions = _OPERANDS.get(name)
    if positions is None or first is None or not isinstance(args[positions[0]], Tensor):
        return 0
    return int(2 * first.numel() * args[positions[0]].shape[-1])


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@dataclass
class ModuleProducts:
    """The products that one module made in a step: FLOPs by phase and format."""

    flops: dict[tuple[Phase, str], int] = field(default_factory=lambda: defaultdict(int))

    def formats(self, phase: Phase) -> tuple[str, ...]:
        """Return the formats of a phase, the one with most FLOPs first."""
        own = {name: flops for (at, name), flops in self.flops.items() if at == phase}
        return tuple(sorted(own, key=lambda name: -own[name]))


@dataclass
class GradientSeen:
    """What was seen of the gradient of one weight."""

    dtype: torch.dtype
    nonzero: Tensor
    """On the host: which elements had a gradient other than zero."""
    passes: int = 1
    """Backward passes that were added up in it before an optimizer step."""


@dataclass
class UpcastSeen:
    """Casts of one module's activations from 16 bits to fp32."""

    count: int = 0
    bytes: int = 0
    """Size of the fp32 results."""


@dataclass
class Observation:
    """All that was seen in one step."""

    products: dict[str, ModuleProducts] = field(default_factory=lambda: defaultdict(ModuleProducts))
    upcasts: dict[str, UpcastSeen] = field(default_factory=lambda: defaultdict(UpcastSeen))
    gradients: dict[nn.Parameter, GradientSeen] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    """Of every parameter group that an optimizer stepped."""
    optimizer_steps: int = 0
    backward_seen: bool = False
    scaler_seen: bool = False
    """Whether a `GradScaler` checked gradients."""
    fp16_results: int = 0
    """Elements of fp16 results in the backward pass."""
    fp16_tiny: int = 0
    """Those below the smallest normal number of fp16, zero included."""


@final
class _Modules:
    """Knows which module is active, and which was when an autograd node was made."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stacks: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        self._starts: dict[int, list[int]] = defaultdict(list)
        self._active: dict[int, list[str]] = defaultdict(list)
        self._home = threading.get_ident()

    def enter(self, module: nn.Module, _: Any) -> None:
        """Note that the forward pass of a module begins."""
        thread = threading.get_ident()
        stack = self._stacks[thread]
        around = stack[-1][0] if stack else OUTSIDE
        stack.append((self._names.get(id(module), around), _autograd_node() is not None))
        self._mark(thread, stack[-1][0])

    def leave(self, *_: Any) -> None:
        """Note that it has ended, also by an error."""
        thread = threading.get_ident()
        stack = self._stacks[thread]
        if stack:
            stack.pop()
        self._mark(thread, stack[-1][0] if stack else OUTSIDE)

    def now(self) -> tuple[str, Phase]:
        """Return the module and the phase of the operation that runs now."""
        stack = self._stacks[threading.get_ident()]
        node = _autograd_node()
        # A module that was entered in a backward pass computes its forward again: checkpointing.
        if node is None or (stack and stack[-1][1]):
            return (stack[-1][0] if stack else OUTSIDE), "forward"
        starts, active = self._starts[self._home], self._active[self._home]
        index = bisect.bisect_right(starts, node._sequence_nr()) - 1
        return (active[index] if index >= 0 else OUTSIDE), "backward"

    @property
    def is_in_pass(self) -> bool:
        """Whether a module or a backward pass runs in this thread."""
        return bool(self._stacks[threading.get_ident()]) or _autograd_node() is not None

    def _mark(self, thread: int, name: str) -> None:
        self._starts[thread].append(torch._C._autograd._get_sequence_nr())
        self._active[thread].append(name)


def _autograd_node() -> Any:
    """Return the node of the backward pass that runs in this thread; None outside of one."""
    return torch._C._current_autograd_node()


@final
class PlannedFormats:
    """The formats that a prepared model plans for its emulated products."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())

    def emulated(self, module: str, phase: Phase, operands: Sequence[Tensor]) -> str | None:
        """Return the planned format of fp32 operands, if their values are rounded to it."""
        for name in self._names(module, phase):
            target = format_named(name)
            if target is FP32 or not all(lies_on_grid(t, target) for t in operands):
                return None
        names = dict.fromkeys(self._names(module, phase))
        return f"{'/'.join(names)} emulated" if names else None

    def region(self, module: str) -> str | None:
        """Return the format of a module's functional products; None if nothing was prepared."""
        while True:
            within = self._modules.get("" if module == OUTSIDE else module)
            if isinstance(within, InRegion):
                return within.nc_entry.region.format_name
            if module in ("", OUTSIDE):
                return None
            module = module.rpartition(".")[0]

    def requested(self, module: str) -> str | None:
        """Return the format of a module's forward products in the policy; None without one."""
        names = self._names(module, "forward")
        return names[0] if names else None

    def _names(self, module: str, phase: Phase) -> Sequence[str]:
        layer = self._modules.get(module)
        if isinstance(layer, EmulatedLinear):
            formats = layer.nc_formats
            if phase == "forward":
                return (formats.forward.name,)
            return (formats.grad_input.name, formats.grad_weight.name)
        region = self.region(module)
        return () if region is None else (region,)


def lies_on_grid(x: Tensor, target: Format | BlockFormat) -> bool:
    """Return whether a format represents all values of an fp32 tensor. Synchronises.

    Formats of 8 bits and less are scaled: what can be checked is that bf16 holds the values.
    """
    x = local_part(x.detach())
    if target is TF32:  # 13 bits fewer than fp32
        return not bool((x.contiguous().view(torch.int32) & 0x1FFF).any())
    dtype = target.dtype if isinstance(target, Format) and target.dtype in NARROW else BF16.dtype
    assert dtype is not None
    return bool(((x.to(dtype).to(x.dtype) == x) | x.isnan()).all())


@final
class _Products(TorchDispatchMode):
    """Records products and upcasts while they run, and changes nothing."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, seen: Observation, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._modules, self._planned = seen, modules, PlannedFormats(model)
        self._weights = {p.data_ptr() for p in model.parameters() if not p.is_meta}
        self.in_optimizer = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # only shapes are computed
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented  # a subclass: it dispatches what it is made of, which is seen
        output = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)  # None: a higher-order operator
        if packet is None or self._is_in_update():
            return output
        custom, name = func.namespace != "aten", str(packet).rpartition(".")[2]
        if name == _GRAD_SCALER:
            self._seen.scaler_seen = True
        elif name == "_to_copy":
            self._upcast(args[0], output)
        elif operands := _operands(name, args, custom=custom):
            self._product(operands, output, _flops(func, name, args, kwargs, output), args, name)
        return output

    def _is_in_update(self) -> bool:
        """Return whether an optimizer computes its update, and not the loss in a closure."""
        return self.in_optimizer and not torch.is_grad_enabled() and not self._modules.is_in_pass

    def _product(
        self, operands: list[Tensor], output: Any, flops: int, args: Any, name: str
    ) -> None:
        module, phase = self._modules.now()
        self._seen.backward_seen |= phase == "backward"
        dtype = max((t.dtype for t in operands), key=lambda each: each.itemsize)
        if name == "linear_cross_entropy":  # casts its operands itself, and computes gradients too
            dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        shown = dtype_name(dtype)
        if dtype == torch.float32:
            shown = self._planned.emulated(module, phase, operands) or shown
            if shown == "fp32" and operands[0].is_cuda and _uses_tf32(name):
                shown = "tf32"
        elif dtype == torch.float16 and phase == "backward":
            for each in _flat(output):
                if isinstance(each, Tensor) and each.dtype == torch.float16:
                    self._seen.fp16_results += each.numel()
                    self._seen.fp16_tiny += int((each.abs() < 2.0**-14).sum())
        self._seen.products[module].flops[phase, shown] += flops

    def _upcast(self, source: Any, output: Tensor) -> None:
        if not isinstance(source, Tensor) or source.dtype not in NARROW:
            return
        if output.dtype != torch.float32 or source.data_ptr() in self._weights:
            return
        module, phase = self._modules.now()
        if phase == "forward" and source.requires_grad:
            upcast = self._seen.upcasts[module]
            upcast.count += 1
            upcast.bytes += output.numel() * output.element_size()


def _uses_tf32(name: str) -> bool:
    switch: Any = torch.backends.cudnn.conv if "conv" in name else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return bool(switch.fp32_precision == "tf32")


@final
class _Gradients:
    """Reads each gradient when autograd has accumulated it, and when an optimizer uses it."""

    def __init__(self, seen: Observation) -> None:
        self._seen = seen
        self._passes: dict[nn.Parameter, int] = defaultdict(int)
        """Backward passes that have added to a gradient since the last optimizer step."""

    def accumulated(self, weight: nn.Parameter) -> None:
        """Read a gradient that a backward pass has added to."""
        self._seen.backward_seen = True
        self._passes[weight] += 1
        self._read(weight)

    def before_optimizer(self, optimizer: Any) -> None:
        """Read the gradients as the optimizer gets them: clipped, unscaled, set by hand."""
        self._seen.optimizer_steps += 1
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                self._seen.learning_rates.append(float(rate))
            for weight in group["params"]:
                self._read(weight)

    def after_optimizer(self, optimizer: Any) -> None:
        """Restart the count of passes for the next step."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                self._passes.pop(weight, None)

    def _read(self, weight: nn.Parameter) -> None:
        grad = weight.grad
        if grad is None:
            return
        whole = grad.to_dense() if grad.layout != torch.strided else grad
        nonzero = (local_part(whole.detach()) != 0).cpu()
        before = self._seen.gradients.get(weight)
        passes = max(self._passes[weight], 0 if before is None else before.passes)
        self._seen.gradients[weight] = GradientSeen(grad.dtype, nonzero, passes)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` or `module.compile()` compiled this module."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def observe(
    model: nn.Module, weights: Sequence[nn.Parameter], step: Callable[[], object]
) -> Observation:
    """Run a step and return what was seen of it. Synchronises with the device."""
    seen = Observation()
    modules, gradients = _Modules(model), _Gradients(seen)
    mode = _Products(model, seen, modules)

    def begin(optimizer: Any, *_: Any) -> None:
        gradients.before_optimizer(optimizer)
        mode.in_optimizer = True

    def end(optimizer: Any, *_: Any) -> None:
        gradients.after_optimizer(optimizer)
        mode.in_optimizer = False

    with contextlib.ExitStack() as stack:
        if any(map(is_compiled, model.modules())):
            # The extra call of a hook that torch warns of names the same module twice.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
        handles: list[Any] = [
            register_module_forward_pre_hook(modules.enter),
            register_module_forward_hook(modules.leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
            *(
                weight.register_post_accumulate_grad_hook(gradients.accumulated)
                for weight in weights
                if weight.requires_grad
            ),
        ]
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(mode)
        step()
    return seen


def host_copies(values: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Copy tensors to the host. Synchronises."""
    return {
        weight: local_part(value.detach()).to("cpu", copy=True) for weight, value in values.items()
    }
