import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import narrowcast as nc
from narrowcast.cli.entry import run_command
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.sft.ica import load_networks
from narrowcast.workloads.sft.models.base import check_merge
from narrowcast.workloads.sft.models.loading import tiny_tokenizer
from narrowcast.workloads.sft.settings import LoraSection, SftModel

SMALL = ("device=cpu", "steps=4", "batch_size=4", "eval.every=0", "health.every=0")
SHOWN = ("eval_tasks.samples=2", "eval_tasks.max_new_tokens=4")
LORA = ("model.tune=lora", "lora.lora_dropout=0")
CPU = torch.device("cpu")


@pytest.fixture
def rows(tmp_path):
    """Forty rows of unequal length."""
    path = tmp_path / "rows.jsonl"
    text = [{"prompt": f"Count to {n}.", "completion": " ".join("abcdefghij"[: n % 9 + 1])}
            for n in range(40)]  # fmt: skip
    path.write_text("".join(f"{json.dumps(row)}\n" for row in text))
    return path


def words(model, rows, *more):
    return [f"model.path={model}", f"data.path={rows}", "data.max_seq_length=96", *SMALL, *more]


def task_of(model, rows, *more):
    recipe = load_recipe("sft/tiny", words(model, rows, *more)).recipe
    return build_task(recipe, device=CPU)


def trained(model, rows, folder, *more):
    return list(nc.train("sft/tiny", words(model, rows, *SHOWN, *more), out=folder))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_loss_is_that_of_every_conversation_by_itself(family, packing, rows, request):
    folder = request.getfixturevalue(family)
    task = task_of(folder, rows, f"data.packing={packing}")
    batch = task.train_data.__getitems__(list(range(min(6, len(task.train_data)))))
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    losses, count = 0.0, 0
    for tokens, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, end in pairwise(starts):
            logits = plain(tokens[None, start:end]).logits[0, :-1]
            wanted = labels[start + 1 : end]
            losses += F.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100).item()
            count += int((wanted != -100).sum())
    assert task.loss(task.model, batch).item() == pytest.approx(losses / count, rel=1e-5)


def test_the_parts_of_held_out_rows_are_what_an_evaluation_looks_at(llama, rows):
    task = task_of(llama, rows, f"data.validation_path={rows}", "batch_size=3")
    held, passed = task.held_out, []
    task.model.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(kwargs["input_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        task.evaluate(task.model)
        evaluated, passed[:] = list(passed), []
        for part in range(held.parts):
            held.headline(task.model, part)
    assert len(passed) == held.parts > 1
    assert all(map(torch.equal, evaluated[: held.parts], passed))


def test_every_token_of_a_step_counts_alike_in_whichever_micro_batch_it_is(llama, rows):
    task = task_of(llama, rows, "gradient_accumulation_steps=2", "data.packing=true")
    first, second = (task.train_data.__getitems__([n]) for n in (0, len(task.train_data) - 1))
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    counts = [(batch["labels"] != -100).sum() for batch in (first, second)]
    assert counts[0] != counts[1]
    whole = task.loss(task.model, both)
    parts = [task.loss(task.model, batch) for batch in task.as_one_step([first, second])]
    assert (sum(parts) / 2).item() == pytest.approx(whole.item(), rel=1e-6)


def test_what_fills_rows_up_is_not_counted(llama, rows):
    task = task_of(llama, rows)
    batch = task.train_data.__getitems__([0, 1, 2])
    lengths = [len(task.train_data.rows.row(n)[0]) for n in (0, 1, 2)]
    assert task.items(batch) == sum(lengths)
    assert batch["input_ids"].numel() > sum(lengths)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_trained_whole_is_loaded_by_transformers(family, rows, tmp_path, request):
    run = nc.train(
        "sft/tiny", words(request.getfixturevalue(family), rows, *SHOWN), out=tmp_path / "r"
    )
    records = list(run)
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert losses[-1] < losses[0]
    ours = run.prepared.model.eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "final_model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "r" / "final_model")
    ids = tokenizer("Count to 3.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert not (tmp_path / "r" / "model.safetensors").exists()
    assert len(json.loads((tmp_path / "r" / "samples.json").read_text())) > 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_loaded_by_peft_and_merged_they_say_the_same(family, rows, tmp_path, request):
    folder = request.getfixturevalue(family)
    merge = "lora.merge_adapter_with_base=true"
    run = nc.train("sft/tiny", words(folder, rows, *SHOWN, *LORA, merge), out=tmp_path / "r")
    list(run)
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(base, tmp_path / "r" / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "merged_model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        said, also, before = (
            adapted(ids).logits,
            merged(ids).logits,
            run.prepared.model.eval()(ids).logits,
        )
    assert torch.equal(said, before)
    torch.testing.assert_close(also, said, rtol=1e-5, atol=1e-5)


def test_adapters_leave_every_weight_of_the_base_as_it_was(llama, rows, tmp_path):
    run = nc.train("sft/tiny", words(llama, rows, *SHOWN, "model.tune=lora"), out=tmp_path / "r")
    list(run)
    before = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in run.prepared.model.state_dict().items()
        if "lora_" not in name
    }
    assert all(torch.equal(kept[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), ("auto", torch.float32)])
def test_a_model_is_saved_in_the_dtype_asked_for(asked, dtype, llama, rows, tmp_path):
    trained(llama, rows, tmp_path / "r", f"model.save_dtype={asked}")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "final_model", dtype="auto")
    assert saved.dtype == dtype


def test_without_validation_rows_a_part_of_the_training_rows_is_judged(llama, rows, tmp_path):
    records = trained(llama, rows, tmp_path / "r", "data.validation_split=0")
    (judged,) = [record for record in records if isinstance(record, EvalRecord)]
    assert judged.metrics["loss"] > 0


def test_activations_computed_again_give_the_same_gradients(llama, rows):
    grads = []
    for again in ("false", "true"):
        task = task_of(llama, rows, f"model.gradient_checkpointing={again}", *LORA)
        task.loss(task.model, task.train_data.__getitems__([0, 1])).backward()
        grads.append([p.grad for p in task.model.parameters() if p.requires_grad])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("again", ["blocks", "selective"])
def test_adapters_learn_the_same_when_blocks_are_computed_again(llama, rows, tmp_path, again):
    weights = []
    for how in ("none", again):
        trained(llama, rows, tmp_path / how, f"memory.activation_checkpointing={how}", *LORA)
        weights.append(load_file(tmp_path / how / "adapter" / "adapter_model.safetensors"))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    own = ("model.gradient_checkpointing=true", f"memory.activation_checkpointing={again}")
    with pytest.raises(ConfigError, match="own gradient checkpointing is on"):
        trained(llama, rows, tmp_path / "both", *own, *LORA)


def test_an_adapter_for_a_layer_that_is_not_there_is_refused(llama, rows):
    target = "lora.lora_target_modules=[q_proj,kproj]"
    with pytest.raises(ConfigError, match="must name linear layers, got kproj"):
        task_of(llama, rows, "model.tune=lora", target)


def test_a_conversation_longer_than_the_context_is_refused(llama, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 300, "completion": "b"}) + "\n")
    longer = ("data.max_seq_length=4096", "data.validation_split=0")
    with pytest.raises(ConfigError, match=r"got one with 322. Write data\.max_seq_length=128"):
        task_of(llama, path, *longer)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(llama, rows):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens([f"<{n}>" for n in range(50)])
    before = (llama / "tokenizer.json").read_text()
    tokenizer.save_pretrained(llama)
    try:
        with pytest.raises(ConfigError, match="but the model has 260"):
            task_of(llama, rows)
    finally:
        (llama / "tokenizer.json").write_text(before)


def test_frozen_weights_of_a_format_are_refused_where_all_are_trained(llama, rows):
    with pytest.raises(ConfigError, match="is for frozen weights"):
        load_recipe("sft/tiny", words(llama, rows, "model.base_dtype=bf16"))


def test_a_plan_reads_neither_weights_nor_rows(llama, tmp_path):
    given = words(llama, tmp_path / "nowhere.jsonl", "model.tune=lora")
    task = build_task(load_recipe("sft/tiny", given).recipe, device=torch.device("meta"))
    trained = [name for name, p in task.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_base_in_e4m3_is_merged_as_it_was_trained_beside(family, rows, tmp_path, request):
    folder = request.getfixturevalue(family)
    asked = (*LORA, "model.base_dtype=e4m3", "lora.merge_adapter_with_base=true")
    run = nc.train("sft/tiny", words(folder, rows, *SHOWN, *asked), out=tmp_path / "r")
    list(run)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "merged_model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        said, also = run.prepared.model.eval()(ids).logits, merged(ids).logits
    torch.testing.assert_close(also, said, rtol=1e-5, atol=1e-5)


def test_a_base_of_bitsandbytes_is_not_merged(llama, rows):
    asked = (*LORA, "model.base_dtype=nf4", "lora.merge_adapter_with_base=true")
    recipe = load_recipe("sft/tiny", words(llama, rows, *asked)).recipe
    with pytest.raises(ConfigError, match=r"again. Write lora\.merge_adapter_with_base=false"):
        check_merge(recipe.section(SftModel), recipe.section(LoraSection))


@pytest.mark.parametrize("tune", ["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_networks_do_not_move_in_what_is_saved(family, tune, rows, tmp_path, request):
    folder = request.getfixturevalue(family)
    asked = ("ica.mask_mode=freeze", "ica.ica_components=3", "ica.ica_percentile=80",
             f"model.tune={tune}", "optimizer.weight_decay=0.1",
             "lora.merge_adapter_with_base=true",
             "ica.samples=20", "steps=6")  # fmt: skip
    if tune == "full":
        asked = tuple(word for word in asked if "merge" not in word)
    trained(folder, rows, tmp_path / "r", *asked)
    networks = load_networks(tmp_path / "r" / "networks.json")
    saved = "final_model" if tune == "full" else "merged_model"
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / saved)
    moved = 0
    for layer, channels in networks.channels([0]).items():
        one, two = (_down(model, layer) for model in (before, after))
        others = [row for row in range(len(one)) if row not in channels]
        assert torch.equal(one[list(channels)], two[list(channels)])
        moved += int((one[others] != two[others]).any(1).sum())
    assert moved > 0


def _down(model, layer):
    """The rows of a down projection, one for each channel."""
    if hasattr(model, "transformer"):
        return model.transformer.h[layer].mlp.c_proj.weight.T
    return model.model.layers[layer].mlp.down_proj.weight


@pytest.mark.parametrize("mode", ["lesion", "preserve", "key", "complement"])
def test_masks_are_on_while_it_trains_and_gone_from_what_is_saved(mode, llama, rows, tmp_path):
    asked = (f"ica.mask_mode={mode}", "ica.ica_components=2", "ica.samples=20")
    run = nc.train("sft/tiny", words(llama, rows, *SHOWN, *asked), out=tmp_path / "r")
    list(run)
    measured = json.loads((tmp_path / "r" / "masked.json").read_text())
    assert measured["masked"]["loss"] != measured["lifted"]["loss"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "final_model")
    batch = run.task.train_data.__getitems__([0, 1])
    assert saved(input_ids=batch["input_ids"], labels=batch["labels"]).loss != run.task.loss(
        run.prepared.model, batch
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", ["lesion", "freeze"])
def test_networks_of_a_base_in_e4m3_are_found(mode, family, rows, tmp_path, request):
    asked = ("model.base_dtype=e4m3", *LORA, f"ica.mask_mode={mode}", "ica.samples=20")
    trained(request.getfixturevalue(family), rows, tmp_path / "r", *asked)
    assert load_networks(tmp_path / "r" / "networks.json").size(0) > 0


def test_the_terminal_shows_what_the_search_for_networks_found(llama, rows, tmp_path, capsys):
    asked = words(
        llama, rows, "eval_tasks.samples=0", "ica.freeze=true", "ica.samples=20", "steps=1"
    )
    command = ["train", "sft/tiny", *asked, "ica.max_iter=1", "--out", str(tmp_path / "run")]
    assert run_command(command) == 0
    shown = " ".join(" ".join(capsys.readouterr()).split())
    networks = load_networks(tmp_path / "run" / "networks.json")
    layout = networks.layout
    total = len(layout.layers) * layout.width
    assert f"networks of component 0: {networks.size(0):,} of {total:,} channels" in shown
    assert "solutions had not converged" in shown
    assert all(finding in shown for finding in networks.provenance.findings)


@pytest.mark.parametrize(
    "word", ["ica.mask_mode=lesion", "ica.freeze=true", "model.base_dtype=e4m3"]
)
def test_a_run_goes_on_bit_for_bit(word, llama, rows, tmp_path):
    asked = words(
        llama, rows, "eval_tasks.samples=0", "model.tune=lora", "ica.samples=20", "steps=6"
    )
    if word.startswith("model"):
        asked.remove("ica.samples=20")
    list(nc.train("sft/tiny", [*asked, word], out=tmp_path / "whole"))
    list(nc.train("sft/tiny", [*asked, word, "steps=3"], out=tmp_path / "parts"))
    list(nc.resume(tmp_path / "parts", ["steps=6"]))
    one, two = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors")
                for run in ("whole", "parts"))  # fmt: skip
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("base", ["bf16", "e4m3", "int8", "nf4", "fp4"])
def test_weights_that_are_trained_are_not_kept_in_fewer_bits(base, llama, rows):
    with pytest.raises(ConfigError, match=f"base_dtype={base} is for frozen weights"):
        load_recipe("sft/tiny", words(llama, rows, f"model.base_dtype={base}"))


def test_a_tied_head_is_not_merged_into_the_embedding(rows):
    asked = ("model.tune=lora", "lora.lora_target_modules=[lm_head,q_proj]")
    with pytest.raises(ConfigError, match="embed_tokens, whose weight is tied to lm_head"):
        task_of("tiny", rows, *asked, "lora.merge_adapter_with_base=true")


def test_a_tied_head_is_saved_once(rows, tmp_path):
    trained("tiny", rows, tmp_path / "r", "model.save_dtype=bf16")
    saved = load_file(tmp_path / "r" / "final_model" / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert "model.embed_tokens.weight" in saved


def lively(model):
    """Give a model weights with which its tokens look at one another, as a trained one has."""
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def test_a_model_that_looks_ahead_is_refused(rows, tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(**shape, intermediate_size=16, vocab_size=260)
    lively(BertForMaskedLM(config)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedError, match="is not causal"):
        task_of(tmp_path / "bert", rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_that_a_model_cannot_keep_apart_are_refused(attention, rows, tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 16}
    config = OPTConfig(**shape, vocab_size=260, max_position_embeddings=128, word_embed_proj_dim=16)
    lively(OPTForCausalLM(config)).save_pretrained(tmp_path / "opt")
    tiny_tokenizer().save_pretrained(tmp_path / "opt")
    asked = ("data.packing=true", f"model.attn_implementation={attention}")
    with pytest.raises(UnsupportedError, match="conversations in one row attend to each other"):
        task_of(tmp_path / "opt", rows, *asked)


def test_a_folder_without_a_tokenizer_is_refused(rows, tmp_path):
    config = Qwen2Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, vocab_size=260)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    with pytest.raises(ConfigError, match="tokenizer"):
        task_of(tmp_path / "qwen", rows)


def test_epochs_go_through_the_data_as_often_as_asked(llama, rows, tmp_path):
    asked = words(
        llama,
        rows,
        "eval_tasks.samples=0",
        "epochs=2",
        "gradient_accumulation_steps=4",
        "batch_size=4",
    )
    asked = [word for word in asked if not word.startswith("steps=")]
    steps = [r for r in nc.train("sft/tiny", asked) if isinstance(r, StepRecord)]
    assert len(steps) == 5  # 36 rows twice, in steps of 16
