"""What holds for all tests, before any module is imported."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter; it asks before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are drawn says something of the machine: the first text waits for the tables of
# Unicode, seconds on a busy one.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="where to keep the pictures that tests make, such as docs/images; else nowhere",
    )
