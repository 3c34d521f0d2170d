"""The tasks as the engine trains them: gradients, groups, micro-batches, and runs that go on."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import narrowcast as nc
from narrowcast.runs import EvalRecord, StepRecord, same_trajectory
from narrowcast.training.optimizers import build_optimizer, get_groups
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.genomics.build import build_parts, make_network
from narrowcast.workloads.genomics.models.hyena import ImplicitFilter
from narrowcast.workloads.genomics.task import Genomic

CPU = torch.device("cpu")
SMALL = (
    "epochs=null", "steps=4", "batch_size=4", "gradient_accumulation_steps=1", "model.width=16",
    "model.layers=2",
    "model.dropout=0", "eval.every=0", "eval.keep_best=false", "eval.patience=0",
    "health.every=0", "device=cpu", "precision.task=null", "precision.policy=fp32",
)  # fmt: skip
TASKS = ("annotation", "variant_effect", "protein_function", "generation", "domain_adaptation")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Sequences of unequal length whose class is whether they begin with A."""
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    generator = torch.Generator().manual_seed(0)
    lines = ["sequence,label"]
    for length in torch.randint(5, 33, (60,), generator=generator).tolist():
        text = "".join("ACGT"[n] for n in torch.randint(4, (length,), generator=generator))
        lines.append(f"{text},{int(text[0] == 'A')}")
    path.write_text("\n".join(lines))
    return path


def genomic(recipe, *words, device=CPU):
    loaded = load_recipe(f"genomics/{recipe}", [*SMALL, *words]).recipe
    return Genomic(recipe=loaded, parts=build_parts(loaded, device=device), device=device)


def words_for(task, rows):
    """What a task is tried with in little time."""
    if task == "domain_adaptation":
        return ["objective.task=variant_effect", f"data.path={rows}", "tuning.unfreeze_over=0"]
    return ["data.max_length=64"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("backbone", ["hyena", "attention", "cnn"])
def test_every_parameter_gets_a_gradient(task, backbone, rows):
    made = genomic(task, f"model.backbone={backbone}", *words_for(task, rows))
    batch = made.parts.train.__getitems__([0, 1, 2, 3])
    made.loss(made.parts.network.train(), batch).backward()
    without = [
        name
        for name, p in made.parts.network.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert without == []


@pytest.mark.parametrize("patching", ["static", "entropy"])
def test_with_patches_every_parameter_gets_a_gradient_too(patching, rows):
    made = genomic("variant_effect", f"data.path={rows}")
    parts = made.parts
    # Patches of letters in doubt are found by a small model, here one that has learnt nothing.
    kept = replace(parts.info, config=replace(parts.info.config, patching=patching, patch_size=4))
    network = make_network(kept, parts.tokenizer, parts.target, seed=0, device=CPU)
    made = replace(made, parts=replace(parts, network=network, info=kept))
    made.loss(network, parts.train.__getitems__([0, 1, 2])).backward()
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None or not p.grad.any()] == []
    held = [p for group in get_groups(made.task()) for p in group.parameters]
    assert len(held) == len(trained)


def gradients(made, batches):
    made.parts.network.zero_grad()
    for batch in batches:
        (made.loss(made.parts.network, batch) / len(batches)).backward()
    return {name: p.grad.clone() for name, p in made.parts.network.named_parameters()}


@pytest.mark.parametrize("task", ["generation", "annotation"])
def test_two_micro_batches_have_the_gradients_of_one_of_all(task, rows, tmp_path):
    path = rows
    if task == "annotation":
        lines = [line.split(",")[0] for line in rows.read_text().split()[1:]]
        # Of half of its letters nobody knows the class.
        classes = [f"{'-' * (len(text) // 2)}{'01' * 20}"[: len(text)] for text in lines]
        texts = [",".join(pair) for pair in zip(lines, classes, strict=True)]
        path = tmp_path / "letters.csv"
        path.write_text("\n".join(["sequence,label", *texts]))
    labels = ["objective.labels=[x, y]"] if task == "annotation" else []
    made = genomic(task, f"data.path={path}", *labels)
    lengths = [len(made.parts.train.tokens[at]) for at in range(len(made.parts.train))]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    few, many = ([*order[:3]], [*order[-3:]])
    parts = [made.parts.train.__getitems__(part) for part in (few, many)]
    counts = [int(made.parts.target.count(part)) for part in parts]
    assert counts[1] > 2 * counts[0]
    whole = gradients(made, [made.parts.train.__getitems__(few + many)])
    halves = gradients(made, made.weigh(parts))
    for name, expected in whole.items():
        torch.testing.assert_close(halves[name], expected, rtol=1e-4, atol=1e-6)
    unweighted = gradients(made, parts)
    assert not torch.allclose(unweighted["head.out.bias"], whole["head.out.bias"], rtol=1e-3)


def test_micro_batches_without_any_label_weigh_nothing():
    made = genomic("annotation", "data.max_length=64")
    batch = made.parts.train.__getitems__([0, 1])
    bare = {**batch, "targets": torch.full_like(batch["targets"], -100)}
    weighed = made.weigh([bare, bare])
    assert [made.loss(made.parts.network, each).item() for each in weighed] == [0, 0]


def test_loss_and_weights_wait_for_no_device(rows, monkeypatch):
    made = genomic("generation", f"data.path={rows}", "data.mutate=0.2")
    batches = [made.parts.train.__getitems__([0, 1]), made.parts.train.__getitems__([2])]

    def waits(self):
        raise AssertionError("a number was read on the host")

    monkeypatch.setattr(torch.Tensor, "item", waits)
    monkeypatch.setattr(torch.Tensor, "__bool__", waits)
    monkeypatch.setattr(torch.Tensor, "__int__", waits)
    monkeypatch.setattr(torch.Tensor, "tolist", waits)
    for batch in made.weigh(batches):
        made.loss(made.parts.network.train(), batch)


def test_mutations_touch_neither_padding_nor_the_variant():
    made = genomic("variant_effect", "data.mutate=0.9")
    batch = made.parts.train.__getitems__(list(range(16)))
    batch["mask"][:, -20:] = False
    changed = made._mutated(batch)
    same = batch["tokens"] == batch["alternative"]
    for key in ("tokens", "alternative"):
        assert torch.equal(changed[key][~same], batch[key][~same])
        assert torch.equal(changed[key][:, -20:], batch[key][:, -20:])
    assert torch.equal(changed["tokens"][same], changed["alternative"][same])
    moved = (changed["tokens"] != batch["tokens"])[same & batch["mask"]].float().mean().item()
    # Of 16 rows of 44 letters nine tenths are drawn anew, and a quarter of those are the same.
    assert moved == pytest.approx(0.9 * 0.75, abs=0.1)
    assert set(changed["tokens"].unique().tolist()) <= set(made.parts.letters.tolist())


def test_what_comes_next_is_learnt_as_it_was_before_mutations(rows):
    made = genomic("generation", f"data.path={rows}", "data.mutate=0.5")
    batch, seen = made.parts.train.__getitems__([0, 1, 2, 3]), []

    class Seer(torch.nn.Module):
        def forward(self, tokens, mask, alternative):
            seen.append(tokens)
            return torch.nn.functional.one_hot(batch["tokens"].roll(-1, 1)) * 50.0

    # Who says what truly comes next is right, although what it was given is not what there was.
    assert made.loss(Seer().train(), batch).item() == pytest.approx(0, abs=1e-6)
    assert not torch.equal(seen[0], batch["tokens"])
    made.loss(Seer().eval(), batch)
    assert torch.equal(seen[1], batch["tokens"])


def optimizer_of(made):
    task = made.task()
    section = made.recipe.optimizer
    return build_optimizer(section, task.model, device=CPU, groups=get_groups(task))


def test_learning_rates_fall_by_the_decay_from_stage_to_stage(rows):
    words = (f"data.path={rows}", "tuning.layerwise_decay=0.5", "optimizer.lr=0.064")
    made = genomic("variant_effect", *words)
    network = made.parts.network
    rates = {p: g["lr"] for g in optimizer_of(made).param_groups for p in g["params"]}
    blocks = list(network.backbone.blocks)
    stages = [network.head, network.backbone.norm, *blocks[::-1], network.backbone.embed]
    for depth, stage in enumerate(stages):
        for parameter in stage.parameters():
            assert rates.pop(parameter) == pytest.approx(0.064 * 0.5**depth)
    assert not rates


def test_filters_do_not_decay(rows):
    made = genomic("variant_effect", f"data.path={rows}", "optimizer.weight_decay=0.25")
    decays = {p: g["weight_decay"] for g in optimizer_of(made).param_groups for p in g["params"]}
    filters = {
        p for m in made.parts.network.modules() if isinstance(m, ImplicitFilter)
        for p in m.parameters()
    }  # fmt: skip
    assert filters
    for parameter, decay in decays.items():
        expected = 0 if parameter in filters or parameter.ndim < 2 else 0.25
        assert decay == expected


def weights_by_step(run):
    """Return the weights after each step, by name, from the beginning."""
    states = []
    for record in run:
        if isinstance(record, StepRecord):
            states.append({k: v.clone() for k, v in run.prepared.model.state_dict().items()})
    return states


def test_stages_thaw_one_after_another_the_last_first(rows, tmp_path):
    words = [*SMALL, f"data.path={rows}", "steps=12", "tuning.unfreeze_over=0.5",
             "lr_schedule.name=constant", "lr_schedule.warmup_ratio=0"]  # fmt: skip
    loaded = load_recipe("genomics/variant_effect", words).recipe
    first = build_task(loaded, device=CPU).model.state_dict()
    run = nc.train("genomics/variant_effect", words, out=tmp_path / "r")
    states = [first, *weights_by_step(run)]
    stages = ["backbone.norm.", "backbone.blocks.1.", "backbone.blocks.0.", "backbone.embed."]
    for depth, prefix in enumerate(stages, 1):
        frozen = math.ceil(12 * 0.5 * depth / 4)
        for name in (name for name in first if name.startswith(prefix)):
            for step in range(1, frozen + 1):
                assert torch.equal(states[step][name], first[name]), (name, step)
            assert not torch.equal(states[frozen + 1][name], first[name]), (name, frozen + 1)
    assert not torch.equal(states[1]["head.out.weight"], first["head.out.weight"])


def test_a_frozen_base_is_left_bit_for_bit(rows, tmp_path):
    words = [*SMALL, f"data.path={rows}", "tuning.freeze=true", "optimizer.weight_decay=0.5"]
    first = build_task(load_recipe("genomics/variant_effect", words).recipe, device=CPU).model
    list(nc.train("genomics/variant_effect", words, out=tmp_path / "r"))
    last = load_file(tmp_path / "r" / "model.safetensors")
    for name, weight in first.state_dict().items():
        assert torch.equal(last[name], weight) is name.startswith("backbone."), name


@pytest.mark.parametrize("task", ["generation", "variant_effect"])
def test_a_run_resumed_in_the_middle_is_the_same_bit_for_bit(task, rows, tmp_path):
    words = [*SMALL, f"data.path={rows}", "model.dropout=0.2", "data.mutate=0.1",
             "gradient_accumulation_steps=2",
             "tuning.unfreeze_over=0.5", "steps=6", "eval.every=2"]  # fmt: skip
    whole = list(nc.train(f"genomics/{task}", words, out=tmp_path / "whole"))
    words.append("checkpoint.every=3")
    with nc.train(f"genomics/{task}", words, out=tmp_path / "parts") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == 4:
                break
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    rest = list(nc.resume(tmp_path / "parts"))
    for kind in (StepRecord, EvalRecord):
        before = {record.step: record for record in whole if isinstance(record, kind)}
        later = {record.step: record for record in rest if isinstance(record, kind)}
        assert 1 < min(later) <= max(later) == 6
        assert all(same_trajectory(before[step], record) for step, record in later.items())
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_evaluation_is_that_of_all_rows_at_once(rows):
    made = genomic("generation", f"data.path={rows}", "data.validation_share=0.4", "batch_size=5")
    network = made.parts.network.eval()
    with torch.no_grad():
        measured = made.evaluate(network)
        whole = made.parts.validation.__getitems__(list(range(len(made.parts.validation))))
        loss = made.parts.target.loss(network(whole["tokens"], whole["mask"]), whole).item()
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    assert measured["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_plan_makes_shapes_and_no_weights(task):
    recipe = load_recipe(f"genomics/{task}", ["device=cpu"]).recipe
    model = build_task(recipe, device=torch.device("meta")).model
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_what_is_counted_are_tokens_where_a_token_has_more_letters(rows):
    assert genomic("generation", f"data.path={rows}").task().info.unit == "base"
    kmers = genomic("generation", f"data.path={rows}", "data.tokenizer=kmer").task()
    assert kmers.info.unit == "token"
    batch = kmers.train_data.__getitems__([0])
    assert kmers.items(batch) == len(kmers.train_data.tokens[0])
