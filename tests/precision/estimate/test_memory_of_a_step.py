"""The predicted memory of a step, against counted storages of a real one and measured GPU peaks."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowcast as nc
from narrowcast.bench.zoo.models import ZOO
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware.catalog import named_hardware

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
CPU = nc.detect_hardware("cpu")


class CountedStorages(TorchDispatchMode):
    """The bytes of all storages that are alive, and their peak."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live:
            return

        def gone(_: object) -> None:
            self.live.pop(key, None)
            self.now -= size

        self.live[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            self._add(each)
        return result


def counted_peak(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    policy: str,
    memory: nc.Memory | None = None,
    micro_batches: int = 1,
) -> int:
    counted = CountedStorages(*model.parameters(), *model.buffers(), *tree_leaves(batch))
    with counted:
        run = nc.prepare(
            model, torch.optim.AdamW(model.parameters()), policy=policy, memory=memory, clip_norm=1
        )
        for _ in range(2):
            counted.peak = counted.now
            for _ in range(micro_batches):
                with run.autocast():
                    loss = loss_fn(model, batch)
                run.backward(loss)
                del loss
            run.step()
    return counted.peak


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(64) for _ in range(3)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def example() -> Any:
    return torch.randn(8, 64, 64), torch.randint(10, (8, 64))


@pytest.mark.parametrize(
    ("policy", "checkpointing", "micro_batches"),
    [
        ("fp32", "none", 1),
        ("bf16", "blocks", 1),
        ("bf16, params=bf16, master=split", "selective", 3),
        ("fp16", "none", 2),
    ],
)
def test_predicted_peak_is_that_of_a_real_step_on_the_cpu(
    policy: str, checkpointing: Any, micro_batches: int
) -> None:
    memory = nc.Memory(activation_checkpointing=checkpointing)
    batch = example()
    plan = nc.plan(
        Classifier(),
        policy,
        hardware=CPU,
        memory=memory,
        batch=batch,
        loss_fn=cross_entropy,
        gradient_accumulation_steps=micro_batches,
    )
    measured = counted_peak(
        Classifier(),
        batch,
        cross_entropy,
        policy=policy,
        memory=memory,
        micro_batches=micro_batches,
    )
    assert plan.memory.predicted is not None
    assert plan.memory.predicted.allocated == pytest.approx(measured, rel=0.03)


@pytest.fixture(scope="module")
def peaks() -> list[int]:
    """Real peaks of a CPU step with none to all three blocks recomputed.

    The last block is computed again at the peak, so recomputing it saves nothing.
    """
    names = [f"blocks.{i}" for i in range(3)]
    memories = [None, *(_recomputed(names[:count]) for count in (1, 2, 3))]
    return [
        counted_peak(Classifier(), example(), cross_entropy, policy="bf16", memory=memory)
        for memory in memories
    ]


def _recomputed(names: list[str]) -> nc.Memory:
    return nc.Memory(activation_checkpointing="blocks", blocks=names)


def automatic(budget: int | str) -> nc.Plan:
    return nc.plan(
        Classifier(),
        "bf16",
        hardware=CPU,
        memory=nc.Memory(activation_checkpointing="auto", budget=budget),
        batch=example(),
        loss_fn=cross_entropy,
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_auto_recomputes_as_few_blocks_as_real_peaks_need(peaks: list[int], count: int) -> None:
    """The budget lies between real peaks, with the room that is left for the prediction."""
    above = peaks[count - 1] if count else 2 * peaks[0]
    budget = round(1.05 * (peaks[count] + above) / 2)
    plan = automatic(budget)
    assert plan.memory.blocks == tuple(f"blocks.{i}" for i in range(count))
    assert f"{count} of 3 recomputed" in str(plan)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    assert nc.prepare(model, optimizer, policy=plan).plan.memory.chosen == plan.memory.chosen


def test_auto_raises_if_all_blocks_recomputed_do_not_fit(peaks: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="all 3 blocks recomputed"):
        automatic(peaks[3] // 2)


def test_auto_without_a_batch_raises() -> None:
    with pytest.raises(ConfigError, match="needs a batch"):
        nc.plan(Classifier(), "bf16", memory=nc.Memory(activation_checkpointing="auto"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"budget": "8GiB"}, "memory.budget has no effect"),
        ({"activation_checkpointing": "auto", "budget": "8 apples"}, "memory size"),
        ({"activation_checkpointing": "auto", "offload": ["activations"]}, "cannot be combined"),
    ],
)
def test_budgets_that_mean_nothing_raise(settings: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        nc.Memory(**settings)


def test_peak_of_gpt_350m_on_an_h200_is_predicted_within_five_percent() -> None:
    rows = json.loads((RESULTS / "step-350m-rooms-h200.json").read_text())["rows"]
    (row,) = [r for r in rows if r["name"] == "narrowcast bf16, params=bf16, master=split"]
    recipe = nc.load_recipe("lm/gpt-350m", ["precision.policy=bf16, params=bf16, master=split"])
    from narrowcast.workloads import build_task

    task = build_task(recipe.recipe, device=torch.device("meta"))
    tokens = torch.empty(16, 1024, dtype=torch.int64, device="meta")
    plan = nc.plan(
        task.model,
        "bf16, params=bf16, master=split",
        hardware=named_hardware("h200"),
        batch=(tokens, tokens),
    )
    assert plan.memory.predicted is not None
    assert plan.memory.predicted.allocated == pytest.approx(row["peak_bytes"], rel=0.05)
    assert plan.fits("24GiB")
    assert not plan.fits("15GB")


@pytest.mark.parametrize(
    ("name", "mode"), [("bert-base", "eager"), ("bert-base", "compiled"), ("resnet-50", "compiled")]
)
def test_peaks_of_models_on_an_h200_are_predicted_within_one_percent(name: str, mode: Any) -> None:
    pytest.importorskip("transformers")
    rows = json.loads((RESULTS / "models-h200.json").read_text())["rows"]
    key = (name, "bf16 + split", mode)
    (measured,) = [r["peak_bytes"] for r in rows if (r["model"], r["way"], r["mode"]) == key]
    built = ZOO[name].build(torch.device("meta"), quick=False)
    plan = nc.plan(
        built.model,
        "bf16, params=bf16, master=split",
        hardware=named_hardware("h200"),
        execution=mode,
        batch=built.inputs,
        loss_fn=lambda model, batch: built.loss_fn(model, *batch),
    )
    assert plan.memory.predicted is not None
    assert plan.memory.predicted.allocated == pytest.approx(measured, rel=0.01)


def test_prediction_leaves_model_and_batch_as_they_were() -> None:
    model, batch = Classifier(), example()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nc.plan(model, "bf16", hardware=CPU, batch=batch, loss_fn=cross_entropy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert type(model.head) is nn.Linear
    assert torch.autograd.grad(cross_entropy(model, batch), model.head.weight)[0].any()


def test_fits_without_a_batch_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="batch="):
        nc.plan(Classifier(), "bf16", hardware=CPU).fits("24GiB")


def test_a_prepared_model_is_not_rehearsed() -> None:
    model = Classifier()
    nc.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="prepared already"):
        nc.plan(model, "bf16", hardware=CPU, batch=example(), loss_fn=cross_entropy)


def test_a_model_that_reads_values_is_not_predicted() -> None:
    class Reader(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum().item()

    with pytest.raises(UnsupportedError, match="reads a value"):
        nc.plan(Reader(4, 4), "fp32", hardware=CPU, batch=torch.randn(2, 4))


@pytest.mark.parametrize("budget", ["24", "GiB", "-1GiB", "0GiB", 0, True])
def test_a_budget_that_is_no_size_raises(budget: Any) -> None:
    plan = nc.plan(nn.Linear(4, 4), "fp32", hardware=CPU, batch=torch.randn(2, 4))
    with pytest.raises(ConfigError, match="24GiB"):
        plan.fits(budget)
