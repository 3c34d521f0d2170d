"""Without a GPU, Triton kernels run in Triton's interpreter; it asks before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
