"""The weights a run trains: their names, their full values, and how one step updates them.

A copy of a model has no master weights, so 16-bit weights are copied in fp32.
"""

import contextlib
import copy
import io
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from narrowcast.errors import ConfigError
from narrowcast.precision.dtensor import (
    as_sharded,
    check_dtypes_stay,
    check_sharded,
    replace_values,
    sharded_like,
)
from narrowcast.precision.gradients.check import (
    Checked,
    check_norms,
    check_reduced,
    gradient_norms,
)
from narrowcast.precision.gradients.ranks import rank_group
from narrowcast.precision.modules.rewrite import (
    check_shared_memory,
    compact_recurrent,
    rewrite,
    rewrite_modules,
    set_grad_dtype,
    storage_dtype,
    weight_formats,
)
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.swap import Transparent, swap
from narrowcast.precision.swap import restore as restore_modules
from narrowcast.precision.weights.fused_adamw import FusedAdamW
from narrowcast.precision.weights.lookahead import Lookahead, LookaheadPoint
from narrowcast.precision.weights.master import Full, MasterWeights, WeightAverage, multiply, recast
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.ownership import Ownership, ValueOf
from narrowcast.precision.weights.torch_update import TorchUpdate, gradient_factors
from narrowcast.precision.weights.update_path import (
    OwnWrites,
    check_hidden_weights,
    check_host_moments,
)

Take = Callable[[nn.Parameter, Tensor], None]
"""Keeps digits of a value that a weight was given."""

_OURS = ("__deepcopy__", "__reduce_ex__", "nc_take")


class LoadsInFull(Transparent):
    """A module with such weights, and the modules through which a state dict is loaded."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, weight in self._parameters.items():
            # By now hooks have made of the state what is loaded.
            take, value = getattr(weight, "nc_take", None), state_dict.get(prefix + name)
            if take is not None and isinstance(value, Tensor):
                take(value)


def show_in_full(model: nn.Module, weights: Set[nn.Parameter], shown: Full, take: Take) -> None:
    """Copy weights through the method `shown` and load them through `take`."""
    if weights:
        # What is sent to another process goes by the type, past the weight's own `__reduce_ex__`.
        ForkingPickler.register(nn.Parameter, _sent)
    for weight in weights:
        _show_one(weight, shown, take)
    for module in model.modules():
        if any(weight in weights for weight in module._parameters.values()):
            swap(module, LoadsInFull)


def show_as_it_is(weight: nn.Parameter) -> None:
    """Undo `show_in_full` for a weight; its module is restored with all others."""
    for name in _OURS:
        vars(weight).pop(name, None)


def _show_one(weight: nn.Parameter, shown: Full, take: Take) -> None:
    # The weight holds these, which therefore hold neither it nor those who keep it.
    stored, showing, taking = (
        weakref.ref(weight),
        weakref.WeakMethod(shown),
        weakref.WeakMethod(take),
    )

    def made() -> nn.Parameter:
        source, of = stored(), showing()
        assert source is not None
        value = source.detach().float() if of is None else of(source)
        whole = nn.Parameter(value.detach().clone(), requires_grad=source.requires_grad)
        vars(whole).update({k: v for k, v in vars(source).items() if k not in _OURS})
        return whole

    def load(value: Tensor) -> None:
        source, into = stored(), taking()
        if source is not None and into is not None:
            into(source, value)

    def deepcopy(_: dict[int, Any]) -> nn.Parameter:
        return made()

    def reduce_ex(protocol: Any) -> Any:
        return made().__reduce_ex__(protocol)

    vars(weight).update(dict(zip(_OURS, (deepcopy, reduce_ex, load), strict=True)))


def _sent(weight: nn.Parameter) -> Any:
    """Reduce a weight for another process: in full and by value, or as torch does where it is."""
    if "nc_take" not in vars(weight):
        return reduce_tensor(weight)
    # By value: shared memory would have to outlive the copy.
    content = io.BytesIO()
    torch.save(copy.deepcopy(weight), content)
    return _received, (content.getvalue(),)


def _received(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


_GRAD = attrgetter("grad")  # mapped over all weights, several times a step


class TrainedWeights:
    """What the optimizer was given, in the model's order, and the master weights among it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        held = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        names = {p: name for name, p in model.named_parameters() if p in held}
        # The model's order is from input to output, and the one torch takes a total norm in.
        self.all = [*names, *(p for p in held if p not in names)]
        self.names = [names.get(p, f"weight {i}") for i, p in enumerate(self.all)]
        self.last_uses = _last_uses(model, self.all, self.names)
        self.device = self.all[0].device
        self._model, self.optimizer = model, optimizer
        self.ranks = rank_group(self.all, model.parameters())
        """The ranks that decide together about a step; None without other ranks."""
        parts = dict.fromkeys((optimizer, *member_optimizers(optimizer)))
        self.held = {each: [p for g in each.param_groups for p in g["params"]] for each in parts}
        """Which weights each optimizer was given: the one, or several and the whole of them."""
        self._lowered: set[nn.Parameter] = set()
        self._narrow: dict[str, nn.Parameter] = {}
        self._storage: tuple[object, ...] = ()
        self.masters = MasterWeights([], [], "none")
        self._emulated = False
        self.reduce_dtype = torch.float32
        """The format in which ranks add up gradients."""
        self.fused: FusedAdamW | None = None
        self.average: WeightAverage | None = None
        self.lookahead: LookaheadPoint | None = None
        self.aside: dict[nn.Parameter, Tensor] = {}
        """The digits of the trained weights while other values are swapped in."""
        self._master_index: dict[nn.Parameter, int] = {}
        self._ownership: Ownership | None = None
        self._own_writes: OwnWrites | None = None

    def apply(self, plan: Plan, *, fused: bool, seed: int = 0) -> None:
        """Apply a plan; `seed` is used for `stochastic` rounding."""
        self.forget_gradients()  # one from before has neither the dtype nor the scale of the rest
        trained = self._trained()
        lowered = rewrite(self._model, plan, trained)
        for p, value in lowered:
            if as_sharded(p) is not None:
                replace_values(p, value.to(p.dtype))
        self._lowered = {p for p, _ in lowered}
        show_in_full(self._model, self._lowered, self._shown, self._take)
        self._storage = _storage(self._model, plan, trained)
        self._narrow = _of_16_bits(zip(self.names, self.all, strict=True), self._lowered)
        params, full = [p for p, _ in lowered], [value for _, value in lowered]
        self.masters = MasterWeights(params, full, plan.policy.master or "none", seed=seed)
        self._master_index = {p: i for i, p in enumerate(self.masters.parameters)}
        self.masters.adopt(self.optimizer)
        self._emulated = plan.emulated and plan.policy.master == "none"
        self.reduce_dtype = storage_dtype(plan.policy.reduce)
        self.fused = None
        if fused:
            host = plan.memory.offloads_optimizer
            self.fused = FusedAdamW(
                self.optimizer, self.all, self.masters, policy=plan.policy, offloaded=host
            )
        self._ownership = Ownership(
            self._model, self.optimizer, self.all, self.names, held=self.held
        )
        self._own_writes = OwnWrites(self._model, self.optimizer, self.masters, self._ownership)
        _APPLIED.add(self)

    def check_plan(self, plan: Plan, *, fused: bool, path: str) -> None:
        """Raise if these weights cannot be stored as planned; change nothing."""
        check_hidden_weights(self.optimizer, set(self.all), plan)
        formats = weight_formats(self._model, plan, self._trained())
        if self._storage and formats != self._storage[0]:
            instead = "Choose a policy with the same params="
            check_dtypes_stay(self._model, doing="set_policy()", instead=instead)
        check_sharded(self._model, formats, grads_format=plan.policy.grads_format)
        stored = {p: storage_dtype(formats.get(p, "fp32")) for p in self._trained()}
        if not self._storage and any(p.dtype != dtype for p, dtype in stored.items()):
            instead = "Call prepare() before the first forward pass"
            check_dtypes_stay(self._model, doing="prepare()", instead=instead, after_forward=True)
        check_shared_memory(self._model, self._trained(), plan)
        check_host_moments(self.all, plan, fused=fused, path=path)

    @property
    def ownership(self) -> Ownership:
        """What notices changes behind our back; there is none once all was given back."""
        if self._ownership is None:
            raise ConfigError("This run was released. Call prepare() again.")
        return self._ownership

    def convert(self, before: Plan, plan: Plan, *, fused: bool, seed: int) -> None:
        """Carry out another plan in place of the one in force.

        Every weight passes through its fp32 value, so fp32 weights and `fp32` and `split` masters
        become one another bit for bit. Moments keep their values in the new formats. Two fp32
        copies of the changed weights exist for a moment.
        """
        if self._storage == _storage(self._model, plan, self._trained()):
            restore_modules(self._model)
            rewrite_modules(self._model, plan)
            self._emulated = plan.emulated and plan.policy.master == "none"
            return
        codes = "int8"  # by themselves: made into numbers and back they would round once more
        both = before.policy.moments_format == plan.policy.moments_format == codes
        self.restore(keep_codes=both and fused, stay_on_host=plan.memory.offloads_optimizer)
        self.masters, self._master_index = MasterWeights([], [], "none"), {}
        self.apply(plan, fused=fused, seed=seed)

    def restore(self, *, keep_codes: bool = False, stay_on_host: bool = False) -> None:
        """Undo `apply`; `keep_codes` and `stay_on_host` leave moments as they are stored."""
        self.let_go()
        if self.fused is not None and not keep_codes:
            self.fused.release(stay_on_host=stay_on_host)
        full = [(p, self.full(p)) for p in self._lowered]
        restore_modules(self._model)
        originals = dict(zip(self.masters.fp32_params, self.masters.parameters, strict=True))
        for parameter, value in full:
            parameter.grad = None
            show_as_it_is(parameter)
            replace_values(parameter, value)
            set_grad_dtype(parameter, value.dtype)
        compact_recurrent(self._model)
        for group in self.optimizer.param_groups:
            group["params"] = [originals.get(p, p) for p in group["params"]]
        for fp32_param, parameter in originals.items():
            if fp32_param in self.optimizer.state:
                self.optimizer.state[parameter] = self.optimizer.state.pop(fp32_param)
        recast(self.optimizer, self.masters.parameters)

    def let_go(self) -> None:
        """Release the optimizer."""
        _APPLIED.discard(self)
        _give_back(self._ownership, self._own_writes)
        self._ownership = None

    def keep_average(self, *, decay: float) -> None:
        """Keep an average of the weights from now on, whatever plan is carried out later."""
        self.average = WeightAverage(self.all, self.full, decay=decay)

    def look_ahead(self, settings: Lookahead) -> None:
        """Set the weights to the lookahead point of the current optimizer position."""
        self.lookahead = LookaheadPoint(self.all, settings)

    def _trained(self) -> Set[nn.Parameter]:
        """Return the weights that are kept as a policy says: the rest stay as they came."""
        return {p for p in self.all if p.requires_grad}

    def with_gradients(self) -> list[int]:
        """Return the places of the weights that have a gradient now, on any rank if replicated."""
        if self.ranks is not None and any(
            gradient is not None for gradient in map(_GRAD, self.all)
        ):
            self.ranks.fill_replicated()
        return [i for i, gradient in enumerate(map(_GRAD, self.all)) if gradient is not None]

    def gradients(self, present: Sequence[int]) -> list[Tensor]:
        """Return the gradients of the weights in these places, which have one."""
        return [g for g in map(_GRAD, [self.all[i] for i in present]) if g is not None]

    def forget_gradients(self) -> None:
        """Drop every gradient."""
        for p in self.all:
            p.grad = None

    def full(self, weight: nn.Parameter) -> Tensor:
        """Return a weight with every digit that is kept of it, in the dtype it came in."""
        index, own = self._master_index.get(weight), self.aside.get(weight)
        if index is None:
            return weight.detach() if own is None else own
        return self.masters.full(index, own)

    def averaged(self, weight: nn.Parameter) -> Tensor:
        """Return the average of a weight; the weight where it has none."""
        average = None if self.average is None else self.average.of(weight)
        return self.full(weight) if average is None else average

    def answer(self, weight: nn.Parameter) -> Tensor:
        """Return the answer that a weight is ahead of; the weight where it is ahead of none."""
        full = self.full(weight)
        return full if self.lookahead is None else self.lookahead.answer(weight, full)

    def full_by_name(self) -> dict[str, Tensor]:
        """Return the model's state with full weights: its own tensors where they are full."""
        # Found by themselves: a wrapper may save weights under other names than it has for them.
        stored = self._model.state_dict(keep_vars=True)
        return {
            name: self.full(value) if isinstance(value, nn.Parameter) else _detached(value)
            for name, value in stored.items()
        }

    def averaged_by_name(self) -> dict[str, Tensor]:
        """Return a copy of the model's state, in fp32 and with averages for the weights trained."""
        if self.average is None:
            raise ConfigError(
                "This run has no EMA. Pass ema_decay to prepare(), for example ema_decay=0.999."
            )
        return self.copied_by_name(self.averaged)

    def copied_by_name(self, get_value: ValueOf) -> dict[str, Tensor]:
        """Return a copy of the model's state with these weights; tied ones are one tensor."""
        copies: dict[nn.Parameter, Tensor] = {}
        state = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                state[name] = copy.deepcopy(_detached(value))
                continue
            if value not in copies:
                copies[value] = get_value(value).detach().clone()
            state[name] = copies[value]
        return state

    def check_gradients(self, present: Sequence[int], inv_scale: Tensor | None) -> Checked:
        """Take the norms of the gradients in these places, and combine those of all ranks.

        `inv_scale` is one factor for each, or one for all.
        """
        gradients = self.gradients(present)
        if self.ranks is not None:
            check_reduced(gradients)
        norms = gradient_norms(gradients) if self.fused is None else self.fused.norms(gradients)
        if self.ranks is None:
            return check_norms(norms, inv_scale)
        return self.ranks.check(norms, inv_scale, present)

    def multiply_gradients(self, present: Sequence[int], factor: Tensor) -> None:
        """Multiply the gradients in these places, by one factor or by one for each."""
        multiply(gradient_factors([self.all[i] for i in present], factor))

    def update(
        self,
        present: Sequence[int],
        *,
        factor: Tensor | None,
        finite: Tensor | None,
        metered: bool,
    ) -> Tensor | None:
        """Multiply the gradients and let the optimizer update the weights in these places.

        `factor` is one for all of them or one for each. With `finite`, the optimizer skips on the
        device. Returns the share of lost updates if `metered`.
        """
        _check_not_thawed(self._narrow)
        if self.fused is not None:
            assert finite is not None
            lost = self.fused.update(
                present,
                factor=factor,
                finite=finite,
                metered=metered,
                average=self.average,
                lookahead=self.lookahead,
            )
        else:
            factors = gradient_factors([self.all[i] for i in present], factor)
            by_torch = TorchUpdate(
                optimizer=self.optimizer,
                weights=self.all,
                masters=self.masters,
                index=self._master_index,
                lookahead=self.lookahead,
                emulated=self._emulated,
            )
            with self.ownership.own_step.let_pass():
                lost = by_torch.step(factors, finite=finite, metered=metered)
        if self.average is not None:
            moved = set() if self.fused is None else set(present)
            left = [i for i in range(len(self.all)) if i not in moved]
            self.average.update(left, self.full, finite=finite)
        return lost

    def _shown(self, weight: nn.Parameter) -> Tensor:
        """Return the value for a copy of a weight: the swapped-in one, if any."""
        get_value = self.ownership.stand_in
        return self.full(weight) if get_value is None else get_value(weight)

    def _take(self, weight: nn.Parameter, value: Tensor) -> None:
        """Keep all digits of a value that was loaded into a weight."""
        wide = value.dtype in (torch.float32, torch.float64)
        if wide and value.shape == weight.shape:
            self.masters.take(self._master_index[weight], sharded_like(value, weight))


_APPLIED: "weakref.WeakSet[TrainedWeights]" = weakref.WeakSet()
"""The weights of all runs that are prepared now."""


def weights_trained_by(optimizers: Iterable[object]) -> TrainedWeights | None:
    """Return the weights of the prepared run that one of these optimizers belongs to."""
    own = {id(each) for each in optimizers}
    return next((w for w in list(_APPLIED) if own & {id(o) for o in w.held}), None)


def _give_back(*taken: Ownership | OwnWrites | None) -> None:
    for each in taken:
        if each is not None:
            each.give_back()


def _of_16_bits(
    named: Iterable[tuple[str, nn.Parameter]], lowered: Set[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the weights that came in 16 bits, by their names."""
    narrow = (torch.bfloat16, torch.float16)
    return {name: p for name, p in named if p not in lowered and p.dtype in narrow}


def _last_uses(
    model: nn.Module, weights: Sequence[nn.Parameter], names: Sequence[str]
) -> list[tuple[int, str]]:
    """Return the last module that holds each weight, and its name there."""
    every = enumerate(model.named_parameters(remove_duplicate=False))
    last = {p: (location, name) for location, (name, p) in every}
    return [
        last.get(p, (len(last) + i, name))
        for i, (p, name) in enumerate(zip(weights, names, strict=True))
    ]


def _storage(model: nn.Module, plan: Plan, trained: Set[nn.Parameter]) -> tuple[object, ...]:
    """Return all that decides how weights, gradients and moments are kept."""
    policy = plan.policy
    saved = (
        policy.grads_format,
        policy.master,
        policy.moments_format,
        policy.needs_fused_optimizer,
    )
    return (weight_formats(model, plan, trained), *saved)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _check_not_thawed(narrow: Mapping[str, nn.Parameter]) -> None:
    """Raise if a weight that was frozen in 16 bits is trained since."""
    for name, p in narrow.items():
        if p.grad is not None:
            raise ConfigError(
                f"{name} was frozen in {p.dtype} at prepare() and has a gradient now, but "
                f"{p.dtype} loses small updates. Call release(), call float() on it, and "
                "prepare() again."
            )


def bytes_by_role(weights: TrainedWeights) -> dict[str, int]:
    """Return the bytes on the device by role, with gradients as if they were there."""
    states = weights.optimizer.state.values()
    moments = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    graded = [p for p in weights.all if p.requires_grad]
    held = {
        "params": sum(map(_size, weights.all)),
        "grads": sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in graded),
        "master": weights.masters.bytes(),
        "moments": sum(_size(t) for t in moments if t.device == weights.device or not t.dim()),
    }
    return held if weights.lookahead is None else {**held, "lookahead": weights.lookahead.bytes()}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def undone_on_failure(model: nn.Module, weights: TrainedWeights) -> Iterator[None]:
    """Restore model and optimizer if the block fails (out of memory), without new memory."""
    tensors = [(p, p.data, p.grad, p.grad_dtype) for p in weights.all]
    optimizers = member_optimizers(weights.optimizer)
    groups = [(group, group["params"]) for each in optimizers for group in each.param_groups]
    states = [
        (each.state, [(key, held, dict(held)) for key, held in each.state.items()])
        for each in optimizers
    ]
    try:
        yield
    except BaseException:
        weights.let_go()
        restore_modules(model)
        for p, value, gradient, dtype in tensors:
            p.grad = None
            show_as_it_is(p)
            replace_values(p, value)
            set_grad_dtype(p, dtype)
            p.grad = gradient
        for group, params in groups:
            group["params"] = params
        for state, entries in states:
            state.clear()
            for key, held, values in entries:
                held.clear()
                held.update(values)
                state[key] = held
        raise
