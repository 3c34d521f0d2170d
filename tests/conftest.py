"""What holds for all tests, before any module is imported."""

import getpass
import importlib.util
import os
import pkgutil
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.fork_server import ForkedPopen

import narrowcast.kernels
from narrowcast.hardware.trial import CpuTrial, default_store, keep_trials

GPU = torch.cuda.is_available()
KERNELS = Path(__file__).parent / "kernels"

if not GPU:
    # Kernels run in Triton's interpreter, or not at all; which, a kernel learns as it is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        for module in pkgutil.iter_modules(narrowcast.kernels.__path__, "narrowcast.kernels."):
            importlib.import_module(module.name)

# Whether a CPU multiplies 16 bits by itself differs between machines, and numbers with it: all
# tests see one that takes too long for it, and emulate. Those of trials have stores of their own.
CACHE = Path(tempfile.gettempdir()) / f"narrowcast-tests-{getpass.getuser()}"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
keep_trials(default_store(), dict.fromkeys(("bf16", "fp16"), CpuTrial(died=False, slowdown=90.0)))

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with the end of a terminal.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long examples take depends on the machine and on what else runs on it.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="where to keep the pictures that tests make, such as docs/images; else nowhere",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let kernels be interpreted only where they are what is tested.

    Elsewhere a CPU computes as it does for everybody: in plain torch, in a tenth of the time.
    """
    if not GPU:
        wanted = KERNELS in item.path.parents or item.get_closest_marker("interpreted")
        os.environ["TRITON_INTERPRET"] = "1" if wanted else "0"


@pytest.hookimpl(tryfirst=True)  # before -m chooses among the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on a GPU and skip it where there is none; sample products of parameters."""
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()) or (GPU and _takes_a_gpu_if_any(item)):
            item.add_marker(pytest.mark.gpu)
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items[:] = _without_unsampled(items)


def _without_unsampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Drop the cases of tests marked `pairwise` or `sampled` that their sample does not need."""
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") or item.get_closest_marker("sampled"):
            on_gpu = item.get_closest_marker("gpu") is not None
            products[item.parent, item.originalname, on_gpu].append(item)
    dropped = set()
    for cases in products.values():
        sampled = cases[0].get_closest_marker("sampled")
        kept = _covering(cases, size=1, **sampled.kwargs) if sampled else _covering(cases, size=2)
        dropped |= set(cases) - kept
    return [item for item in items if item not in dropped]


def _covering(cases: list[pytest.Item], *, size: int, times: int = 1) -> set[pytest.Item]:
    """Choose cases greedily until `size` parameter values together occur `times` times each."""
    covers = {}
    for case in cases:
        values = [(name, id(value)) for name, value in case.callspec.params.items()]
        covers[case] = set(combinations(values, size))
    missing = Counter(dict.fromkeys(set().union(*covers.values()), times))
    left = random.Random(cases[0].originalname).sample(cases, len(cases))
    chosen = set()
    while left:
        gains = [sum(missing[each] > 0 for each in covers[case]) for case in left]
        if not max(gains):
            break
        case = left.pop(gains.index(max(gains)))
        missing.subtract(covers[case])
        chosen.add(case)
    return chosen


def _takes_a_gpu_if_any(item: pytest.Item) -> bool:
    """Say whether a test runs where the kernels do: on a GPU, or interpreted on a CPU."""
    chosen = getattr(getattr(item, "module", None), "DEVICE", "cpu")
    return KERNELS in item.path.parents or torch.device(chosen).type == "cuda"


@pytest.fixture
def cuda() -> torch.device:
    """The GPU: whoever asks for it is skipped where there is none."""
    return torch.device("cuda")


@pytest.fixture
def host_never_waits(cuda: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch raises on what waits for the device, except for an event."""

    @contextmanager
    def context() -> Iterator[None]:
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture(autouse=GPU)
def _waiting_is_allowed_again() -> Iterator[None]:
    """Let no test leave the mode of `host_never_waits` to those that follow."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """Reset accelerate's process-wide settings around every test.

    Fixtures that outlive a test, and libraries imported by one, may create them at any time.
    """
    _reset_accelerate()
    yield
    _reset_accelerate()


def _reset_accelerate() -> None:
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the Python programs that a test starts, which saves each the import of torch."""
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)


TINY = """\
workload: lm
description: as small as it gets
steps: 4
batch_size: 2
device: cpu
data: {length: 16, eval_windows: 2}
model: {layers: 3, width: 16, heads: 2}
optimizer: {lr: 0.01}
precision: {policy: fp16}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A recipe that a step takes milliseconds of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)
