import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import ModelSignals
from narrowcast.workloads.sft.ica.blocks import find_blocks


def hooks_in(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_signals_are_what_the_mlps_put_out(model, batches):
    signals = ModelSignals(model, batches)
    chunks = list(signals)
    assert [tuple(chunk.shape) for chunk in chunks] == [(16, 48), (12, 48)]
    heard = []
    mlp = find_blocks(model).blocks[1].mlp
    handle = mlp.register_forward_hook(lambda _m, _a, output: heard.append(output))
    with torch.no_grad():
        model.eval()(**batches[1])
    handle.remove()
    kept = batches[1]["attention_mask"].bool()
    assert torch.equal(chunks[1][:, 16:32], heard[0][kept])


def test_inputs_of_down_projections_lead_to_the_outputs(model, batches):
    inputs = next(iter(ModelSignals(model, batches, layers=[2], site="down_input")))
    outputs = next(iter(ModelSignals(model, batches, layers=[2])))
    down = find_blocks(model).blocks[2].down.module
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(down(inputs[None])[0], outputs)


def test_signals_are_the_same_each_time_and_leave_nothing_behind(model, batches):
    signals = ModelSignals(model, batches)
    model.train()
    before, frozen = hooks_in(model), [m.training for m in model.modules()]
    once, twice = list(signals), list(signals)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    iterator = iter(signals)
    next(iterator)
    # In the middle of a pass, too.
    assert hooks_in(model) == before
    assert [m.training for m in model.modules()] == frozen
    assert not once[0].requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_a_compiled_model_is_heard_too(make_model, batches):
    plain = make_model("llama")
    expected = next(iter(ModelSignals(plain, batches)))
    compiled = torch.compile(plain, backend="eager")
    compiled(**batches[0])
    assert torch.equal(next(iter(ModelSignals(compiled, batches))), expected)


def test_signals_come_in_the_dtype_of_the_model(make_model, batches):
    model = make_model("llama").bfloat16()
    signals = ModelSignals(model, batches)
    assert signals.dtype == next(iter(signals)).dtype == torch.bfloat16


def test_batches_that_are_gone_after_one_pass_are_refused(make_model, batches):
    with pytest.raises(ConfigError, match=r"only once. Pass a list or a data loader"):
        ModelSignals(make_model("llama"), iter(batches))


def test_a_layer_that_is_not_there_is_refused(make_model, batches):
    with pytest.raises(ConfigError, match="layers must be below depth=3, got 3"):
        ModelSignals(make_model("llama"), batches, layers=[3])


def test_skip_first_leaves_out_the_first_tokens_of_each_sequence(make_model):
    model, ids = make_model("llama"), torch.arange(16).view(2, 8)
    whole = next(iter(ModelSignals(model, [{"input_ids": ids}]))).view(2, 8, 48)
    (rows,) = ModelSignals(model, [{"input_ids": ids}], skip_first=3)
    assert torch.equal(rows, whole[:, 3:].flatten(0, 1))


def test_skip_first_counts_from_the_end_of_left_padding(make_model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": mask}
    model = make_model("llama")
    (whole,), (rows,) = ModelSignals(model, [batch]), ModelSignals(model, [batch], skip_first=1)
    assert torch.equal(rows, whole[[1, 2, 3, 5, 6, 7, 8, 9]])


def test_skip_first_applies_to_every_sequence_of_a_packed_row(make_model):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    batch = {"input_ids": torch.arange(8)[None], "position_ids": positions}
    model = make_model("llama")
    (whole,), (rows,) = ModelSignals(model, [batch]), ModelSignals(model, [batch], skip_first=1)
    assert torch.equal(rows, whole[[1, 2, 4, 6, 7]])


def test_skipping_everything_is_refused(make_model, batches):
    with pytest.raises(ConfigError, match="No sequence has more than skip_first=8 tokens"):
        list(ModelSignals(make_model("llama"), batches, skip_first=8))


@pytest.mark.parametrize("skip_first", [-1, 1.5, True, "1"])
def test_skip_first_is_a_number_of_tokens(make_model, batches, skip_first):
    with pytest.raises(ConfigError, match="skip_first must be a whole number"):
        ModelSignals(make_model("llama"), batches, skip_first=skip_first)
