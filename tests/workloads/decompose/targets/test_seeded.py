"""Linear layers of several seeds against torch's own, one by one."""

import pytest
import torch
from torch.nn import functional as F

from narrowcast.workloads.decompose.targets.toy import SeededLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("between", [(7,), (3, 4)])
def test_each_seed_multiplies_by_its_own_weights(bias, between):
    layer = SeededLinear(3, 5, 4, bias=bias).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, *between, 5, dtype=torch.float64)
    expected = [
        F.linear(x[seed], layer.weight[seed], layer.bias[seed] if bias else None)
        for seed in range(3)
    ]
    assert torch.allclose(layer(x), torch.stack(expected), rtol=0, atol=1e-14)
