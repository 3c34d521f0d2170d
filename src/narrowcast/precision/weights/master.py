"""Master weights: the digits that a 16-bit working weight cannot hold.

| kind | kept beside the weight | bytes | what it promises |
|---|---|---|---|
| fp32 | a whole fp32 copy | 4 | the fp32 optimizer, exactly |
| split | the 16 bits that bf16 leaves out | 2 | the fp32 optimizer, exactly |
| kahan | the rounding error, in the weight's format | 2 | sums to twice the digits |
| stochastic | nothing | 0 | right on average |
| none | nothing | 0 | updates below half a spacing are lost |

The optimizer sees fp32 parameters, which exist only during its step (for `fp32`, always). The EMA
is in fp32; the fused optimizer moves it in the same pass, `WeightAverage.update` for other weights.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, UnsupportedError
from narrowcast.numerics import BF16, FP16, round_stochastic
from narrowcast.numerics.rounding import (
    fitting_compensation,
    fitting_master,
    join_fp32,
    nearest,
    split,
)
from narrowcast.precision.dtensor import (
    as_sharded,
    local_part,
    local_shards,
    placed_like,
    replace_values,
    shard_index,
)
from narrowcast.precision.plan.policy import Master
from narrowcast.precision.weights.multi_optimizer import member_optimizers
from narrowcast.precision.weights.ownership import check_not_resized

SCALE = "_scale"
"""What the key of a moment is followed by in that of its scales, where it has 8 bits."""
_FORMATS = {each.dtype: each for each in (BF16, FP16)}
BUCKET = 2**25
"""Weights whose fp32 copies and gradients exist at one time: 256 MiB of them."""


def multiply(factors: Mapping[nn.Parameter, Tensor]) -> None:
    """Multiply the gradients of weights in place."""
    if not factors:
        return
    gradients = local_shards([p.grad for p in factors if p.grad is not None])
    values = list(factors.values())
    same = all(value is values[0] for value in values)
    torch._foreach_mul_(gradients, values[0] if same else values)


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is of torch, whose step treats each weight by itself."""
    members = member_optimizers(optimizer)
    return all(type(each).__module__.startswith("torch.optim") for each in members)


def in_buckets(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield indices of parameters in small groups; at least one group, possibly empty."""
    bucket: list[int] = []
    size = 0
    for i in indices:
        if size >= BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += parameters[i].numel()
    # There is always one, if empty: the weights kept in fp32 travel with the first.
    yield bucket


def _master(value: Tensor) -> nn.Parameter:
    """Return what an optimizer holds in a weight's place; a copy would be of no model's weight."""
    made = nn.Parameter(value)
    vars(made)["__deepcopy__"] = _raise_on_copy
    return made


def _no_values(parameter: nn.Parameter) -> Tensor:
    """Return an fp32 tensor that takes no memory, sharded if the parameter is."""
    none = torch.empty(0, device=parameter.device)
    if as_sharded(parameter) is None:
        return none
    values = placed_like(none.new_empty(()).expand(local_part(parameter).shape), parameter)
    _forget_values(values)
    return values


def _forget_values(tensor: Tensor) -> None:
    """Free the memory of a tensor."""
    none = torch.empty(0, device=local_part(tensor).device)
    sharded = as_sharded(tensor)
    if sharded is None:
        tensor.data = none
    else:
        sharded._local_tensor = none


def _raise_on_copy(memo: object) -> NoReturn:
    raise UnsupportedError(
        "This optimizer holds master weights since prepare(), so a copy of it would train no "
        "model. Copy model and optimizer before prepare() or after release(), or save "
        "run.state_dict()."
    )


class MasterWeights:
    """The master weights of the parameters that are kept in 16 bits."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        full: Sequence[Tensor],
        kind: Master,
        *,
        seed: int = 0,
    ) -> None:
        self.kind = kind
        self.parameters = list(parameters)
        self._index = set(self.parameters)
        self._residual: list[Tensor] = []
        self.are_at_hand = False
        """Whether the optimizer finds its weights in fp32 now, as in its step."""
        self._seed, self._rounds = seed, 0
        """`stochastic` draws by seed, round and weight, so that equal weights stay equal."""
        self._generator: torch.Generator | None = None
        if kind == "stochastic" and self.parameters:
            self._generator = torch.Generator(self.parameters[0].device)
        # What the optimizer holds in place of each weight. Empty between steps, but for `fp32`.
        self.fp32_params = [_master(_no_values(p)) for p in self.parameters]
        for i, value in enumerate(full):
            self._begin(i, value.detach().float())

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer update the master weights instead of the working weights."""
        if self.kind == "none":
            recast(optimizer, self.parameters)
            return
        fp32_params = dict(zip(self.parameters, self.fp32_params, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [fp32_params.get(p, p) for p in group["params"]]
        for parameter, fp32_param in fp32_params.items():
            if parameter in optimizer.state:
                optimizer.state[fp32_param] = optimizer.state.pop(parameter)
        recast(optimizer, self.fp32_params)

    def full(self, i: int, working: Tensor | None = None) -> Tensor:
        """Return weight `i` in fp32, with all the digits that are kept of it.

        Outside code writes to the working weights only. If the master belongs to another number,
        the working weight is right.
        """
        # torch cannot look at the bits of a sharded tensor, but at those of its shards.
        residual = self.residual(i)
        stored = None if residual is None else local_part(residual)
        weight = self.parameters[i].detach() if working is None else working
        check_not_resized(local_part(weight), stored)
        full = join_fp32(local_part(weight), stored, kind=self.kind)
        return placed_like(full, weight)

    def stored(self, i: int) -> tuple[Tensor, ...]:
        """Return the tensors that together hold weight `i`."""
        if self.kind == "fp32":
            return (self.fp32_params[i].detach(),)
        residuals = (self._residual[i],) if self._residual else ()
        return (self.parameters[i].detach(), *residuals)

    def residual(self, i: int) -> Tensor | None:
        """Return what is kept beside working weight `i`; nothing for some kinds."""
        if self.kind == "fp32":
            return self.fp32_params[i].detach()
        return self._residual[i] if self._residual else None

    def fit(self, i: int) -> None:
        """Drop what is kept beside weight `i` where it belongs to another number."""
        weight, extra = local_part(self.parameters[i]), self.residual(i)
        if extra is None:
            return
        stored = local_part(extra)
        match self.kind:
            case "fp32":
                # A look is faster than writing; a GPU would have to be waited for.
                if weight.device.type != "cpu" or not _same_bits(
                    nearest(stored, weight.dtype), weight
                ):
                    fitting_master(weight, stored, out=stored)
            case "split":
                stored.masked_fill_(weight == 0, 0)
            case _:
                stored.copy_(fitting_compensation(weight, stored))

    def widens(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer sees an fp32 weight and gradient in place of this one's."""
        return self.kind != "none" and parameter in self._index

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        factors: Mapping[nn.Parameter, Tensor],
        stepping: Callable[[], object],
    ) -> None:
        """Update all weights of the optimizer, including master weights, by `stepping`.

        torch's own optimizers treat each weight by itself, so they get a few at a time, and the
        fp32 copies of all never exist at once.
        """
        if self.kind == "none" or not self.parameters:
            stepping()
            return
        with_gradient = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not is_torchs(optimizer):
            self._step_some(stepping, with_gradient, factors)
            return
        groups = [group["params"] for group in optimizer.param_groups]
        mine = set(self.fp32_params)
        first = {p for params in groups for p in params if p not in mine}
        for bucket in in_buckets(with_gradient, self.parameters):
            now = {self.fp32_params[i] for i in bucket} | first
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [p for p in params if p in now]
            try:
                self._step_some(stepping, bucket, factors)
            finally:
                for group, params in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = params
            first = set()

    @contextlib.contextmanager
    def at_hand(self, indices: Sequence[int] | None = None) -> Iterator[None]:
        """Give the optimizer its weights in fp32 inside the block; store them also if it raises."""
        some = range(len(self.parameters)) if indices is None else indices
        for i in some:
            if self.kind == "fp32":
                self.fit(i)
            else:
                replace_values(self.fp32_params[i], self.full(i))
        self.are_at_hand = True
        try:
            yield
        finally:
            self.are_at_hand = False
            self._rounds += 1
            for i in some:
                fp32_param = self.fp32_params[i]
                fp32_param.grad = None
                # A method that only looks must not count as a write: a graph may hold the weight.
                if indices is not None or not self._is_stored(i, fp32_param.detach()):
                    self._store(i, fp32_param.detach())
                if self.kind != "fp32":
                    _forget_values(fp32_param)

    def _step_some(
        self,
        stepping: Callable[[], object],
        indices: list[int],
        factors: Mapping[nn.Parameter, Tensor],
    ) -> None:
        with self.at_hand(indices):
            for i in indices:
                gradient = self.parameters[i].grad
                assert gradient is not None
                self.fp32_params[i].grad = gradient.float()
            if factors:
                multiply({self.fp32_params[i]: factors[self.parameters[i]] for i in indices})
            stepping()

    def bytes(self) -> int:
        """Return the size of what is kept beside the working weights."""
        stored = [*self._residual, *(self.fp32_params if self.kind == "fp32" else [])]
        return sum(t.numel() * t.element_size() for t in stored)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept beside the working weights, and belongs to them."""
        for i in range(len(self.parameters)):
            self.fit(i)
        state: dict[str, Any] = {"kind": self.kind, "residual": self._residual}
        if self.kind == "fp32":
            state["residual"] = [fp32_param.detach() for fp32_param in self.fp32_params]
        if self._generator is not None:
            state |= {"seed": self._seed, "rounds": self._rounds}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what was kept of weights with the same shapes."""
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"The checkpoint has {state['kind']} master weights, but the policy uses "
                f"{self.kind}. Write master={state['kind']}."
            )
        if self._generator is not None:
            self._seed, self._rounds = int(state["seed"]), int(state["rounds"])
        targets = self._residual
        if self.kind == "fp32":
            targets = [fp32_param.detach() for fp32_param in self.fp32_params]
        for mine, saved in zip(targets, state["residual"], strict=True):
            mine.copy_(saved)

    def _begin(self, i: int, full: Tensor) -> None:
        match self.kind:
            case "fp32":
                self.fp32_params[i] = _master(full.clone())
            case "split":
                self._residual.append(torch.empty_like(full, dtype=torch.int16))
            case "kahan":
                self._residual.append(torch.empty_like(full, dtype=self.parameters[i].dtype))
        if self.kind == "stochastic":
            # A first value is given, not an update: the nearest one is the right one.
            weight = local_part(self.parameters[i])
            weight.copy_(nearest(local_part(full), weight.dtype))
        else:
            self._store(i, full)

    @torch.no_grad()
    def take(self, i: int, value: Tensor) -> None:
        """Keep of a value that weight `i` was given the digits that the weight cannot hold."""
        if self.kind in ("stochastic", "none"):
            return
        weight = local_part(self.parameters[i])
        full = fitting_master(weight, local_part(value).to(weight.device, torch.float32))
        if self.kind == "fp32":
            local_part(self.fp32_params[i]).copy_(full)
        else:
            self._store(i, full)

    def _is_stored(self, i: int, full: Tensor) -> bool:
        """Return whether weight `i` would be the same if this were stored. Synchronises."""
        if self.kind == "fp32":
            weight = local_part(self.parameters[i])
            return _same_bits(nearest(local_part(full), weight.dtype), weight)
        return torch.equal(local_part(self.full(i)), local_part(full))

    def _store(self, i: int, full: Tensor) -> None:
        # Element by element, so that each device can see to its own shard.
        weight, full = local_part(self.parameters[i]), local_part(full)
        extra = local_part(self._residual[i]) if self._residual else weight
        match self.kind:
            case "split":
                high, low = split(full)
                weight.copy_(high)
                extra.copy_(low)
            case "kahan":
                weight.copy_(nearest(full, weight.dtype))
                extra.copy_(nearest(full - weight.float(), weight.dtype))
            case "stochastic":
                assert self._generator is not None
                self._generator.manual_seed(self._draw(i))
                target = _FORMATS[weight.dtype]
                rounded = round_stochastic(full, target, generator=self._generator, saturate=True)
                weight.copy_(rounded)
            case _:
                weight.copy_(nearest(full, weight.dtype))

    def _draw(self, i: int) -> int:
        """Return the seed of the random numbers for weight `i` now."""
        each = (self._seed, self._rounds, i, shard_index(self.parameters[i]))
        return int.from_bytes(hashlib.blake2b(repr(each).encode(), digest_size=4).digest())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def recast(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Cast the moments of these weights to their dtype; 8-bit ones stay, with their scales."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            exempt = key == "step" or key.endswith(SCALE)
            if isinstance(value, Tensor) and value.is_floating_point() and not exempt:
                optimizer.state[parameter][key] = value.to(parameter.dtype)


Full = Callable[[nn.Parameter], Tensor]
"""Returns a weight with every digit that is kept of it."""


class WeightAverage:
    """The averages in the order of the parameters; captured steps know their addresses."""

    def __init__(self, parameters: Sequence[nn.Parameter], full: Full, *, decay: float) -> None:
        self._parameters = list(parameters)
        self._places = {p: i for i, p in enumerate(parameters)}
        self.share = 1 - decay
        """The part of its way to the weight that an average goes in a step."""
        # In memory as the weights lie, so that one pass can go over both.
        self.averages = [
            torch.empty_like(p.detach(), dtype=torch.float32).copy_(full(p)) for p in parameters
        ]

    def of(self, weight: nn.Parameter) -> Tensor | None:
        """Return the average of a weight; None of one that has none."""
        index = self._places.get(weight)
        return None if index is None else self.averages[index]

    def update(self, places: Sequence[int], full: Full, *, finite: Tensor | None) -> None:
        """Move the averages in these places, unless `finite` is false, without synchronising."""
        if not places:
            return
        share = self.share if finite is None else self.share * finite.to(torch.float32)
        for bucket in in_buckets(places, self._parameters):
            # Element by element, so that each device can see to its own shard.
            averages = [local_part(self.averages[i]) for i in bucket]
            values = [local_part(full(self._parameters[i])).float() for i in bucket]
            way = torch._foreach_sub(values, averages)
            torch._foreach_mul_(way, share)
            torch._foreach_add_(averages, way)
