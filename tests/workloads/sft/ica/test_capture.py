import pytest
import torch

from narrowcast.errors import RecipeError
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
    with pytest.raises(RecipeError, match="once only; give a list or a data loader"):
        ModelSignals(make_model("llama"), iter(batches))


def test_a_layer_that_is_not_there_is_refused(make_model, batches):
    with pytest.raises(RecipeError, match="layer 3 of a model with 3"):
        ModelSignals(make_model("llama"), batches, layers=[3])
