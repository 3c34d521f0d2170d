"""Without a GPU, Triton kernels run in Triton's interpreter; it asks before Triton is imported."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="where to keep the pictures that tests make, such as docs/images; else nowhere",
    )
