"""The optimizer's step in one pass over memory, in place of torch's own AdamW or Adam.

The state stays in `optimizer.state` under torch's names, so that a run can be saved under one and
resumed under the other. The EMA and the leads of a lookahead point move in the same pass.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.kernels.adamw.twin import (
    AT_HOME,
    BLOCK,
    AdamTwin,
    Ahead,
    Hyper,
    Weight,
    decode,
    encode,
    read_moments,
)
from narrowcast.kernels.launch import PLAIN, are_same, laid_like, lies_like, upload
from narrowcast.precision.dtensor import local_part, local_shards
from narrowcast.precision.gradients.check import GradientNorms
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.weights.host_moments import OffloadedAdam, keep_on_host
from narrowcast.precision.weights.lookahead import LookaheadPoint
from narrowcast.precision.weights.master import SCALE, MasterWeights, WeightAverage
from narrowcast.precision.weights.update_path import has_step_hooks, unsupported_settings


def group_hyper(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Hyper:
    """Return what decides the next step of a group's weights."""
    return Hyper(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
    )


FIRST = "exp_avg"
"""What torch calls the first moment, whose codes have a sign."""


def convert(state: dict[str, Any], name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """Give a moment another dtype, and the layout of its weight; codes have scales beside them."""
    inputs = local_part(state[name])
    local = laid_like(inputs, local_part(weight)).as_strided((inputs.numel(),), (1,))
    state[name] = torch.zeros_like(weight.detach(), dtype=dtype)
    if dtype in (torch.int8, torch.uint8):
        middle = torch.full(local.shape, 2**15, dtype=torch.int64, device=local.device)
        local, state[name + SCALE] = encode(local.float(), middle, signed=name == FIRST)
    local_part(state[name]).as_strided((local.numel(),), (1,)).copy_(local)


def undo_cast(state: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Restore 8-bit codes that torch's `load_state_dict` has cast to the weight's dtype."""
    if state[name + SCALE].dtype != torch.float32:
        raise CheckpointError(
            "optimizer.load_state_dict() rounded the scales of 8-bit moments. Load the state with "
            "run.load_state_dict() instead."
        )
    codes = torch.int8 if name == FIRST else torch.uint8
    state[name] = state[name].to(codes)
    if dtype != codes:
        local = local_part(state[name])
        flat = decode(local.as_strided((local.numel(),), (1,)), state.pop(name + SCALE))
        state[name] = like(state[name], flat)


def like(state: Tensor, flat: Tensor) -> Tensor:
    """Return fp32 values in the shape and order of a moment."""
    wide = torch.zeros_like(state, dtype=torch.float32)
    local_part(wide).as_strided((flat.numel(),), (1,)).copy_(flat)
    return wide


SECOND, STEP = "exp_avg_sq", "step"
_GRAD = attrgetter("grad")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class FusedAdamW:
    """Updates weights in place of `optimizer.step()`, on that optimizer's own state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[nn.Parameter],
        masters: MasterWeights,
        *,
        policy: Policy,
        kernel: bool | None = None,
        offloaded: bool = False,
    ) -> None:
        self._offloaded = offloaded
        self._optimizer, self._weights, self._masters = optimizer, list(weights), masters
        # In the formats that torch keeps too, each weight has that of its own dtype or master.
        self._moments = policy.moments if policy.needs_fused_optimizer else ""
        self._device = local_part(self._weights[0]).device
        self._kernel = self._device.type == "cuda" if kernel is None else kernel
        places = {p: i for i, p in enumerate(masters.parameters)}
        self._places = [places.get(p) for p in self._weights]
        self._bound: list[_Bound] = []
        self._bound_places: set[int] = set()
        self._bound_weights: list[nn.Parameter] = []
        self._layouts: list[object] = []
        self._sharded = not PLAIN.issuperset(map(type, self._weights))
        self._seen: tuple[list[object], list[int]] = [], []
        self._adam: Any = None
        self._average: WeightAverage | None = None
        self._lookahead: LookaheadPoint | None = None
        self.norms = GradientNorms(self._weights, kernel=self._kernel)
        for i, p in enumerate(self._weights):
            if self._key(i) in optimizer.state:  # a state that was there before
                self._state(i, p)

    def update(
        self,
        present: Sequence[int],
        *,
        factor: Tensor | None,
        finite: Tensor,
        metered: bool,
        average: WeightAverage | None = None,
        lookahead: LookaheadPoint | None = None,
    ) -> Tensor | None:
        """Update the weights in these places, unless `finite` is false, without synchronising.

        `factor` multiplies their gradients, one for all or one for each. Returns the share of lost
        updates among all weights if `metered`.
        """
        _check_hooks(self._optimizer)
        if (average, lookahead) != (self._average, self._lookahead):
            self._average, self._lookahead, self._bound = average, lookahead, []
        self._refresh(present)
        self.write_hyper()
        places = self.norms.taken_places()  # in any case: it holds the gradients
        lost: Tensor | None = self._adam.step(
            self._gradients(present),
            factor=_of_bound(self._bound, present, factor),
            finite=finite,
            metered=metered,
            **({"places": places} if self._kernel and not self._offloaded else {}),
        )
        self.has_written(present)
        # By this torch's schedules know that they are not called before the optimizer.
        vars(self._optimizer)["_opt_called"] = True
        return lost

    def begin_state(self, present: Sequence[int]) -> bool:
        """Make the moments of weights without an update; return whether the kernel makes those."""
        for i in present if self._kernel else ():
            self._state(i, self._weights[i])
        return self._kernel

    def has_written(self, present: Sequence[int]) -> None:
        """Bump the version counters of weights: the kernel writes without autograd noticing."""
        torch.autograd.graph.increment_version(local_shards([self._weights[i] for i in present]))

    @property
    def binding(self) -> object:
        """What knows the addresses of all that is updated: another one, where any has moved."""
        return self._adam

    @property
    def is_bound(self) -> bool:
        """Whether every tensor is still where the last update found it."""
        return bool(self._bound) and self._is_where_it_was()

    def has_replayed(self, present: Sequence[int]) -> None:
        """Take note that a CUDA graph has updated the weights in these places."""
        self._adam.has_replayed()
        self.norms.has_replayed()
        self.has_written(present)  # weights kept in fp8 are older than it

    def make_room(self) -> None:
        """Have memory for the addresses that a CUDA graph is about to keep, one graph or two."""
        self._adam.make_room()
        self.norms.make_room()

    def write_hyper(self) -> None:
        """Use the current group settings in the next step or replay."""
        _check_settings(self._optimizer)
        groups = [group_hyper(self._optimizer, g) for g in self._optimizer.param_groups]
        self._adam.write_hyper(groups, ahead=self._ahead)

    def restore(self, saved: dict[str, Any]) -> None:
        """Load the state of a saved optimizer unchanged; torch's loading would cast it."""
        keys = [key for group in self._optimizer.param_groups for key in group["params"]]
        for number, values in saved["state"].items():
            state = self._optimizer.state[keys[number]]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    location = "cpu" if self._offloaded and name != STEP else self._device
                    state[name] = value.detach().to(location, copy=True)
        self.forget_bindings()

    def forget_bindings(self) -> None:
        """Look for every tensor again at the next step."""
        self._bound = []

    def release(self, *, stay_on_host: bool = False) -> None:
        """Give the optimizer a state that plain torch can continue from: fp32 without extras."""
        self._refresh([])
        for bound in self._bound:
            state, w = self._optimizer.state[bound.key], bound.weight
            for name, flat in zip((FIRST, SECOND), read_moments(w), strict=True):
                if state[name].dtype != torch.float32:
                    state[name] = like(state[name], flat)
                state.pop(name + SCALE, None)
                if self._offloaded and not stay_on_host:
                    state[name] = state[name].to(self._device)
            group = self._optimizer.param_groups[w.group]
            if not (group["fused"] or group["capturable"]):
                state[STEP] = state[STEP].cpu()  # where torch keeps it
        self._bound = []

    def _refresh(self, present: Sequence[int]) -> None:
        """Bind again if a weight is new here, or any tensor is not the one it was."""
        if self._bound:
            is_known = self._bound_places.issuperset(present)
            if is_known and self._is_where_it_was():
                return
            wanted = sorted(self._bound_places.union(present))
        else:
            states = self._optimizer.state
            begun = [i for i in range(len(self._weights)) if STEP in states.get(self._key(i), {})]
            wanted = sorted({*begun, *present})
        groups = {
            key: number
            for number, group in enumerate(self._optimizer.param_groups)
            for key in group["params"]
        }
        self._bound = [self._bind(i, groups[self._key(i)]) for i in wanted]
        self._bound_places, self._bound_weights = set(wanted), [self._weights[i] for i in wanted]
        weights = [bound.weight for bound in self._bound]
        self._layouts = _layouts([w.weight for w in weights], sized=self._sharded)
        self._adam = (
            OffloadedAdam(weights, self._updating, device=self._device)
            if self._offloaded
            else self._updating(weights, 0)
        )
        self._seen = self._held()

    @property
    def _ahead(self) -> Ahead:
        return AT_HOME if self._lookahead is None else self._lookahead.ahead

    def _updating(self, weights: Sequence[Weight], before: int) -> Any:
        """Return what updates some weights, given how many come before them."""
        share = 0.0 if self._average is None else self._average.share
        if not self._kernel:
            return AdamTwin(weights, share=share, ahead=self._ahead, before=before)
        from narrowcast.kernels.adamw.kernel import AdamKernel

        groups = len(self._optimizer.param_groups)
        ahead, device = self._ahead, self._device
        return AdamKernel(
            weights, device=device, groups=groups, share=share, ahead=ahead, before=before
        )

    def _is_where_it_was(self) -> bool:
        (states, addresses), (were, before) = self._held(), self._seen
        return are_same(states, were) and addresses == before

    def _held(self) -> tuple[list[object], list[int]]:
        """Return all that the optimizer's state holds, and where the weights are."""
        states = map(dict.values, self._optimizer.state.values())
        addresses = map(Tensor.data_ptr, local_shards(self._weights))
        return list(itertools.chain.from_iterable(states)), list(addresses)

    def _gradients(self, present: Sequence[int]) -> Sequence[Tensor | None]:
        """Return the gradient of each bound weight, which lies in memory as the weight does."""
        matches = list(map(_GRAD, self._bound_weights))
        there = local_shards([g for g in matches if g is not None])
        every = len(present) == len(matches)
        if every and _layouts(there, sized=self._sharded) == self._layouts:
            return there
        shards = iter(there)
        return [
            None if g is None else _laid_like(next(shards), bound.weight.weight)
            for g, bound in zip(matches, self._bound, strict=True)
        ]

    def _key(self, i: int) -> nn.Parameter:
        """The parameter under which the optimizer knows weight `i`."""
        position = self._places[i]
        if position is None or self._masters.kind == "none":
            return self._weights[i]
        return self._masters.fp32_params[position]

    def _bind(self, i: int, group: int) -> "_Bound":
        p, key, index = self._weights[i], self._key(i), self._places[i]
        state = self._state(i, p)
        residual = None if index is None else self._masters.residual(index)
        weight = Weight(
            weight=local_part(p),
            master="none" if index is None else self._masters.kind,
            residual=None if residual is None else local_part(residual),
            first=local_part(state[FIRST]),
            second=local_part(state[SECOND]),
            first_scale=state.get(FIRST + SCALE),
            second_scale=state.get(SECOND + SCALE),
            step=state[STEP],
            group=group,
            average=None if self._average is None else local_part(self._average.averages[i]),
            lead=None if self._lookahead is None else local_part(self._lookahead.lead(i)),
        )
        assert all(lies_like(t, weight.weight) for t in weight.tensors)
        return _Bound(index=i, key=key, state=dict(state), weight=weight)

    def _state(self, i: int, p: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's state of a weight, begun or brought into its format."""
        state: dict[str, Any] = self._optimizer.state[self._key(i)]
        widened = p.dtype == torch.float32 or self._masters.widens(p)
        wanted = DTYPES[self._moments] if self._moments else (torch.float32 if widened else p.dtype)
        step = state.get(STEP, torch.zeros(()))
        state[STEP] = torch.as_tensor(step).to(self._device, torch.float32)
        for name in (FIRST, SECOND):
            dtype = torch.uint8 if wanted == torch.int8 and name == SECOND else wanted
            if name + SCALE in state:
                undo_cast(state, name, dtype)
            if name not in state:
                state[name] = torch.zeros_like(p.detach(), dtype=dtype)
                if wanted == torch.int8:
                    blocks = -(-local_part(p).numel() // BLOCK)
                    state[name + SCALE] = torch.zeros(blocks, device=self._device)
            elif state[name].dtype != dtype or not lies_like(
                local_part(state[name]), local_part(p)
            ):
                convert(state, name, p, dtype)
        if self._offloaded:
            keep_on_host(state, [FIRST, SECOND, FIRST + SCALE, SECOND + SCALE])
        return state


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    if has_step_hooks(optimizer):
        raise ConfigError(
            "Step hooks were added to the optimizer after prepare(), but the fused optimizer "
            "would not call them. Register them before prepare(), or write fused_optimizer=False."
        )


def _check_settings(optimizer: torch.optim.Optimizer) -> None:
    why = unsupported_settings(optimizer)
    if why:
        raise ConfigError(
            f"The optimizer settings changed after prepare(), and {why}. Set them before "
            "prepare(), or write fused_optimizer=False."
        )


def _of_bound(
    bound: "Sequence[_Bound]", present: Sequence[int], factor: Tensor | None
) -> Tensor | None:
    """Give each bound weight its factor, where there is one for each that is present."""
    if factor is None or factor.dim() == 0 or len(present) == len(bound):
        return factor
    location = {i: n for n, i in enumerate(present)}
    chosen = torch.tensor([location.get(each.index, 0) for each in bound])
    return factor[upload(chosen, factor.device)]


def _laid_like(gradient: Tensor, weight: Tensor) -> Tensor:
    if gradient.shape != weight.shape:
        raise UnsupportedError(
            f"A gradient must have the shape of its weight on this device, {tuple(weight.shape)}, "
            f"got {tuple(gradient.shape)}. Shard both in the same way."
        )
    return laid_like(gradient, weight)


def _layouts(tensors: Sequence[Tensor], *, sized: bool) -> list[object]:
    """Return the memory layout of each tensor, without a loop: it runs for all in every step."""
    strides = map(Tensor.stride, tensors)
    return list(zip(map(Tensor.size, tensors), strides, strict=True) if sized else strides)


@dataclass(frozen=True)
class _Bound:
    """A weight whose tensors are known, and what they were when it became so."""

    index: int
    key: nn.Parameter
    state: dict[str, Any]
    weight: Weight
