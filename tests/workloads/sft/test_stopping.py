"""What a run saves stops generating in plain transformers, with no stop tokens passed to it."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.sft.models.loading import CHAT_TEMPLATE

EOS, TURN_SIGNS, ROOM = "<|endoftext|>", ("<|im_start|>", "<|im_end|>"), 24
LEARN = ("steps=60", "batch_size=8", "optimizer.lr=0.02", "lr_schedule.warmup=5", "device=cpu",
         "precision.policy=fp32", "eval.every=0", "health.every=0", "data.max_seq_length=96",
         f"eval_tasks.max_new_tokens={ROOM}", "eval_tasks.samples=1")  # fmt: skip
KINDS = {
    "final_model": ("model.tune=full",),
    "adapter": ("model.tune=lora", "lora.lora_dropout=0"),
    "merged_model": ("model.tune=lora", "lora.lora_dropout=0", "lora.merge_adapter_with_base=true"),
}
"""Folder of the run that is loaded, and the settings that write it."""


@pytest.fixture
def base(tmp_path):
    """Write a base model laid out as Qwen2.5's: its own settings stop only at the eos token."""

    def write(*, chat_template=None, signs=TURN_SIGNS):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            eos_token=EOS,
            additional_special_tokens=list(signs),
            chat_template=chat_template,
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return write


@pytest.fixture
def settings(tmp_path):
    rows = [{"question": f"{n}?", "answer": "yes" if n % 2 else "no"} for n in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return lambda model, *more: [f"model.path={model}", f"data.path={path}", *LEARN, *more]


def generated(folder):
    """Return the tokens that plain transformers generates after the prompt of the run's sample."""
    (sample,) = json.loads((folder.parent / "samples.json").read_text())["samples"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
    out = model.generate(**prompt, max_new_tokens=ROOM)[0, prompt.input_ids.shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    return out.tolist(), text.strip(), sample, tokenizer


@pytest.mark.parametrize(
    ("layout", "folder"),
    [
        ("chat", "final_model"),
        ("chat", "adapter"),
        ("chat", "merged_model"),
        ("chatml", "final_model"),
        ("chatml", "adapter"),
        ("chatml in letters", "merged_model"),
    ],
)
def test_saved_models_stop_in_plain_transformers(layout, folder, base, settings, tmp_path):
    model = base(
        chat_template=CHAT_TEMPLATE if layout == "chat" else None,
        signs=() if layout == "chatml in letters" else TURN_SIGNS,
    )
    asked = settings(model, f"data.template_format={layout.split()[0]}", *KINDS[folder])
    list(nc.train("sft/tiny", asked, out=tmp_path / "run"))
    tokens, text, sample, tokenizer = generated(tmp_path / "run" / folder)
    whole = folder != "adapter" and layout != "chatml in letters"
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>" if whole else EOS)
    assert len(tokens) < ROOM
    assert text.removesuffix("<|im_end|>") in ("yes", "no")
    assert sample["after"] == text  # the report shows what plain transformers writes


def test_samples_show_a_model_that_does_not_stop(base, settings, tmp_path):
    model = base(chat_template=CHAT_TEMPLATE)
    asked = settings(model, "model.eos_token=<|im_end|>", *KINDS["adapter"])
    list(nc.train("sft/tiny", asked, out=tmp_path / "run"))
    tokens, text, sample, _ = generated(tmp_path / "run" / "adapter")
    assert len(tokens) == ROOM
    assert sample["after"] == text


def test_eos_token_of_the_recipe_ends_responses_and_is_saved(base, settings, tmp_path):
    model = base(chat_template=CHAT_TEMPLATE)
    asked = settings(model, "model.eos_token=<|im_end|>", "steps=1", *KINDS["final_model"])
    run = nc.train("sft/tiny", asked, out=tmp_path / "run")
    list(run)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final_model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final_model")
    end, before = tokenizer.convert_tokens_to_ids(["<|im_end|>", EOS])
    assert tokenizer.eos_token_id == end
    assert saved.config.eos_token_id == end
    assert saved.generation_config.eos_token_id == [end, before]
    tokens, learnt = run.task.train_data.rows.row(0)
    assert tokens[learnt][-1] == end
    assert before not in tokens


def test_adapter_whose_base_never_stops_is_announced(base, settings):
    model = base(chat_template=CHAT_TEMPLATE)
    asked = settings(model, "model.eos_token=<|im_end|>", *KINDS["adapter"])
    task = build_task(load_recipe("sft/tiny", asked).recipe, device=torch.device("cpu"))
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    assert any(f"pass eos_token_id={end} to generate()" in note for note in task.info.notes)


def test_eos_token_outside_the_vocabulary_raises(base, settings):
    asked = settings(base(), "model.eos_token=<|im_stop|>")
    with pytest.raises(ConfigError, match=r"model.eos_token .* got <\|im_stop\|>. .*<\|im_end\|>"):
        build_task(load_recipe("sft/tiny", asked).recipe, device=torch.device("cpu"))
