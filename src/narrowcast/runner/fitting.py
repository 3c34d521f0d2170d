"""Does a recipe fit? Its predicted memory and time, and the settings that would make it fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowcast.config import LoadedRecipe, Recipe
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.hardware.catalog import find_data_sheet
from narrowcast.hardware.profile import peak_bytes
from narrowcast.precision.estimate.dry_run import StepEstimate, estimate_step
from narrowcast.precision.estimate.planning import recompute_fewest
from narrowcast.precision.estimate.seconds import StepSeconds, step_seconds
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.plan.memory import Memory, MemoryEstimate, block_names, parse_bytes
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.weights.trained import bytes_by_role
from narrowcast.report.phrases import size
from narrowcast.runner.assemble import costs_per_rank
from narrowcast.runner.changes import PLAN
from narrowcast.runs import strict_json
from narrowcast.training.data import fetch
from narrowcast.training.optimizers import build_optimizer, get_groups
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.task import LossParts, Task
from narrowcast.workloads import build_task

MOST_ADVICE = 3
MARGIN = 1.05
"""Advice needs less than the limit by this factor: predictions were off by a few percent."""
ORIGIN = "memory.fit"
CHOSEN = "memory.activation_checkpointing=auto"
MOST_MODULES = 3000
"""Modules of the largest model that is rehearsed: a minute, with the advice."""
PREDICTED = "predicted"
"""Key of the prediction in plan.json."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step of a recipe takes on a device."""

    plans: tuple[Plan, ...]
    """One per phase; the largest has `memory.predicted`."""
    memory: MemoryEstimate | None
    seconds: StepSeconds | None
    missing: str = ""
    """Why there is no prediction."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "memory": None if self.memory is None else self.memory.to_json(),
            "time": None if self.seconds is None else self.seconds.to_json(),
            "missing": self.missing,
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings with which a recipe fits."""

    settings: Mapping[str, Any]
    memory: MemoryEstimate
    seconds: StepSeconds | None

    @property
    def command(self) -> str:
        """The settings as they are written on the command line."""
        return " ".join(f"{key}={_written(value)}" for key, value in self.settings.items())


def predict(recipe: Recipe, hardware: Hardware, *, below: float = math.inf) -> Prediction:
    """Predict a step of a recipe from its shapes; allocates no weights.

    Nothing is rehearsed if weights and optimizer alone need more than `below` bytes.
    """
    rank = recipe.model_copy(update={"batch_size": _rows_per_rank(recipe)})
    task = build_task(rank, device=torch.device("meta"))
    plans = plan_phases(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)
    largest = max(range(len(plans)), key=lambda i: sum(plans[i].bytes.values()))
    if sum(1 for _ in task.model.modules()) > MOST_MODULES:
        missing = f"the model has more than {MOST_MODULES:,} modules"
        return Prediction(plans=plans, memory=None, seconds=None, missing=missing)
    if recipe.parallel.ranks in (None, 1) and sum(plans[largest].bytes.values()) > below:
        return Prediction(plans=plans, memory=None, seconds=None, missing="too large")
    try:
        step = _step(rank, task, plans[largest])
    except Exception as error:  # noqa: BLE001  # the model and the task may be somebody else's
        missing = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Prediction(plans=plans, memory=None, seconds=None, missing=missing)
    memory = _of_rank(recipe, plans[largest], step.memory)
    marked = replace(plans[largest].memory, predicted=memory)
    plans = (*plans[:largest], replace(plans[largest], memory=marked), *plans[largest + 1 :])
    return Prediction(
        plans=plans, memory=memory, seconds=_seconds(recipe, plans[largest], step), missing=""
    )


def fit(loaded: LoadedRecipe, hardware: Hardware) -> tuple[LoadedRecipe, Prediction | None]:
    """Return a recipe that fits into memory, with its prediction if one was made.

    Raises:
        UnsupportedError: It does not fit, and `memory.fit` is not `auto`, or nothing helps.
    """
    loaded = choose_recomputed(loaded, hardware)
    recipe, limit = loaded.recipe, budget(loaded.recipe, hardware)
    if recipe.memory.fit == "ignore" or limit is None:
        return loaded, None
    requested = recipe.memory.fit == "auto" or recipe.memory.limit is not None
    if not requested and not hardware.device.startswith("cuda"):
        return loaded, None  # the memory of a CPU is rarely what ends a run
    prediction = predict(recipe, hardware)
    if prediction.memory is None:
        if requested:
            raise UnsupportedError(
                f"memory.limit and memory.fit=auto need a prediction of the memory, and there is "
                f"none: {prediction.missing}. Write memory.fit=ignore to train without a check."
            )
        return loaded, prediction
    if prediction.memory.needed <= limit:
        return loaded, prediction
    if recipe.memory.fit == "auto":
        first = next(advise(loaded, hardware, limit=limit, most=1), None)
        if first is not None:
            fitted = loaded.with_values(first.settings, origin=ORIGIN)
            return fitted, predict(fitted.recipe, hardware)
    advice = list(advise(loaded, hardware, limit=limit))
    raise UnsupportedError(refusal(prediction.memory, hardware, advice, limit=limit))


def choose_recomputed(loaded: LoadedRecipe, hardware: Hardware) -> LoadedRecipe:
    """Return a recipe in which `auto` is replaced by the fewest blocks to recompute.

    Raises:
        UnsupportedError: A step does not fit even if all blocks are recomputed.
    """
    recipe = loaded.recipe
    if recipe.memory.activation_checkpointing != "auto":
        return loaded
    model = build_task(recipe, device=torch.device("meta")).model
    requested = recipe.memory.model_dump(exclude={"fit", "limit"})
    memory = Memory(**requested, budget=budget(recipe, hardware))

    def recomputing(some: Memory) -> LoadedRecipe:
        settings = {
            "memory.activation_checkpointing": some.activation_checkpointing,
            "memory.blocks": some.blocks,
        }
        return loaded.with_values(settings, origin=CHOSEN)

    def planned(some: Memory) -> Plan:
        prediction = predict(recomputing(some).recipe, hardware)
        if prediction.memory is None:
            raise UnsupportedError(
                "memory.activation_checkpointing=auto needs a prediction of the memory, and there "
                f"is none: {prediction.missing}. Write memory.activation_checkpointing=blocks."
            )
        return next(plan for plan in prediction.plans if plan.memory.predicted is not None)

    names = block_names(model, recipe.memory.blocks)
    return recomputing(recompute_fewest(planned, memory, names).memory.requested)


def fit_notices(loaded: LoadedRecipe, prediction: Prediction | None) -> list[str]:
    """Return what `auto` chose in the memory section, a line each; empty if nothing."""
    lines = []
    if loaded.resolved()["memory.blocks"]["origin"] == CHOSEN:
        many = len(loaded.recipe.memory.blocks)
        lines.append(f"memory.activation_checkpointing=auto: {many} blocks are recomputed.")
    settings = {
        key: each["value"] for key, each in loaded.resolved().items() if each["origin"] == ORIGIN
    }
    if not settings:
        return lines
    command = " ".join(f"{key}={_written(value)}" for key, value in settings.items())
    needed = prediction.memory if prediction is not None else None
    takes = f" A step needs {size(needed.needed)}." if needed is not None else ""
    return [*lines, f"memory.fit=auto set {command} so that the run fits.{takes}"]


def refusal(
    memory: MemoryEstimate, hardware: Hardware, advice: Sequence[Advice], *, limit: int
) -> str:
    """Return what is said of a run that does not fit."""
    text = (
        f"A step needs {size(memory.needed)}, but {hardware.name} ({hardware.device}) has "
        f"{size(limit)}: it does not fit."
    )
    if not advice:
        return f"{text} No setting makes it fit. Use a smaller model, or more GPUs."
    lines = [f"  {each.command}: {_costs(each)}" for each in advice]
    head = f"{text} Write one of these, fastest first, or memory.fit=auto for the first:"
    return "\n".join([head, *lines])


def _costs(advice: Advice) -> str:
    text = f"{size(advice.memory.needed)}"
    return text if advice.seconds is None else f"{text}, {advice.seconds.seconds:.3g} s per step"


def budget(recipe: Recipe, hardware: Hardware) -> int | None:
    """Return the bytes that a run may use: `memory.limit`, or what the device has."""
    if recipe.memory.limit is not None:
        return parse_bytes(recipe.memory.limit)
    if hardware.device.startswith("cuda") or hardware.device == "mps":
        return hardware.memory_bytes
    return _available_host_memory() or hardware.memory_bytes


def _available_host_memory() -> int | None:
    """Return the memory of this machine that is not in use; None where Linux does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def advise(
    loaded: LoadedRecipe, hardware: Hardware, *, limit: int, most: int = MOST_ADVICE
) -> Iterator[Advice]:
    """Yield settings that make a recipe fit, fastest first as far as times are known."""
    fitting: list[Advice] = []
    most_bytes = limit / MARGIN
    for settings in _candidates(loaded.recipe, hardware):
        if any(settings.items() >= each.settings.items() for each in fitting):
            continue  # more than what is enough
        try:
            prediction = predict(
                loaded.with_values(settings, origin=ORIGIN).recipe, hardware, below=most_bytes
            )
            if prediction.memory is None or prediction.memory.needed > most_bytes:
                continue
            settings, prediction = _with_largest_batch(
                loaded, settings, prediction, hardware, below=most_bytes
            )
        except (ConfigError, UnsupportedError):
            continue
        assert prediction.memory is not None
        fitting.append(
            Advice(settings=settings, memory=prediction.memory, seconds=prediction.seconds)
        )
        if len(fitting) == most:
            break
    yield from sorted(fitting, key=lambda each: each.seconds.seconds if each.seconds else 0.0)


def _candidates(recipe: Recipe, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Yield settings to try, those that cost least time first, then more and more together."""
    smallest = _micro_batch(recipe, _least_rows(recipe))
    policy = recipe.precision.policy or "default"
    singles: list[dict[str, Any]] = []
    if smallest:
        singles.append(smallest)
    if recipe.memory.activation_checkpointing == "none":
        singles.append({"memory.activation_checkpointing": "selective"})
    if recipe.memory.activation_checkpointing != "blocks":
        singles.append({"memory.activation_checkpointing": "blocks"})
    simple = ";" not in policy and not recipe.precision.schedule
    if (
        simple
        and "master" not in policy
        and "pure" not in policy
        and recipe.precision.emulate is None
    ):
        base = "bf16" if policy in ("default", "auto", "fp32") else policy
        singles.append({"precision.policy": f"{base}, params=bf16, master=split"})
    adam = recipe.optimizer.name in ("adamw", "adam")
    last = dict(singles[-1]) if singles else {}
    if adam and simple and "moments" not in policy:
        base = last.get("precision.policy", policy)
        singles.append({"precision.policy": f"{base}, moments=int8"})
    if simple and hardware.support("e4m3").how == "native" and "fp8" not in policy:
        base = str(last.get("precision.policy", policy)).replace("bf16", "fp8-delayed", 1)
        singles.append({"precision.policy": base})
    if hardware.device.startswith("cuda"):
        if adam:
            singles.append({"memory.offload": ("optimizer",)})
        singles.append({"memory.offload": ("activations",)})
    for each in singles:
        yield each
        if smallest and "batch_size" not in each:
            yield {**smallest, **each}
    joined: dict[str, Any] = {}
    for each in singles:
        if "fp8" in str(each.get("precision.policy", "")):
            continue  # keeps weights in fp8 beside the others
        offload = (*joined.get("memory.offload", ()), *each.get("memory.offload", ()))
        joined = {**joined, **each, **({"memory.offload": offload} if offload else {})}
        yield dict(joined)
    for ranks in (2, 4, 8):
        if hardware.device.startswith("cuda") and recipe.parallel.ranks is None:
            yield {"parallel.ranks": ranks, "parallel.strategy": "fsdp"}


def _least_rows(recipe: Recipe) -> int:
    return recipe.parallel.ranks or 1


def _micro_batch(recipe: Recipe, rows: int) -> dict[str, Any]:
    """Return a smaller micro-batch with the same batch of a step; nothing where there is none."""
    if rows >= recipe.batch_size or recipe.batch_size % rows:
        return {}
    more = recipe.gradient_accumulation_steps * (recipe.batch_size // rows)
    return {"batch_size": rows, "gradient_accumulation_steps": more}


def _with_largest_batch(
    loaded: LoadedRecipe,
    settings: dict[str, Any],
    prediction: Prediction,
    hardware: Hardware,
    *,
    below: float,
) -> tuple[dict[str, Any], Prediction]:
    """Return settings with the largest micro-batch that still fits: fewer passes are faster."""
    best = settings, prediction
    if "batch_size" not in settings:
        return best
    whole = loaded.recipe.batch_size
    rows = [n for n in range(settings["batch_size"] + 1, whole) if whole % n == 0]
    while rows:  # memory grows with the rows
        middle = rows[len(rows) // 2]
        tried = {**settings, **_micro_batch(loaded.recipe, middle)}
        result = predict(loaded.with_values(tried, origin=ORIGIN).recipe, hardware, below=below)
        fits = result.memory is not None and result.memory.needed <= below
        best = (tried, result) if fits else best
        rows = [n for n in rows if (n > middle) == fits and n != middle]
    return best


def largest_batch(recipe: Recipe, hardware: Hardware, prediction: Prediction) -> int | None:
    """Return about how many samples per micro-batch fit; None if unknown.

    Takes activations and temporaries as proportional to the samples.
    """
    limit, memory = budget(recipe, hardware), prediction.memory
    if limit is None or memory is None:
        return None
    growing = sum(memory.roles.get(role, 0) for role in ("activations", "temporaries", "batch"))
    room = limit - (memory.needed - growing)
    return max(math.floor(room * recipe.batch_size / growing), 0) if growing else None


@dataclass(frozen=True, kw_only=True)
class LargestModel:
    """About how large a model of the same kind fits."""

    blocks: int
    """Repeated blocks of the model as it is."""
    most_blocks: int
    width: float
    """How many times as wide all layers could be, with as many blocks."""


def largest_model(
    recipe: Recipe, hardware: Hardware, prediction: Prediction
) -> LargestModel | None:
    """Return about how deep or wide a model would fit; None if unknown.

    A block more adds the weights and activations of one. Wider layers have weights by the square of
    the width, and activations by the width.
    """
    limit, memory = budget(recipe, hardware), prediction.memory
    if limit is None or memory is None or recipe.parallel.ranks not in (None, 1):
        return None
    plan = next(each for each in prediction.plans if each.memory.predicted is not None)
    names = _repeated([module.name for module in plan.modules])
    if not names:
        return None
    weights = 0.0
    for role, total in plan.bytes.items():
        if total and role in memory.roles:
            inside = sum(m.bytes.get(role, 0) for m in plan.modules if _block(m.name) in names)
            weights += memory.roles[role] * inside / total
    activations = sum(n for name, n in memory.modules.items() if _block(name) in names)
    growing = sum(memory.roles.get(role, 0) for role in ("activations", "temporaries"))
    room = limit - (memory.needed - weights - growing)  # for what grows with the width
    width = (math.hypot(growing, 2 * math.sqrt(max(weights * room, 0))) - growing) / (2 * weights)
    per_block = (weights + activations) / len(names)
    more = math.floor((limit - memory.needed) / per_block)
    return LargestModel(blocks=len(names), most_blocks=max(len(names) + more, 0), width=width)


def _block(name: str) -> str:
    """Return the name up to its first number: the block that a module is in."""
    parts = name.split(".")
    ends = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[0] + 1]) if ends else ""


def _repeated(names: Sequence[str]) -> set[str]:
    """Return the names of the largest group of blocks with the same modules inside."""
    inside: dict[str, set[str]] = {}
    for name in names:
        if block := _block(name):
            inside.setdefault(block, set()).add(name.removeprefix(block))
    groups: dict[tuple[str, frozenset[str]], set[str]] = {}
    for block, modules in inside.items():
        key = block.rpartition(".")[0], frozenset(modules)
        groups.setdefault(key, set()).add(block)
    largest = max(groups.items(), key=lambda item: len(item[1]) * len(item[0][1]), default=None)
    return largest[1] if largest is not None and len(largest[1]) > 1 else set()


def _step(recipe: Recipe, task: Task, plan: Plan) -> StepEstimate:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = task.loss(model, batch)
        return value.total if isinstance(value, LossParts) else value

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        device = torch.device(plan.hardware.device)
        return build_optimizer(recipe.optimizer, model, device=device, groups=get_groups(task))

    return estimate_step(
        task.model,
        plan,
        batch=_example(recipe, task),
        loss=loss,
        optimizer=optimizer,
        clip_norm=recipe.clip_norm,
        ema_decay=recipe.ema.decay,
        micro_batches=recipe.gradient_accumulation_steps,
        copied=False,  # its parameter groups name the weights of this very model
    )


def _example(recipe: Recipe, task: Task) -> Any:
    """Return a micro-batch of the largest shape."""
    if task.example is not None:
        return task.example()
    samples = len(task.train_data)
    if not samples:
        raise UnsupportedError(
            f"The workload {recipe.workload} reads its data only when it trains, so the shapes of "
            "its batches are not known."
        )
    fetched = fetch(task.train_data, [i % samples for i in range(recipe.batch_size)])
    collate = task.collate or torch.utils.data.default_collate
    batch = collate(fetched) if isinstance(fetched, list) or task.collate else fetched
    (batch,) = task.as_one_step([batch])
    return map_tensors(batch, lambda t: t.to("meta"))


def _rows_per_rank(recipe: Recipe) -> int:
    return math.ceil(recipe.batch_size / (recipe.parallel.ranks or 1))


def _of_rank(recipe: Recipe, plan: Plan, memory: MemoryEstimate) -> MemoryEstimate:
    """Return what one of several ranks needs: shards, and buffers of collectives."""
    costs = costs_per_rank(recipe, plan)
    if costs is None:
        return memory
    roles = dict(memory.roles)
    before = sum(roles.values())
    for role, stored in costs.bytes.items():
        whole = plan.bytes.get(role, 0)
        roles[role] = round(roles[role] * stored / whole) if whole and role in roles else stored
    change = sum(roles.values()) - before
    note = f"weights, optimizer and buffers of {costs.ranks} ranks are from a formula"
    return replace(
        memory,
        allocated=memory.allocated + change,
        reserved=memory.reserved + change,
        roles=roles,
        notes=(*memory.notes, note),
    )


def _seconds(recipe: Recipe, plan: Plan, step: StepEstimate) -> StepSeconds | None:
    gpu = find_data_sheet(plan.hardware)
    if gpu is None:
        return None
    state = sum(plan.bytes.get(role, 0) for role in ("params", "master", "moments"))
    micro_batches = recipe.gradient_accumulation_steps
    return step_seconds(
        step.ops,
        gpu,
        state_bytes=2 * (state + plan.bytes.get("grads", 0)),
        captured=plan.execution == "graphed",
        micro_batches=micro_batches,
        simulated=min(micro_batches, 2),
    )


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    return f'"{text}"' if " " in text else text


def is_exhausted(error: RuntimeError) -> bool:
    """Return whether an error says that a device, or this machine, has no more memory."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def describe_exhaustion(error: RuntimeError, prepared: Prepared, folder: Path, *, step: int) -> str:
    """Return what was predicted and what is there, by role, when memory ran out."""
    actual = bytes_by_role(prepared.engine.weights)
    device = prepared.engine.weights.device
    lines = [f"Out of memory in step {step + 1}. {str(error).partition('. ')[0]}."]
    peak = peak_bytes(device)
    memory = earlier_prediction(folder).get(PREDICTED, {}).get("memory")
    if memory is None:
        lines.append("The step was not predicted. `narrowcast plan` predicts it.")
    else:
        roles = ", ".join(f"{role} {size(n)}" for role, n in memory["roles"].items() if n)
        lines.append(f"predicted: {size(memory['allocated'])} ({roles})")
    held = ", ".join(f"{role} {size(n)}" for role, n in actual.items() if n)
    lines.append(f"actual: {f'{size(peak)} at the peak, ' if peak else ''}of which {held}")
    return "\n".join(lines)


def earlier_prediction(folder: Path) -> dict[str, Any]:
    """Return the prediction in a run folder under its key; nothing where there is none."""
    try:
        plan = strict_json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return {PREDICTED: plan[PREDICTED]}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
