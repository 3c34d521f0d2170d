import ctypes
import os
import subprocess
import sys
import threading
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from narrowcast.kernels import cuda_driver
from narrowcast.kernels.cuda_driver import DriverLaunch, argument_indices

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from narrowcast.kernels.cuda_driver import argument_indices

@triton.jit
def kernel(x, y, n, m, k, WIDTH: triton.language.constexpr):
    triton.language.store(x, triton.language.load(y) + n + m + k)

for first, constants in (("i32", {}), ("constexpr", {(2,): 1}), ("fp32", {})):
    signature = dict(x="*fp32", y="*bf16", n=first, m="i64", k="i32", WIDTH="constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs={**constants, (5,): 16})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    entry = made.asm["ptx"].split(".entry kernel(")[1].split(")")[0]
    print(argument_indices(made), entry.count(".param"))
"""


def test_arguments_are_those_that_a_kernel_was_compiled_with(tmp_path):
    """Beside them, Triton's compiler adds two of its own, which it leaves empty."""
    pytest.importorskip("triton")
    script = tmp_path / "kernels.py"
    script.write_text(COMPILED)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.stdout.splitlines() == ["[0, 1, 2, 3, 4] 7", "[0, 1, 3, 4] 6", "None 7"], (
        ended.stderr
    )


def compiled(signature="*fp32 i32 i64", **changed):
    plain = {
        "num_ctas": 1, "num_warps": 4, "shared": 96, "launch_cooperative_grid": False,
        "launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    return SimpleNamespace(
        name="kernel",
        metadata=namedtuple("KernelMetadata", plain)(**plain | changed),
        src=SimpleNamespace(signature=dict(enumerate(signature.split()))),
    )


@pytest.mark.parametrize(
    "unusual",
    [{"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}]
    + [{name: 128} for name in ("global_scratch_size", "profile_scratch_size")]
    + [{"signature": f"*fp32 {kind}"} for kind in ("fp32", "i1", "u1", "nvTmaDesc")],
    ids=str,
)
def test_an_unusual_kernel_is_left_to_triton(unusual):
    assert argument_indices(compiled()) == [0, 1, 2]
    assert argument_indices(compiled(**unusual)) is None


class Driver:
    """Reads what `cuLaunchKernelEx` is given as CUDA does: from addresses, by the size of each."""

    def __init__(self, *answers):
        self.calls, self.contexts, self._answers = [], [], list(answers)

    def cuLaunchKernelEx(self, settings, function, places, extra):  # noqa: N802
        settings = ctypes.addressof(settings._obj)
        told = [ctypes.c_uint32.from_address(settings + 4 * i).value for i in range(7)]
        stream, attributes = (ctypes.c_uint64.from_address(settings + at).value for at in (32, 40))
        assert not attributes
        assert not ctypes.c_uint32.from_address(settings + 48).value
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64)
        values = [kind.from_address(places[i]).value for i, kind in enumerate(kinds)]
        given = tuple(told[:3]), tuple(told[3:6]), told[6]
        self.calls.append((function.value, *given, stream, values))
        return self._answers.pop(0) if self._answers else 0

    def cuDeviceGet(self, handle, device):  # noqa: N802
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.contexts.append(context)
        return 0

    def cuGetErrorString(self, number, text):  # noqa: N802
        text._obj.value = b"out of resources"
        return 0


@pytest.fixture
def driver(monkeypatch):
    def make(*answers):
        made = Driver(*answers)
        monkeypatch.setattr(cuda_driver, "_driver", lambda: made)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        return made

    return make


@pytest.mark.parametrize("values", [[2**47 + 16, 5, 2**40], [256, -7, -(2**40)], [0, 2**31 - 1, 0]])
def test_a_launch_hands_over_every_argument_in_its_own_size(driver, values):
    made = driver()
    DriverLaunch(compiled(), 77, [0, 1, 2])((3, 2, 1), 9, values)
    assert made.calls == [(77, (3, 2, 1), (128, 1, 1), 96, 9, values)]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_arguments_that_are_compiled_in_are_left_out(driver, place):
    made, kinds, given = driver(), ["*fp32", "i32", "i64"], [256, 40, 50]
    kinds.insert(place, "constexpr")
    given.insert(place, 1)
    kernel = compiled(" ".join(kinds))
    DriverLaunch(kernel, 77, argument_indices(kernel))((1, 1, 1), 9, given)
    assert made.calls[0][-1] == [256, 40, 50]


def test_every_grid_and_stream_is_told_as_it_is(driver, monkeypatch):
    monkeypatch.setattr(cuda_driver, "_KEPT", 2)
    made, launch = driver(), DriverLaunch(compiled(), 77, [0, 1, 2])
    asked = [((n, 1, 2), stream) for n in (1, 2, 3, 1) for stream in (0, 2**46, 7)]
    for grid, stream in asked:
        launch(grid, stream, [256, 1, 2])
    assert [(grid, stream) for _, grid, _, _, stream, _ in made.calls] == asked


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_a_grid_of_nothing_launches_nothing(driver, grid):
    made = driver()
    DriverLaunch(compiled(), 77, [0, 1, 2])(grid, 9, [256, 1, 2])
    assert made.calls == []


def test_a_thread_without_a_context_is_given_one(driver):
    made = driver(201, 0)
    DriverLaunch(compiled(), 77, [0, 1, 2])((1, 1, 1), 9, [256, 1, 2])
    assert len(made.calls) == 2
    assert len(made.contexts) == 1


def test_what_cuda_refuses_is_raised_with_its_words(driver):
    driver(701)
    with pytest.raises(RuntimeError, match=r"kernel over \(1, 1, 1\).* 701, out of resources"):
        DriverLaunch(compiled(), 77, [0, 1, 2])((1, 1, 1), 9, [256, 1, 2])


def test_threads_do_not_write_over_one_anothers_arguments(driver):
    """Between the writing and the reading another thread may have its turn."""
    made, launch = driver(), DriverLaunch(compiled(), 77, [0, 1, 2])

    def launches(number):
        for i in range(300):
            launch((1, 1, 1), number, [number, i, number])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=launches, args=(n,)) for n in (1, 2, 3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert len(made.calls) == 900
    for *_, stream, (address, _, last) in made.calls:
        assert address == last == stream


@pytest.mark.gpu
def test_a_new_thread_launches_as_any_other(cuda):
    from narrowcast.kernels.gelu import gelu

    x, found = torch.randn(4096, device=cuda), []
    expected = gelu(x)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(gelu(x)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.gpu
def test_our_kernels_are_launched_by_cudas_own_call(cuda):
    """For those that are not, a C compiler has to make a program first."""
    from narrowcast.kernels import gelu as module

    module.gelu(torch.randn(4096, device=cuda))
    known = module._launch_forward._by_sizes.values()
    assert known
    assert all(each._direct is not None for each in known)
