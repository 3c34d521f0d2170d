import pytest
import torch

from narrowcast.strategies.hybrid.control.gru import (
    CellWeights,
    as_cells,
    gru_cell,
    head,
    initial_weights,
    shapes,
)

MEMBERS, WIDTH, HIDDEN = 3, 5, 4


def random_weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = [each.shape for each in shapes(MEMBERS, WIDTH, hidden=HIDDEN)]
    return CellWeights(*(torch.randn(s, generator=generator, dtype=dtype) for s in sizes))


def test_each_member_is_torchs_own_cell():
    weights = random_weights()
    inputs = torch.randn(MEMBERS, WIDTH, dtype=torch.float64)
    hidden = torch.randn(MEMBERS, HIDDEN, dtype=torch.float64)
    got = gru_cell(inputs, hidden, weights=weights)
    for member in range(MEMBERS):
        cell = torch.nn.GRUCell(WIDTH, HIDDEN, dtype=torch.float64)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell.load_state_dict({n: w[member] for n, w in zip(names, weights, strict=False)})
        expected = cell(inputs[member : member + 1], hidden[member : member + 1])
        torch.testing.assert_close(got[member : member + 1], expected)
        torch.testing.assert_close(
            head(got, weights=weights)[member],
            torch.nn.functional.linear(
                expected[0], weights.head_weight[member : member + 1], weights.head_bias[member]
            )[0],
        )


def test_the_backward_pass_agrees_with_finite_differences():
    weights = tuple(each.requires_grad_() for each in random_weights())
    inputs = torch.randn(MEMBERS, WIDTH, dtype=torch.float64, requires_grad=True)

    def two_steps(inputs, *weights):
        cells = CellWeights(*weights)
        hidden = gru_cell(inputs, torch.zeros(MEMBERS, HIDDEN).double(), weights=cells)
        return head(gru_cell(inputs, hidden, weights=cells), weights=cells)

    assert torch.autograd.gradcheck(two_steps, (inputs, *weights))


def test_first_weights_follow_the_seed_and_predict_no_change():
    made = [
        initial_weights(
            MEMBERS, WIDTH, hidden=HIDDEN, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    cells = as_cells(made[0], shapes(MEMBERS, WIDTH, hidden=HIDDEN))
    assert not head(torch.ones(MEMBERS, HIDDEN), weights=cells).any()
    # Xavier's bound for a gate of 4 by 5.
    assert float(cells.input_weight.abs().max()) == pytest.approx((6 / 9) ** 0.5, rel=0.05)
    assert not torch.equal(cells.input_weight[0], cells.input_weight[1])
