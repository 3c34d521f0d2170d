import pytest
import torch
from torch import nn

from narrowcast.precision.plan.module_plan import module_kind


class LlamaRMSNorm(nn.Module):
    pass


class LayerNorm2d(nn.Module):
    pass


class Normalise(nn.Module):
    pass


class NormThenMore(nn.Module):
    pass


class BlockNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


class MyLinear(nn.Linear):
    pass


MODULES = [
    (nn.Linear(2, 2), "linear"),
    (MyLinear(2, 2), "linear"),
    (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "linear"),
    (nn.Conv1d(2, 2, 1), "convolution"),
    (nn.ConvTranspose3d(2, 2, 1), "convolution"),
    (nn.MultiheadAttention(2, 1), "attention"),
    (nn.LSTM(2, 2), "recurrent"),
    (nn.GRUCell(2, 2), "recurrent"),
    (nn.EmbeddingBag(2, 2), "embedding"),
    (nn.RMSNorm(2), "normalisation"),
    (nn.SyncBatchNorm(2), "normalisation"),
    (nn.InstanceNorm2d(2), "normalisation"),
    (nn.LocalResponseNorm(2), "normalisation"),
    (LlamaRMSNorm(), "normalisation"),
    (LayerNorm2d(), "normalisation"),
    (BlockNorm(), "other"),
    (Normalise(), "other"),
    (NormThenMore(), "other"),
    (nn.Bilinear(2, 2, 2), "other"),
    (nn.GELU(), "other"),
]


@pytest.mark.parametrize(("module", "kind"), MODULES, ids=lambda v: str(v).split("(")[0])
def test_a_module_is_of_the_kind_its_class_or_name_says(module, kind):
    assert module_kind(module) == kind


def test_every_norm_torch_has_is_a_normalisation():
    norms = [name for name in dir(nn) if name.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d"))]
    assert len(norms) > 10
    arguments = {"GroupNorm": (1, 2), "CrossMapLRN2d": (2,)}
    with torch.device("meta"):
        built = [getattr(nn, n)(*arguments.get(n, (2,))) for n in norms if "Lazy" not in n]
    assert {module_kind(norm) for norm in built} == {"normalisation"}
