"""Kernels are compiled for a GPU where there is none: what the interpreter lets pass may not be."""

import importlib.util
import os
import subprocess
import sys

import pytest

BUILD = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from narrowcast.workloads.decompose.components.kernels import importance, site

NARROW = {"out", "h", "x", "down", "grad_h", "grad"}
OTHERS = {"routed": "*u8", "seed": "*i64", "source_value": "fp32", "delta_value": "fp32"}
WIDE = {"importance", "source", "delta", "grad_importance", "grad_source", "sums", "V", "U",
        "other", "weights", "last"}


def build(kernel, *, warps=4, **constants):
    names = kernel.arg_names
    types = {n: "*bf16" for n in names if n in NARROW} | {n: "*fp32" for n in names if n in WIDE}
    types |= {n: "constexpr" for n in constants}
    signature = {n: types.get(n, OTHERS.get(n, "i32")) for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    made = compile(
        ASTSource(kernel, signature, values, {}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    assert made.asm["ptx"]


tile = {"ROWS": 16, "QUARTER": 64, "g_column": 1, "s_column": 1}
build(site._operand, SOURCE=3, DELTA=3, ROUTED=True, **tile)
needs = {f"NEEDS_{what}": True for what in ("IMPORTANCE", "SOURCE", "DELTA", "OPERAND")}
build(site._operand_back, SOURCE=2, DELTA=2, ROUTED=True, SUMMED=True, **needs, **tile)
build(site._weights, STACKED=True, BLOCK=1024)
build(importance._units, HIDDEN=16, BACK=True, BY_BITS=False, ROWS=32, COLUMNS=64)
build(importance._through_rows, TO_H=True, BY_BITS=False, BLOCK=256, LANES=32, UNITS=16, warps=1)
print("all built")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_every_kernel_is_accepted_by_the_compiler(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    script = tmp_path / "build.py"
    script.write_text(BUILD)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("all built\n"), done.stderr[-2000:]
