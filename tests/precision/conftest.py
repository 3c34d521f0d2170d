import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowcast.hardware import Hardware, Support, detect_hardware

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul",
    "convolution", "convolution_backward", "_convolution", "_trilinear", "linear_backward",
    "_addmm_activation", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip


class RefuseNative16BitProducts(TorchDispatchMode):
    """Fails where torch is about to multiply 16-bit matrices itself, which may kill a process."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS or any(part in name for part in ("dot_product", "mkldnn", "rnn")):
            for leaf in tree_leaves((args, kwargs)):
                narrow = isinstance(leaf, Tensor) and leaf.dtype in SIXTEEN_BITS
                assert not narrow, f"a native 16-bit product: {func}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def guarded() -> Iterator[None]:
    """Run the test where no native 16-bit product may happen, unless this CPU is made for them."""
    if detect_hardware("cpu").products["bf16"].how == "native":
        yield
        return
    with RefuseNative16BitProducts():
        yield


@pytest.fixture(scope="session")
def fp8_products() -> None:
    """Skip where torch has no fp8 products: on older GPUs, and on CPUs before torch 2.13."""
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    if not on_gpu and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13 on a CPU")


@pytest.fixture
def cpu() -> Hardware:
    """A CPU that emulates everything but fp32: a value, not this machine."""
    return hardware_with({}, device="cpu", name="a plain CPU")


@pytest.fixture
def h200() -> Hardware:
    """An NVIDIA H200, as data."""
    native = Support(how="native", reason="compute capability 9.0")
    names = ("tf32", "bf16", "fp16", "e4m3", "e5m2")
    return dataclasses.replace(
        hardware_with(dict.fromkeys(names, native), device="cuda:0", name="NVIDIA H200"),
        capability=(9, 0),
    )


def hardware_with(products: dict[str, Support], *, device: str, name: str) -> Hardware:
    emulated = {
        each: Support(how="emulated", reason=f"this CPU has no {each} products")
        for each in ("tf32", "bf16", "fp16", "e4m3", "e5m2", "mxfp8", "nvfp4")
    }
    fp32 = {"fp32": Support(how="native", reason="everything multiplies fp32")}
    return Hardware(
        device=device, name=name, memory_bytes=2**34, products={**emulated, **fp32, **products}
    )


@pytest.fixture
def mlp() -> Callable[[], nn.Module]:
    """Two linear layers with a norm between them, the same each time."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))

    return build


def states_equal(a: Any, b: Any) -> bool:
    """Compare nested states bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(states_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(states_equal, a, b))
    return bool(a == b)


@pytest.fixture
def same_state() -> Callable[[Any, Any], bool]:
    return states_equal
