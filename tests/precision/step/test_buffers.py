"""What a skipped step takes back of buffers: what its passes wrote, and nothing else."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.precision.step.buffers import BufferGuard

YES, NO = torch.tensor(True), torch.tensor(False)
GOOD = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
BAD = torch.full((8, 3), math.nan)


def take_pass(guard, module, batch):
    guard.begin_pass()
    module(batch)
    guard.end_pass()


def take_step(guard, module, batch, finite):
    take_pass(guard, module, batch)
    guard.after_passes(finite)
    guard.end_step()


def batch_norm_after(*batches):
    norm = nn.BatchNorm1d(3)
    guard = BufferGuard(norm)
    for batch, finite in batches:
        take_step(guard, norm, batch, finite)
    return norm


def same(one, other):
    one, other = (
        each.state_dict() if isinstance(each, nn.Module) else each for each in (one, other)
    )
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_skipped_step_leaves_batch_norm_as_it_was(first):
    before = () if first else ((GOOD, YES),)
    assert same(batch_norm_after(*before, (BAD, NO)), batch_norm_after(*before))


def test_an_applied_step_leaves_batch_norm_as_torch_does():
    plain = nn.BatchNorm1d(3)
    plain(GOOD)
    assert same(batch_norm_after((GOOD, YES)), plain)


class Running(nn.Module):
    """Keeps its statistic by putting a new tensor in the buffer's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x


def test_a_buffer_that_a_pass_replaces_rather_than_writes_is_guarded():
    module = Running()
    guard = BufferGuard(module)
    take_step(guard, module, torch.tensor([1.0]), YES)
    take_step(guard, module, torch.tensor([math.inf]), NO)
    assert module.mean == 0.5


def test_a_bad_buffer_is_restored_though_every_gradient_was_finite():
    module = Running()
    take_step(BufferGuard(module), module, torch.tensor([math.nan]), YES)
    assert module.mean == 0.0


def test_infinities_that_belong_to_a_buffer_stay_in_it():
    module = Running()
    take_step(BufferGuard(module), lambda _: module.mask.add_(1.0), GOOD, YES)
    assert torch.equal(module.mask, torch.tensor([1.0, -math.inf]))


@pytest.mark.parametrize("other", [torch.ones(5), torch.ones((), dtype=torch.float64), None])
def test_a_buffer_of_another_shape_or_dtype_stays_unless_the_step_is_skipped(other):
    module = Running()
    guard = BufferGuard(module)
    replace = lambda _: setattr(module, "mean", other)  # noqa: E731
    take_step(guard, replace, GOOD, NO)
    assert module.mean.shape == ()
    assert module.mean.dtype == torch.float32
    assert module.mean == 0.0
    take_step(guard, replace, GOOD, YES)
    assert module.mean is other


def test_a_queue_that_grows_is_as_long_as_before_a_skipped_step():
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(0, 2))
    guard = BufferGuard(module)

    def grow(x):
        module.queue = torch.cat([module.queue, x])

    good, bad = torch.ones(3, 2), torch.full((3, 2), math.nan)
    for x, finite in ((good, YES), (bad, NO), (bad, NO), (2 * good, YES)):
        take_step(guard, grow, x, finite)
    assert torch.equal(module.queue, torch.cat([good, 2 * good]))


def test_a_buffer_that_the_user_resizes_between_passes_stays():
    module = Running()
    guard = BufferGuard(module)
    take_step(guard, module, torch.tensor([1.0]), YES)
    module.mean = torch.ones(5)
    take_step(guard, lambda _: None, GOOD, NO)
    assert torch.equal(module.mean, torch.ones(5))


def test_a_buffer_made_in_inference_mode_is_guarded_once_a_step_has_made_another():
    module = Running()
    guard = BufferGuard(module)
    with torch.inference_mode():
        module(torch.tensor([2.0]))
    take_step(guard, module, torch.tensor([3.0]), YES)
    take_step(guard, module, torch.tensor([math.nan]), NO)
    assert module.mean == 2.0


def test_what_a_checkpoint_loaded_is_trusted():
    module = Running()
    guard = BufferGuard(module)
    module.mean.fill_(7.0)
    guard.reset()
    take_step(guard, module, torch.tensor([math.nan]), NO)
    assert module.mean == 7.0


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def prepared(model, policy="fp16", **settings):
    return nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, **settings)


def step(run, x=GOOD, *, bad=False):
    with run.autocast():
        loss = run.model(x).float().square().mean()
    return run.step(loss * math.inf if bad else loss)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16-pure"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_pretrained_statistics_loaded_after_prepare_survive_a_skipped_step(policy, steps_before):
    pretrained = net()
    for _ in range(50):
        pretrained(GOOD)
    model = net()
    run = prepared(model, policy)
    for _ in range(steps_before):
        step(run)
    model.load_state_dict(pretrained.state_dict())
    assert not step(run, bad=True).applied
    assert torch.equal(model[1].running_mean, pretrained[1].running_mean)
    assert model[1].num_batches_tracked == 50


class Queue(nn.Module):
    """Keeps what it has seen in a buffer that the user moves between steps, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        return self.linear(x)


@pytest.mark.parametrize("when", ["before", "between passes", "after the last pass"])
def test_what_the_user_writes_around_the_passes_stays(when):
    model = Queue()
    run = prepared(model)
    step(run)

    def write(now):
        if when == now:
            model.queue.copy_(torch.arange(4.0))
            model.passes.fill_(100)

    write("before")
    for number in range(2):
        with run.autocast():
            loss = model(GOOD).float().square().mean() * math.inf
        run.backward(loss)
        write("after the last pass" if number else "between passes")
    assert not run.step().applied
    assert model.queue.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.passes == 100


def test_all_passes_of_an_accumulated_step_are_taken_back():
    model = Queue()
    run = prepared(model)
    for bad in (False, True):
        for _ in range(3):
            with run.autocast():
                loss = model(GOOD).float().square().mean()
            run.backward(loss * (math.inf if bad else 1.0))
        run.step()
    assert model.passes == 3


@pytest.mark.parametrize("inside", [True, False], ids=["in compute", "outside"])
def test_a_recalibration_of_batch_norms_between_steps_stays(inside):
    """Passes in training mode without gradients, of which no step is made."""
    model = net()
    run = prepared(model)
    step(run)
    other = GOOD * 3 + 1
    with torch.no_grad(), run.autocast() if inside else contextlib.nullcontext():
        for _ in range(5):
            model(other)
    before = copied(model[1])
    assert not step(run, bad=True).applied
    assert same(model[1], before)


def test_a_recalibration_in_a_region_that_was_entered_with_gradients_stays():
    """As `with run.autocast(), torch.no_grad():`, where the model itself tells of its passes."""
    norm = nn.BatchNorm1d(3)
    guard = BufferGuard(norm)
    guard.begin_pass()
    with torch.no_grad():
        take_pass(guard, norm, 2 * GOOD + 1)
    guard.end_pass()
    before = copied(norm)
    take_step(guard, norm, BAD, NO)
    assert same(norm, before)


def test_a_model_called_without_telling_has_its_running_statistics_back():
    model = net()
    run = prepared(model, "fp32")
    for bad in (False, True):
        mean = model[1].running_mean.clone()
        loss = model(GOOD).square().mean()
        assert run.step(loss * (math.inf if bad else 1.0)).applied is not bad
    assert torch.equal(model[1].running_mean, mean)
    assert not torch.equal(mean, torch.zeros(4))


def test_what_is_loaded_into_a_model_called_without_telling_stays():
    model = net()
    run = prepared(model, "fp32")
    run.step(model(GOOD).square().mean())
    step(run)  # a step that does tell, in between
    model[1].running_mean.fill_(3.0)
    run.step(model(GOOD).square().mean() * math.inf)
    assert (model[1].running_mean > 2).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_checkpointed_parts_write_going_backwards_is_taken_back(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(self.norm, self.first(x), use_reentrant=use_reentrant)

    model = Checkpointed()
    run = prepared(model)
    step(run)
    before = copied(model.norm)
    assert not step(run, bad=True).applied
    assert same(model.norm, before)


def test_steps_inside_one_long_region_are_guarded_one_by_one():
    model = net()
    run = prepared(model)
    with run.autocast():
        run.step(model(GOOD).float().square().mean())
        before = copied(model[1])
        run.step(model(GOOD).float().square().mean() * math.inf)
        assert same(model[1], before)


def test_a_step_taken_aside_between_pass_and_step_changes_nothing_of_it():
    model = net()
    run = prepared(model)
    step(run)
    before = copied(model[1])
    with run.autocast():
        loss = model(GOOD).float().square().mean() * math.inf
    with run.engine.isolated(), run.autocast():
        model(GOOD)
    assert not run.step(loss).applied
    assert same(model[1], before)


class Operations(TorchDispatchMode):
    """Counts what is asked of torch, but for views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_as_few_operations_guard_many_batch_norms_as_one():
    def operations(number):
        model = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(number)])
        guard = BufferGuard(model)
        take_step(guard, model, GOOD, YES)
        counted = Operations()
        with counted:
            guard.begin_pass()
        with torch.enable_grad():
            model(GOOD)
        with counted:
            guard.end_pass()
            guard.after_passes(YES)
            guard.end_step()
        return counted.count

    assert operations(2) == operations(50)  # of one tensor nothing needs to be joined
    assert operations(50) <= 16


def test_buffers_that_no_pass_writes_cost_no_operation():
    module = Running()
    guard = BufferGuard(module)
    with Operations() as counted:
        take_step(guard, lambda _: None, GOOD, YES)
        take_step(guard, lambda _: None, GOOD, NO)
    assert counted.count == 0


class Recorded(TorchDispatchMode):
    """Does again what was asked of torch, in the same memory, as a captured CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(out), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Counting(nn.Module):
    """A batch norm, and a buffer that passes write and torch counts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.norm(x)


@pytest.mark.parametrize("which", [0, 1], ids=["first update", "second update"])
def test_a_captured_step_guards_without_the_host_whichever_update_is_replayed(which):
    captured, launched = Counting(), Counting()
    guards = [BufferGuard(module) for module in (captured, launched)]
    for guard, module in zip(guards, (captured, launched), strict=True):
        take_step(guard, module, GOOD, YES)
    batch, finite = GOOD.clone(), YES.clone()
    passes, updates = Recorded(), [Recorded(), Recorded()]
    before = copied(captured)
    with passes:
        guards[0].begin_pass()
        captured(batch)
        guards[0].end_pass()
    for update in updates:  # one that measures and one that does not
        with update:
            guards[0].after_passes(finite)
    guards[0].end_step()
    with torch.no_grad():
        for name, buffer in captured.named_buffers():
            buffer.copy_(before[name])
    for number, (x, good) in enumerate([(2 * GOOD, YES), (BAD, NO), (3 * GOOD, YES), (BAD, NO)]):
        for module in (captured, launched):
            if number == 3:
                module.mean.fill_(7.0)
                module.norm.running_mean.fill_(5.0)
        batch.copy_(x)
        finite.copy_(good)
        passes.replay()
        updates[which].replay()
        with Operations() as counted:
            guards[0].end_step()
        assert counted.count == 0
        take_step(guards[1], launched, x, good)
        assert same(captured, launched), number
    assert (captured.mean == 7).all()
    for x, good in ((GOOD, YES), (BAD, NO)):  # launched again
        for guard, module in zip(guards, (captured, launched), strict=True):
            take_step(guard, module, x, good)
    assert same(captured, launched)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_region_inside_compiled_code_is_traced_as_ever():
    torch._dynamo.reset()
    model = net()
    run = prepared(model, "fp32")

    def loss_of(x):
        with run.autocast():
            return model(x).square().mean()

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    mean = model[1].running_mean.clone()
    assert run.step(compiled(GOOD)).applied
    assert not torch.equal(model[1].running_mean, mean)


class Remembering(nn.Module):
    """Keeps what it computed in the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("state", torch.zeros(3, 6))
        self.register_buffer("halved", torch.zeros(3, dtype=torch.bfloat16))

    def forward(self, x):
        h = self.inner(x) + self.state
        self.state = self.inner(x).detach()
        return self.outer(torch.tanh(h))


@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16"])
def test_a_released_model_has_its_buffers_in_the_formats_they_came_in(policy):
    model, x = Remembering(), torch.randn(3, 6)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=policy)
    with run.autocast():
        loss = model(x).float().square().mean()
    run.step(loss)
    state = model.state.float()
    run.release()
    assert torch.equal(model.state, state)
    assert (model.state.dtype, model.halved.dtype) == (torch.float32, torch.bfloat16)
    model(x)


def test_a_buffer_that_two_modules_share_is_still_one_when_released():
    model = nn.Sequential(Remembering(), nn.Module())
    model[1].register_buffer("state", model[0].state)
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16")
    model[0].state = model[1].state = torch.ones(3, 6, dtype=torch.bfloat16)
    run.release()
    assert model[0].state is model[1].state
    assert model[0].state.dtype == torch.float32
