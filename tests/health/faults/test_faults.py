import math

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.health.diagnose.explain import replay
from narrowcast.health.diagnose.passes import ReplayInputs
from narrowcast.health.faults.faults import Fault, Faults

ROLES = ["input", "weight", "output", "grad_output", "grad_weight"]


def faults_of(run, *, seed=0, **settings):
    fault = Fault(
        **{"step": 1, "module": "blocks.0.up", "role": "output", "value": "nan"} | settings
    )
    return Faults(run.model, [fault], seed=seed)


def faulty_step(run, loss_of, batches, faults):
    for number, each in enumerate(batches, start=1):
        with faults.during(number):
            with run.autocast():
                loss = loss_of(each)
            run.backward(loss / len(batches))
    return run.step()


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "policy", ["fp32", "bf16", "fp16", "fp8-tensor", "fp8-delayed", "bf16-pure"]
)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("value", ["inf", "nan", "large"])
def test_a_fault_is_skipped_named_and_gone_afterwards(net, batch, step, policy, role, value):
    run, loss_of = net(policy, max_skipped_steps=3)
    step(run, loss_of, [batch(9)])
    faults = faults_of(run, role=role, value=value, micro_batch=2).at(1)
    before = {name: t.clone() for name, t in run.fp32_state_dict().items()}
    given = [batch(0), batch(1), batch(2)]
    replay_inputs = ReplayInputs.before(run, given)
    outcome = faulty_step(run, loss_of, given, faults)
    after = run.fp32_state_dict()
    if value == "large" and outcome.applied:
        # An outlier that a norm divides away: nothing is left of it that anybody could see.
        assert role == "output"
        return
    assert not outcome.applied
    assert all(torch.equal(before[name], after[name]) for name in before)
    verdict = replay(run, replay_inputs, loss_of, around=faults.during)
    assert (verdict.module, verdict.role, verdict.micro_batch) == ("blocks.0.up", role, 2)
    assert verdict.kind == value or value == "large"
    assert all(step(run, loss_of, [batch(seed)]).applied for seed in range(3, 6))


def test_a_step_without_faults_has_none(net):
    run, _ = net()
    assert faults_of(run).at(2) is None
    assert faults_of(run).at(1) is not None


def test_faults_leave_no_hooks_behind(net, batch):
    run, loss_of = net()
    for role in ROLES:
        faulty_step(run, loss_of, [batch()], faults_of(run, role=role).at(1))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
    assert not any(p._backward_hooks for p in run.model.parameters())


def hit(run, loss_of, batch, *, seed=0, **settings):
    """Return which number of the output was hit."""
    seen = []
    handle = run.model.blocks[0].drop.register_forward_hook(
        lambda _, args, __: seen.append(args[0])
    )
    with faults_of(run, seed=seed, **settings).at(1).during(1), run.autocast():
        loss_of(batch)
    handle.remove()
    return seen[0].isnan().flatten().nonzero().flatten().tolist()


def test_the_number_is_the_one_asked_for_or_one_that_the_seed_chooses(net, batch):
    run, loss_of = net()
    assert hit(run, loss_of, batch(), index=37) == [37]
    chosen = {seed: hit(run, loss_of, batch(), seed=seed) for seed in range(5)}
    assert hit(run, loss_of, batch(), seed=3) == chosen[3]
    assert len({tuple(found) for found in chosen.values()}) > 1
    assert all(len(found) == 1 for found in chosen.values())


def test_a_weight_is_itself_again_even_after_an_error(net):
    run, _ = net()
    before = run.model.blocks[0].up.weight.detach().clone()
    faults = faults_of(run, role="weight", value="inf").at(1)

    def broken():
        with faults.during(1):
            assert run.model.blocks[0].up.weight.isinf().sum() == 1
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        broken()
    assert torch.equal(run.model.blocks[0].up.weight, before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"module": "blocks.*.up"},
            r"matches 2 modules \(blocks.0.up, blocks.1.up, …\). Write one",
        ),
        (
            {"module": "nowhere"},
            "matches no module. Write one module name that `narrowcast plan` lists",
        ),
        (
            {"module": "blocks.0.drop", "role": "weight"},
            "has no trained weight. Choose role=",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_refused_at_once(net, settings, said):
    run, _ = net()
    with pytest.raises(ConfigError, match=said):
        faults_of(run, **settings)


def test_a_fault_that_hit_nothing_is_not_passed_over_in_silence(net, batch):
    run, loss_of = net()
    faults = faults_of(run, module="blocks").at(1)  # a list, which nobody calls
    with pytest.raises(ConfigError, match="blocks has no floating-point output"):
        faulty_step(run, loss_of, [batch()], faults)


def test_a_glob_that_matches_one_module_will_do(net, batch):
    run, loss_of = net()
    outcome = faulty_step(run, loss_of, [batch()], faults_of(run, module="*.1.down").at(1))
    assert not outcome.applied
    assert math.isnan(outcome.grad_norm)


@pytest.mark.parametrize("role", ["weight", "grad_weight"])
def test_of_a_module_whose_weight_is_frozen_the_bias_is_hit(role):
    model = torch.nn.Linear(4, 2)
    model.weight.requires_grad_(False)
    fault = Fault(step=1, module="", role=role, value="nan", index=1)
    with Faults(model, [fault], seed=0).at(1).during(1):
        if role == "weight":
            assert model.bias.isnan().tolist() == [False, True]
        model(torch.ones(3, 4)).sum().backward()
    assert model.bias.grad.isnan().tolist() == [False, role == "grad_weight"]
    assert model.bias.isfinite().all()


@pytest.mark.parametrize("role", ["input", "output", "grad_output"])
def test_a_batch_without_rows_has_nothing_to_hit(role):
    model = torch.nn.Linear(4, 2)
    fault = Fault(step=1, module="", role=role, value="nan")
    faults = Faults(model, [fault], seed=0).at(1)

    def passes():
        with faults.during(1):
            model(torch.ones(0, 4)).sum().backward()

    with pytest.raises(ConfigError, match=f"no floating-point {role}"):
        passes()
