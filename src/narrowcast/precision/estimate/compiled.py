"""The memory of a compiled step, from the calls of an eager one.

Two things differ. The compiler stores the smallest set of activations from which the backward pass
can compute the others without products: a minimum cut, as torch's partitioner makes it. And what
only passes from one element-wise operation to the next is never allocated.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.precision.estimate.ledger import Block, Call, Ledger, Op
from narrowcast.precision.estimate.stand_in import names

_ELEMENTWISE = names(
    "_to_copy clone copy_ empty_like zeros_like ones_like full_like fill_ zero_ where masked_fill "
    "threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward "
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward _softmax _softmax_backward_data _log_softmax "
    "_log_softmax_backward_data nll_loss_forward nll_loss_backward mse_loss mse_loss_backward "
    "sum mean var var_mean amax amin max min upsample_nearest2d upsample_nearest2d_backward "
    "max_pool2d_with_indices avg_pool2d avg_pool2d_backward slice_backward "
    "select_backward index gather constant_pad_nd"
)
"""Operations that the compiler fuses, beside those that torch marks as pointwise."""
_OURS = names(
    "layer_norm layer_norm_back rms_norm rms_norm_back gelu gelu_back gated gated_back "
    "turn_heads turn_halves"
)
"""Our own kernels that the compiler replaces by the operations of torch."""
_REDUCED = 4
"""A result smaller than its inputs by this factor is stored, as torch does."""
_UNSTORED = 2.0
"""Cost of storing what would not be allocated otherwise, against what is allocated anyway."""
_NEARER = 1.1
"""Cost of storing a value one call earlier."""
_INT8 = 8
"""The compiler keeps the places of a maximum in one byte in place of eight."""


@dataclass
class _Value:
    """A storage that a pass makes."""

    made_by: int
    users: list[int]
    changed: bool = False
    """Whether it is written to after it was made."""


def is_fused(call: Call) -> bool:
    """Return whether the compiler fuses a call with those around it."""
    space, _, name = call.name.partition("::")
    if space == "narrowcast":
        return name in _OURS
    return name in _ELEMENTWISE or call.pointwise


def _joins(first: Call, second: Call) -> bool:
    """Return whether the results of one call go into another without memory between them."""
    return is_fused(first) and (is_fused(second) or second.name == "aten::cat")


def compiled_step(ledger: Ledger, *, after: int, gpu: bool) -> tuple[list[int], list[Op]]:
    """Return events and operations of a step as the compiler would run it.

    `after` is the first event of the step. Adds blocks to the ledger, and changes their sizes.
    """
    blocks, events, calls = ledger.blocks, ledger.events, ledger.calls
    freed = {-1 - event for event in events[after:] if event < 0}
    values: dict[int, _Value] = {}
    for number, call in enumerate(calls):
        for made in call.outputs:
            if made in freed:
                values[made] = _Value(number, [])
        for used in call.inputs:
            if used in values:
                values[used].users.append(number)
        for written in call.changes:
            if written in values:
                values[written].changed = True
    _shrink_places(blocks, calls)
    stored = _stored(blocks, calls, values)
    real = {index for index, value in values.items() if _is_allocated(index, value, calls, stored)}
    last = _last_uses(calls, values, real, stored)
    added: dict[int, list[int]] = defaultdict(list)
    for call in calls if gpu else ():
        for operand, size in call.padded:
            value = values.get(operand)
            first = (
                calls[value.made_by] if value is not None and _fills(value, call, calls) else call
            )
            added[first.end - len(first.outputs)].append(len(blocks))
            added[call.end].append(-1 - len(blocks))
            blocks.append(Block(size, call.phase, "", "temporaries"))
    for index in real:
        added[calls[last[index]].end].append(-1 - index)
    result: list[int] = []
    for place, event in enumerate((*events, None)):
        result += added.get(place, [])
        if event is not None:
            index = event if event >= 0 else -1 - event
            if index not in values or (event >= 0 and index in real):
                result.append(event)
    return result, _merged(ledger, values, real)


def _merged(ledger: Ledger, values: Mapping[int, _Value], real: set[int]) -> list[Op]:
    """Return operations that move only what is allocated; a kernel ends where something is."""
    ops: list[Op | None] = list(ledger.ops)
    waiting = 0
    for call in ledger.calls:
        op = None if call.op is None else ops[call.op]
        if op is None or call.op is None or not is_fused(call):
            continue
        known = [
            each for each in (*call.inputs, *call.outputs) if each in real or each not in values
        ]
        moved = waiting + sum(ledger.blocks[each].size for each in known)
        ends = any(each not in values or each in real for each in call.outputs)
        ops[call.op] = replace(op, bytes=moved) if ends else None
        waiting = 0 if ends else moved
    return [op for op in ops if op is not None]


def _shrink_places(blocks: Sequence[Block], calls: Sequence[Call]) -> None:
    for call in calls:
        if call.name == "aten::max_pool2d_with_indices" and len(call.outputs) == 2:
            blocks[call.outputs[1]].size //= _INT8


def _stored(blocks: Sequence[Block], calls: Sequence[Call], values: dict[int, _Value]) -> set[int]:
    """Return what is stored between the passes: a minimum cut of what the backward pass needs."""
    import networkx  # type: ignore[import-untyped]  # torch depends on it

    late, distance = _late_uses(calls), _distances(calls, values)
    graph: Any = networkx.DiGraph()
    graph.add_node("inputs")
    graph.add_node("backward")
    for index, value in values.items():
        call = calls[value.made_by]
        if call.phase != "forward":
            continue
        size = blocks[index].size * _NEARER ** max(min(distance[index], 100), 1)
        if is_fused(call) and not _feeds_products(value, calls, phase="forward"):
            size *= _UNSTORED
        graph.add_edge((index, "in"), (index, "out"), capacity=size)
        if any(calls[user].phase == "backward" for user in value.users):
            graph.add_edge((index, "out"), "backward")
        read = sum(blocks[each].size for each in call.inputs)
        if (
            not is_fused(call)
            or value.changed
            or value.made_by in late
            or blocks[index].size * _REDUCED < read
            or _feeds_products(value, calls, phase="backward")
        ):
            graph.add_edge("inputs", (index, "in"))
            continue
        for each in call.inputs:
            if each in values:
                graph.add_edge((each, "out"), (index, "in"))
    _, (near, far) = networkx.minimum_cut(graph, "inputs", "backward")
    return {node[0] for node in near if node[1] == "in" and (node[0], "out") in far}


def _late_uses(calls: Sequence[Call]) -> set[int]:
    """Return calls whose inputs were used long before, as by a residual: those are not repeated."""
    passes: list[dict[int, list[int]]] = []
    before = ""
    for number, call in enumerate(calls):
        if call.phase == "forward":
            if before != "forward":
                passes.append(defaultdict(list))
            for used in call.inputs:
                passes[-1][used].append(number)
        before = call.phase
    late = set()
    for users in passes:
        for each in [numbers for numbers in users.values() if len(numbers) > 1]:
            end = _first_not_joined(calls, users, each)
            late |= {number for number in each if number > end and is_fused(calls[number])}
    return late


def _first_not_joined(
    calls: Sequence[Call], users: Mapping[int, Sequence[int]], starts: Sequence[int]
) -> int:
    """Return the first call after which the compiler begins another kernel."""
    limit = max(starts)
    queue = [(number, True) for number in starts]
    heapq.heapify(queue)
    seen = set(starts)
    while queue:
        number, joined = heapq.heappop(queue)
        if not joined:
            return number
        for made in calls[number].outputs:
            for user in users.get(made, ()):
                if user <= limit and user not in seen:
                    seen.add(user)
                    heapq.heappush(queue, (user, _joins(calls[number], calls[user])))
    return limit


def _distances(calls: Sequence[Call], values: Mapping[int, _Value]) -> dict[int, int]:
    """Return how many calls lie between each value and the backward pass."""
    result: dict[int, int] = {}
    for index in sorted(values, reverse=True):  # users come later
        steps = [
            0
            if calls[user].phase == "backward"
            else min((result.get(made, 100) for made in calls[user].outputs), default=100)
            for user in values[index].users
        ]
        result[index] = min(steps, default=100) + 1
    return result


def _feeds_products(value: _Value, calls: Sequence[Call], *, phase: str) -> bool:
    """Return whether a pass hands a value as it is to an operation that is not fused."""
    made_by = calls[value.made_by]
    return any(
        calls[user].phase == phase
        and not _joins(made_by, calls[user])
        and not _fills(value, calls[user], calls)
        for user in value.users
    )


def _fills(value: _Value, user: Call, calls: Sequence[Call]) -> bool:
    """Return whether a fused call writes the padded copy for a product itself."""
    made_by = calls[value.made_by]
    return (
        is_fused(made_by)
        and made_by.phase == user.phase
        and any(operand in made_by.outputs for operand, _ in user.padded)
    )


def _is_allocated(index: int, value: _Value, calls: Sequence[Call], stored: set[int]) -> bool:
    call = calls[value.made_by]
    return (
        index in stored
        or not is_fused(call)
        or value.changed
        or _feeds_products(value, calls, phase=call.phase)
    )


def _last_uses(
    calls: Sequence[Call], values: dict[int, _Value], real: set[int], stored: set[int]
) -> dict[int, int]:
    """Return the last call that needs each value; fused calls need their inputs when used."""
    last = {index: value.made_by for index, value in values.items()}
    again: dict[int, int] = {}  # where the backward pass computes a value once more
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        at = number
        for made in call.outputs:
            if made in values:
                if made not in real:
                    at = max(at, last[made])
                at = max(at, again.get(made, -1))
        for used in call.inputs:
            if used not in values:
                continue
            for when in {number, at}:
                backward = calls[when].phase == "backward"
                forward = calls[values[used].made_by].phase == "forward"
                if backward and forward and used in real and used not in stored:
                    again[used] = max(again.get(used, -1), when)
                else:
                    last[used] = max(last[used], when)
    return last
