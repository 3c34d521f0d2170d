"""Tensors of the meta device that stand in for those of a GPU or a CPU during a dry run.

They say they are on the planned device, so models and our modules take the paths of that device.
Autocast, attention kernels and addresses follow the device too. No value can be read.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, final

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import NO_MEMORY, Launcher

META = torch.device("meta")


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_NARROW = names(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm mv addmv einsum "
    "bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "prelu multi_dot scaled_dot_product_attention lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell"
)
"""Functions whose inputs autocast casts to 16 bits."""
_WIDE_ON_GPU = names(
    "layer_norm native_layer_norm group_norm softmin nll_loss nll_loss_nd mse_loss l1_loss "
    "smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_similarity "
    "exp exp_ expm1 log log2 log10 log1p pow __pow__ __rpow__ reciprocal rsqrt softplus "
    "norm logsumexp tan sinh cosh acos asin cdist erfinv"
)
_WIDE_RESULT = names("softmax log_softmax sum cumsum cumprod prod")
"""Functions that autocast of a GPU asks for an fp32 result, unless they are given a format."""
_WIDE_ON_CPU = names("mse_loss cdist prod binary_cross_entropy grid_sample trace")
_HALVES = (torch.bfloat16, torch.float16)
_READS = names("__bool__ item tolist __int__ __float__ __index__ __contains__ numpy nonzero")
_DEVICE_FLAGS: dict[Any, Callable[[str], bool]] = {
    Tensor.is_cuda: lambda kind: kind == "cuda",
    Tensor.is_cpu: lambda kind: kind == "cpu",
    Tensor.is_meta: lambda kind: False,
}


@final
class StandIn(TorchFunctionMode):
    """Makes meta tensors behave as those of one device."""

    nc_transparent = True
    """Products inside are those of the device, unlike in a mode that emulates them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        if device == "cuda":  # tensors of a GPU name which
            device = f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"
        self.device = torch.device(device)
        self.reads_allowed = False
        """Whether a value that is read counts as true or as one, as the check of gradients."""
        self.assumed = False
        """Whether the model took a branch by a value, which counted as true."""
        self.launched: Callable[[Any], None] = lambda tensors: None
        """Called with the tensors of each of our kernels, which is not run."""
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forget_casts(self) -> None:
        """Drop the casts of weights, as autocast does at the end of its block."""
        self._casts.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch on stand-ins."""
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if name == "__get__":
            return self._property(func, args)
        kwargs = kwargs or {}
        if name in _READS and args and isinstance(args[0], Tensor) and _is_meta(args[0]):
            return self._read(name, args[0])
        special = _SPECIAL.get(name)
        if special is not None:
            result = special(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if (
            isinstance(func, FunctionType)
            and (func.__module__ in _COMPOSED or name == "backward")
            and _CHECKS.intersection(func.__code__.co_names)
        ):
            with self:  # what it calls is seen too, with its casts
                return _unchecked(func)(*args, **kwargs)
        args, kwargs = self._on_meta(args), self._on_meta(kwargs)
        if torch.is_autocast_enabled(self.device.type):
            args, kwargs = self._cast(name, args, kwargs)
        return func(*args, **kwargs)

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        source = func.__self__
        if source is Tensor.device:
            device = func(*args)
            return self.device if device.type == "meta" else device
        if source in _DEVICE_FLAGS and _is_meta(args[0]):
            return _DEVICE_FLAGS[source](self.device.type)
        return func(*args)

    def _read(self, name: str, tensor: Tensor) -> Any:
        """Return what stands in for a value, or raise where the path of the model depends on it."""
        if not self.reads_allowed and name in ("__bool__", "__contains__"):
            self.assumed = True
        elif not self.reads_allowed or name in ("numpy", "nonzero"):
            raise UnsupportedError(
                f"The model reads a value of a tensor ({name}), which a dry run without memory "
                "does not have, so its memory cannot be predicted."
            )
        if name == "tolist" and tensor.dim():
            return [1.0] * tensor.numel()
        if name in ("__bool__", "__contains__"):
            return True
        return 1.0 if name in ("item", "__float__") else 1

    def _on_meta(self, values: Any) -> Any:
        """Replace devices by the meta device."""
        return tree_map(self._moved, values)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device | str) and self._is_here(value):
            return META
        return value

    def _is_here(self, value: torch.device | str) -> bool:
        """Return whether a value names the planned device."""
        kind = value.type if isinstance(value, torch.device) else value.partition(":")[0]
        return kind == self.device.type

    def _cast(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the inputs of a function as autocast does."""
        if name in _NARROW:
            dtype = torch.get_autocast_dtype(self.device.type)

            def narrow(value: Any) -> Any:
                floats = (torch.float32, *_HALVES)
                if isinstance(value, Tensor) and value.dtype in floats and value.dtype != dtype:
                    return self._narrowed(value, dtype)
                return value

            return tree_map(narrow, args), tree_map(narrow, kwargs)
        if name in _WIDE_RESULT and self.device.type == "cuda" and args and _is_half(args[0]):
            formats = (kwargs.get("dtype"), *args[1:])
            if not any(isinstance(each, torch.dtype) for each in formats):
                kwargs = {**kwargs, "dtype": torch.float32}
            return args, kwargs
        wide = _WIDE_ON_GPU if self.device.type == "cuda" else _WIDE_ON_CPU
        if name in wide:

            def widen(value: Any) -> Any:
                return value.float() if _is_half(value) else value

            return tree_map(widen, args), tree_map(widen, kwargs)
        return args, kwargs

    def _narrowed(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a cast; that of a weight is made once."""
        if not (value.requires_grad and value.is_leaf and value.dtype == torch.float32):
            return value.to(dtype)
        key = id(value), dtype
        if key not in self._casts or not (
            self._casts[key][1].requires_grad or not torch.is_grad_enabled()
        ):
            self._casts[key] = value, value.to(dtype)
        return self._casts[key][1]


_COMPOSED = ("torch.nn.functional", "torch.functional")
"""Modules of torch whose functions call others, which a mode does not see by itself."""
_CHECKS = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)


@functools.cache
def _unchecked(func: FunctionType) -> FunctionType:
    """Return a function of torch's that does not hand itself over to a mode again."""
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    made = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES


def _is_meta(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _attention(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    """Choose the kernel that the device would take."""
    keys = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    inputs = {**dict(zip(keys, args, strict=False)), **kwargs}
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    if torch.is_autocast_enabled(mode.device.type):
        (query, key, value), _ = mode._cast("linear", (query, key, value), {})
    mask, dropout = inputs.get("attn_mask"), inputs.get("dropout_p", 0.0)
    causal, scale = inputs.get("is_causal", False), inputs.get("scale")
    if inputs.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        if mode.device.type != "cuda" or query.dtype not in _HALVES:
            key = key.repeat_interleave(repeats, -3)
            value = value.repeat_interleave(repeats, -3)
    flat = query.dim() == 4 and key.dim() == 4 and value.shape[-1] == query.shape[-1]
    if not flat:
        return NotImplemented
    aten = torch.ops.aten
    if mode.device.type == "cpu":
        if dropout:
            return NotImplemented
        wanted = None if mask is None else mask
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=wanted, scale=scale
        )[0]
    if mask is None and query.dtype in _HALVES and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, scale=scale
        )[0]
    if mask is not None:
        mask = (
            mask.to(query.dtype)
            if mask.dtype != torch.bool
            else torch.where(mask, query.new_zeros(()), query.new_zeros(()))
        )
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, torch.is_grad_enabled(), dropout, causal, scale=scale
    )[0]


def _address(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    """Return an address that is unique while the storage lives."""
    (tensor,) = args
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta or not tensor.numel():
            return func(tensor)
        return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.itemsize


def _cross_entropy(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the loss as autocast of a GPU computes it: logarithms in 16 bits, then widened."""
    logits, target, *rest = args
    if not (
        mode.device.type == "cuda"
        and torch.is_autocast_enabled("cuda")
        and _is_half(logits)
        and logits.shape != target.shape
    ):
        return NotImplemented
    logarithms = torch.log_softmax(logits, 0 if logits.dim() == 1 else 1).float()
    # What the smoothing adds is a sum per row.
    options = dict(zip(("weight", "reduction", "ignore_index"), rest, strict=False))
    options |= {key: kwargs[key] for key in ("weight", "ignore_index") if key in kwargs}
    return torch._C._nn.nll_loss_nd(logarithms, target, **options)


def _softmax(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    """Return fp32 of fp16 without a cast before it, for which GPUs have a kernel."""
    wanted = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    cast = wanted is None and torch.is_autocast_enabled("cuda")
    if (
        mode.device.type != "cuda"
        or not isinstance(dim, int)
        or args[0].dtype != torch.float16
        or not (cast or wanted == torch.float32)
    ):
        return NotImplemented
    kernel = torch._softmax if func.__name__ == "softmax" else torch._log_softmax
    return kernel(args[0], dim, True)


def _same(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _nothing(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    return None


def _index(mode: StandIn, func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    if not _is_meta(tensor):
        return func(tensor)
    return NO_MEMORY if mode.device.type == "cuda" else -1


_SPECIAL: dict[str, Callable[[StandIn, Any, Any, Any], Any]] = {
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _cross_entropy,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "data_ptr": _address,
    "pin_memory": _same,
    "cpu": _same,
    "cuda": _same,
    "record_stream": _nothing,
    "get_device": _index,
}


_DRIVER: dict[str, Callable[..., Any]] = {
    "_cuda_getDevice": lambda: 0,
    "_cuda_getCurrentRawStream": lambda index: 0,
}
"""What a build of torch without CUDA does not have, as on an idle device."""


@contextlib.contextmanager
def without_device(mode: StandIn) -> Iterator[None]:
    """Skip our own kernels for stand-ins, and let autocast of a GPU that is not here be entered."""
    kind = mode.device.type
    is_on = torch.is_autocast_enabled

    def is_on_there(device_type: str = "cuda") -> bool:
        # Modes that emulate products hide the device of a stand-in.
        return is_on(kind if device_type == "meta" else device_type)

    launch = Launcher.__call__

    def skipped(self: Launcher, grid: Any, tensors: Any, *args: Any, **options: Any) -> None:
        if _is_meta(tensors[0]):
            mode.launched(tensors)
        else:
            launch(self, grid, tensors, *args, **options)

    Launcher.__call__ = skipped  # type: ignore[method-assign]
    attention = F.scaled_dot_product_attention

    def attended(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Not by the mode alone: modes that emulate products call this past all others.
        if _is_meta(query):
            result = _attention(mode, attention, (query, *args), kwargs)
            if result is not NotImplemented:
                return result
        return attention(query, *args, **kwargs)

    F.scaled_dot_product_attention = attended
    # Whether a second pass saved tensors of the same device depends on who looks at stand-ins.
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    check = checks["default"]
    checks["default"] = checks["none"]
    torch.is_autocast_enabled = is_on_there
    try:
        with _autocast_without_gpu():
            yield
    finally:
        Launcher.__call__ = launch  # type: ignore[method-assign]
        checks["default"] = check
        torch.is_autocast_enabled = is_on
        F.scaled_dot_product_attention = attention


class _Undrawn:
    """The random generator of a GPU that is not here."""

    def get_offset(self) -> int:
        """Return how many numbers were drawn."""
        return 0


@contextlib.contextmanager
def _autocast_without_gpu() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    common, graphs = torch.cuda.amp.common, torch.cuda.graphs
    before = (
        common.amp_definitely_not_available,
        torch.cuda.is_bf16_supported,
        graphs.is_current_stream_capturing,
        torch.cuda.default_generators,
    )
    torch.cuda.default_generators = (_Undrawn(),)  # type: ignore[assignment]
    graphs.is_current_stream_capturing = lambda: False
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    added = [name for name in _DRIVER if not hasattr(torch._C, name)]
    for name in added:
        setattr(torch._C, name, _DRIVER[name])
    try:
        yield
    finally:
        for name in added:
            delattr(torch._C, name)
        (
            common.amp_definitely_not_available,
            torch.cuda.is_bf16_supported,
            graphs.is_current_stream_capturing,
            torch.cuda.default_generators,
        ) = before
