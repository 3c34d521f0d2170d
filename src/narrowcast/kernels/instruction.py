"""One instruction of the GPU for each element, where Triton would make detours."""

import triton
import triton.language as tl


@triton.jit
def instruction(x, ASSEMBLY: tl.constexpr):
    """Return what an instruction makes of each float."""
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
