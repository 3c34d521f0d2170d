import ast
import functools
import importlib.util
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast
from narrowcast.errors import UnsupportedError
from narrowcast.kernels import launch
from narrowcast.kernels.launch import interpreted, specialised, unsupported_reason

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CPU if interpreted() else CUDA
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import narrowcast
from narrowcast.kernels.fp8 import quantize
from narrowcast.kernels.launch import unsupported_reason
print(unsupported_reason(torch.device("cpu")))
print(quantize(torch.full((1, 16), 3.0), torch.float8_e4m3fn).rowwise.float().max().item())
"""


@pytest.fixture(autouse=True)
def _asked_again():
    launch._triton_is_installed.cache_clear()
    yield
    launch._triton_is_installed.cache_clear()


def test_the_interpreter_runs_kernels_anywhere(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreted()
    assert unsupported_reason(CPU) == unsupported_reason(CUDA) == ""


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_interpreter_only_cuda_has_kernels(monkeypatch, value):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not interpreted()
    assert unsupported_reason(CPU) == "Triton has no kernels for cpu"
    assert unsupported_reason(torch.device("mps")) == "Triton has no kernels for mps"
    assert unsupported_reason(CUDA) == ""


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_without_triton_there_are_no_kernels_at_all(monkeypatch, device):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert unsupported_reason(device) == "Triton is not installed"


def test_a_machine_without_triton_imports_narrowcast_and_quantises_plainly():
    """448 / 3 is 149, so the scale is 2⁷, and 384 is a value of e4m3."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert ended.stdout.split("\n")[:2] == ["Triton is not installed", "384.0"], ended.stderr


# Instructions written by hand may be those of one generation only.
COMPILED = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from narrowcast.kernels.adamw.programs import update

pointers = {"chunks": "*i32", "addresses": "*i64", "gradients": "*i64", "leads": "*i64",
            "coefficients": "*fp32", "seeds": "*i32", "counters": "*i64"}
constants = dict(
    STORED=tl.bfloat16, GRADIENT=tl.bfloat16, MASTER=sys.argv[1], MOMENTS=sys.argv[2],
    AVERAGED=False, LEAD=sys.argv[3], COUPLED=False, METER=True, ALIGNED=True, FULL=True,
    CHUNK=256, NATIVE=True,
)
signature = pointers | dict.fromkeys(constants, "constexpr")
places = {(update.arg_names.index(name),): value for name, value in constants.items()}
for capability in (80, 90):
    source = ASTSource(fn=update, signature=signature, constexprs=places)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": 1})
    print(capability, len(made.asm["cubin"]) > 0)
"""


@pytest.mark.parametrize(
    ("master", "moments", "lead"),
    [("split", "int8", "none"), ("fp32", "fp32", "fp32"), ("split", "bf16", "bf16")],
)
def test_the_optimizer_is_compiled_for_ampere_and_for_hopper(master, moments, lead, tmp_path):
    """By the compiler that comes with Triton, which needs no GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED, master, moments, lead],
        capture_output=True, text=True, check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert ended.stdout.split("\n")[:2] == ["80 True", "90 True"], ended.stderr


DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.uint8]
drawn_tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 16)), max_size=3)
drawn_sizes = st.lists(
    st.one_of(st.integers(-40, 40), st.sampled_from([2**31 - 1, 2**31, 2**40, -(2**31) - 1])),
    max_size=3,
)


def by_triton(tensors, sizes):
    """What Triton would compile a kernel for, of these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(GPUTarget("cuda", 90, 32))
    given = (*tensors, *sizes)
    return [native_specialize_impl(backend, each, False, True, True) for each in given]


@given(drawn_tensors, drawn_sizes, drawn_tensors, drawn_sizes)
def test_arguments_that_are_specialised_alike_are_alike_to_triton(a, m, b, n):
    pytest.importorskip("triton")
    first, second = (
        tuple(torch.zeros(64, dtype=dtype)[place:] for dtype, place in each) for each in (a, b)
    )
    if specialised(first, tuple(m)) == specialised(second, tuple(n)) and len(a) == len(b):
        assert by_triton(first, m) == by_triton(second, n)
    if len(m) == len(n) == len(a) == len(b) == 1 and by_triton(first, m) != by_triton(second, n):
        assert specialised(first, tuple(m)) != specialised(second, tuple(n))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 16, 17, 4096])
def test_a_kernel_that_was_found_again_computes_what_the_first_launch_did(cuda, offset, count):
    from narrowcast.kernels.quantize import largest_magnitude

    x = torch.randn(count + offset, device=cuda)[offset:]
    expected = x.abs().max().view(torch.int32).item()
    for _ in range(3):
        assert largest_magnitude(x).item() == expected


@pytest.mark.gpu
def test_a_launch_is_found_again_by_its_sizes_however_many_there_are(cuda, monkeypatch):
    from narrowcast.kernels.gelu import gelu

    monkeypatch.setattr(launch, "_KEPT", 3)
    for count in (16, 32, 33, 48, 16, 64, 80, 33, 1, 16):
        x = torch.randn(count, device=cuda)
        torch.testing.assert_close(gelu(x), torch.nn.functional.gelu(x), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_who_listens_to_launches_is_told_of_those_that_are_found_again(cuda):
    from triton import knobs

    from narrowcast.kernels.gelu import gelu

    x, told = torch.randn(4096, device=cuda), []
    gelu(x)
    listen = lambda about: told.append(about.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(listen)
    try:
        gelu(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(listen)
    gelu(x)
    assert told == ["_forward"]


def pieces():
    """Kernels that autograd follows: what each is called with, and its operators."""
    from narrowcast.kernels.gated import gated, gated_halves
    from narrowcast.kernels.norms import layer_norm, rms_norm
    from narrowcast.kernels.rotary import turn_halves, turn_heads

    bf16 = torch.bfloat16
    rms = functools.partial(rms_norm, eps=1e-5, offset=0.0, rounds=False, dtype=bf16)
    return {
        "layer_norm": (functools.partial(layer_norm, eps=1e-5, dtype=bf16), [(3, 16), 16, 16]),
        "rms_norm": (rms, [(3, 16), 16]),
        "gated": (functools.partial(gated, activation="silu"), [(3, 16), (3, 16)]),
        "gated halves": (functools.partial(gated_halves, activation="gelu"), [(3, 32)]),
        "turn_halves": (turn_halves, [(1, 2, 3, 16), (1, 2, 3, 16), (1, 3, 16), (1, 3, 16)]),
        "turn_heads": (functools.partial(turn_heads, queries=2), [(1, 3, 6, 16), (3, 1, 8, 2)]),
    }


@pytest.mark.parametrize("name", list(pieces()) if HAS_TRITON else [])
def test_tensors_that_have_no_memory_go_by_their_operators(name):
    """Outside their mode too, where a kernel would read from nowhere."""
    call, shapes = pieces()[name]
    mode = FakeTensorMode()
    given = [mode.from_tensor(torch.ones(shape)) for shape in shapes]
    result = call(*given)
    first = result[0] if isinstance(result, tuple) else result
    assert isinstance(first, FakeTensor)


def test_a_mode_counts_where_it_is():
    """One of another thread is nobody's here, whichever of them ends first."""
    begun, may_end = threading.Event(), threading.Event()

    def other():
        with Operators():
            begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(60)
    assert not launch.is_traced()
    with Operators():
        may_end.set()
        thread.join()
        assert launch.is_traced()
    assert not launch.is_traced()


class Operators(TorchDispatchMode):
    """Notes which operators of ours are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "narrowcast":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(pieces()) if HAS_TRITON else [])
def test_a_mode_is_told_of_every_operator_and_changes_nothing(name):
    call, shapes = pieces()[name]
    device = "cpu" if interpreted() else "cuda"
    torch.manual_seed(0)
    given = [torch.randn(shape, device=device) for shape in shapes]
    if name in ("turn_halves", "turn_heads"):
        given = [each.to(torch.bfloat16) if each.dim() == 4 else each for each in given]
        given[-1] = given[-1].float()
    else:
        given[0] = given[0].to(torch.bfloat16)
        given[1:] = [each.to(torch.bfloat16) if name == "gated" else each for each in given[1:]]
    learnt = [each.requires_grad_() for each in given if not name.startswith("turn")]
    learnt = learnt or [each.requires_grad_() for each in given if each.dtype == torch.bfloat16]

    def both_passes():
        result = call(*given)
        first = result[0] if isinstance(result, tuple) else result
        return first.detach(), *torch.autograd.grad(first.float().square().sum(), learnt)

    with Operators() as mode:
        seen = both_passes()
    assert len(mode.seen) == 2  # there and back
    assert mode.seen[0] == name.split()[0]
    for a, b in zip(seen, both_passes(), strict=True):
        assert torch.equal(a, b)


def test_every_kernel_is_launched_where_its_tensors_are():
    """Triton launches on the current device; `kernel[grid](…)` stands in one place that asks."""
    root = Path(narrowcast.__file__).parent
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in sources.items() if "triton" in text}
    kernels = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    }
    assert {"update", "_turn", "_rows_kernel"} <= kernels
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value) in kernels
    ]
    assert found == []


@dataclass(frozen=True)
class Place:
    """What a launch asks of a tensor on a GPU."""

    address: int = 256
    dtype: torch.dtype = torch.bfloat16
    where: int = 0
    count: int = 4

    device = property(lambda self: f"cuda:{self.where}")

    def get_device(self):
        return self.where

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.count


class Settings(NamedTuple):
    """Of a compiled kernel."""

    num_ctas: int


class Compiler:
    """Compiles anew whenever it is asked, as Triton does for arguments that it has not seen.

    What it makes runs in clusters, so that Triton launches it.
    """

    def __init__(self):
        self.made = []
        self.launched = []

    def run(self, *args, grid, warmup, **options):
        from triton.compiler import CompiledKernel

        assert warmup
        found = object.__new__(CompiledKernel)
        found.name, found.function, found.packed_metadata = "kernel", len(self.made), ()
        found.metadata, found.src = Settings(num_ctas=2), SimpleNamespace(signature={})
        found.module, found._run = self, self.note
        self.made.append(found)
        return found

    def note(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        self.launched.append((function, args))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A launcher as on a GPU, and what it has compiled and launched."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    compiler = Compiler()
    return launch.Launcher(compiler), compiler


ONE = {"tensors": (Place(), Place(512)), "sizes": (16, 33), "constants": (1e-5, True)}
ALIKE = [
    {"tensors": (Place(4096), Place(64))},  # elsewhere
    {"sizes": (32, 35)},  # as divisible
]
OTHERS = [
    {"tensors": (Place(), Place(513))},
    {"tensors": (Place(), Place(512, torch.float32))},
    {"sizes": (17, 33)},
    {"sizes": (16, 1)},
    {"sizes": (16, 2**31 + 1)},
    {"constants": (1e-6, True)},
    {"constants": (1e-5, False)},
    {"num_warps": 8},
    {"num_warps": None, "num_stages": 4},
]


def launched(launcher, **changed):
    given = ONE | {"num_warps": 4} | changed
    options = {k: v for k, v in given.items() if k.startswith("num") and v is not None}
    launcher((1, 1, 1), given["tensors"], given["sizes"], given["constants"], **options)


@pytest.mark.parametrize("changed", OTHERS, ids=str)
def test_what_triton_would_compile_anew_is_compiled_anew(on_a_gpu, changed):
    launcher, compiler = on_a_gpu
    for each in ({}, changed, {}, changed):
        launched(launcher, **each)
    assert [function for function, _ in compiler.launched] == [0, 1, 0, 1]


@pytest.mark.parametrize("changed", ALIKE, ids=str)
def test_what_is_alike_to_triton_is_launched_by_address(on_a_gpu, changed):
    launcher, compiler = on_a_gpu
    for each in ({}, {}, changed, changed):
        launched(launcher, **each)
    assert len(compiler.made) == 1
    given = ONE | changed
    addresses = [each.address for each in given["tensors"]]
    assert compiler.launched[-1] == (0, (*addresses, *given["sizes"], *given["constants"]))


@pytest.mark.parametrize(
    ("tensors", "known"),
    [
        ((Place(where=-1), Place()), False),
        ((Place(where=-1), Place()), True),
        ((Place(), Place(where=-1)), False),
        ((Place(), Place(where=1)), False),
        ((Place(), Place(address=0)), False),
        ((Place(), Place(address=0)), True),
        ((Place(address=0), Place()), True),
    ],
)
def test_memory_that_is_elsewhere_or_nowhere_is_refused(on_a_gpu, tensors, known):
    """Of a kernel that is known, only the first tensor is asked where it is."""
    launcher, _ = on_a_gpu
    if known:
        launched(launcher)
    with pytest.raises(UnsupportedError, match="one GPU"):
        launched(launcher, tensors=tensors)


def test_an_empty_tensor_needs_no_memory(on_a_gpu):
    launcher, compiler = on_a_gpu
    for _ in range(2):
        launched(launcher, tensors=(Place(), Place(address=0, count=0)))
    assert len(compiler.launched) == 2


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_that_two_threads_launch_compute_what_they_do_alone():
    from narrowcast.kernels.norms import layer_norm

    inputs = [torch.randn(64, 48, device=DEVICE).bfloat16() for _ in range(2)]
    weight, bias = torch.randn(2, 48, device=DEVICE)

    def normed(x):
        run = functools.partial(layer_norm, eps=1e-5, dtype=torch.bfloat16)
        return [run(x, weight, bias) for _ in range(8)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(normed, inputs))
    for x, several in zip(inputs, together, strict=True):
        assert all(torch.equal(each, normed(x)[0]) for each in several)
