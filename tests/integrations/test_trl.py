import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from narrowcast.integrations import trl as integration
from narrowcast.integrations.transformers import TrainerMixin, attach, trainer_precision
from narrowcast.integrations.trl import use_plan_in_fused_heads
from narrowcast.precision.fused.chunked_pass import chunked_log_probs as kernel
from narrowcast.precision.step.prepared import prepare

trl = pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("peft")
import peft  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers

SPLIT = "bf16, params=bf16, master=split"
WORDS = [f"w{i}" for i in range(28)]
LORA = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=2,
        bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def texts(count=32):
    return Dataset.from_list(
        [
            {"text": " ".join(WORDS[(i * 7 + j) % 28] for j in range(4 + i % 5))}
            for i in range(count)
        ]
    )


def settings(tmp_path, **changes):
    common = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "gradient_checkpointing": False, "bf16": False,
    }  # fmt: skip
    return common | changes


def assert_equal_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sft(tmp_path, tokenizer, **changes):
    special = {key: changes.pop(key) for key in ("peft_config", "eval_dataset") if key in changes}
    args = trl.SFTConfig(**settings(tmp_path, max_length=16, **changes))
    return trl.SFTTrainer(
        model=llama(), args=args, train_dataset=texts(), processing_class=tokenizer, **special
    )


def own_sft(trainer, policy):
    """The same training in a loop of our own, on the batches of the trainer."""
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(4)
    model, batches = trainer.model, list(trainer.get_train_dataloader())
    undo = use_plan_in_fused_heads(model)
    run = prepare(model, optimizer, policy=policy, clip_norm=1.0, scheduler=scheduler)
    model.train()
    for start in range(0, 8, 2):
        micro = batches[start : start + 2]
        items = sum((b["labels"][:, 1:] != -100).sum() for b in micro)
        for batch in micro:
            with run.autocast():
                output = model(**batch, use_cache=False, fused_lm_head=True)
                loss = -output.log_probs.sum() / items
            run.backward(loss)
        run.step()
    run.release()
    undo()
    return model


@pytest.mark.parametrize("policy", ["fp32", "fp16", SPLIT, "fp8-delayed"])
def test_sft_equals_a_loop_with_prepare(tmp_path, tokenizer, policy):
    trainer = sft(tmp_path, tokenizer, bf16=True, train_sampling_strategy="sequential")
    attach(trainer, policy).train()
    other = sft(tmp_path, tokenizer, train_sampling_strategy="sequential")
    assert_equal_weights(trainer.model, own_sft(other, policy))
    assert {"entropy", "mean_token_accuracy", "skipped_steps"} <= set(trainer.state.log_history[0])


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_on_a_gpu_takes_the_loss_kernel(tmp_path, tokenizer, monkeypatch, loss_type):
    # As on a GPU, where TRL leaves out tokens without a label.
    monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
    calls, results = [], []
    for ours in (False, True):
        monkeypatch.setattr(integration, "_can_chunk", lambda _, ours=ours: ours)
        monkeypatch.setattr(
            integration, "chunked_log_probs", lambda *a, **k: calls.append(1) or kernel(*a, **k)
        )
        trainer = sft(tmp_path, tokenizer, loss_type=loss_type)
        attach(trainer, "fp32").train()
        results.append((trainer.model, trainer.state.log_history))
    assert len(calls) == (8 if loss_type == "nll" else 0)  # dft weighs tokens by their probability
    (theirs, before), (mine, after) = results
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    for one, other in zip(before, after, strict=True):
        for name in {"loss", "entropy", "mean_token_accuracy", "grad_norm"} & set(one):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name


def test_sft_with_packing_and_padding_free_learns(tmp_path, tokenizer):
    for changes in ({"packing": True}, {"padding_free": True, "max_length": None}):
        args = settings(tmp_path, max_steps=8, gradient_accumulation_steps=1)
        config = trl.SFTConfig(**{**args, "max_length": 8, **changes})
        model = llama()
        trainer = trl.SFTTrainer(
            model=model, args=config, train_dataset=texts(), processing_class=tokenizer
        )
        attach(trainer, SPLIT).train()
        assert losses(trainer)[-1] < losses(trainer)[0]


def test_lora_with_packing_resumes_bit_for_bit(tmp_path, tokenizer):
    changes = {"peft_config": LORA, "packing": True, "save_strategy": "steps", "save_steps": 2}
    changes |= {"per_device_train_batch_size": 2}
    straight = attach(sft(tmp_path, tokenizer, **changes), SPLIT)
    straight.train()
    again = attach(sft(tmp_path, tokenizer, **changes), SPLIT)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert_equal_weights(again.model, straight.model)
    loaded = peft.PeftModel.from_pretrained(llama(), f"{tmp_path}/checkpoint-4")
    assert_equal_weights(loaded, straight.model)


def test_fused_head_in_chunks_equals_the_kernel_of_trl(monkeypatch):
    """The head has hooks, as a monitored one, so that it is called; TRL multiplies by weights."""
    monkeypatch.setattr("narrowcast.integrations.trl._CHUNK_ELEMENTS", 32 * 3)
    every = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    results, calls = [], []
    for ours in (False, True):
        model = llama()
        model.config.final_logit_softcapping, model.config.logit_scale = 3.0, 0.5
        trl.trainer.utils.add_fused_lm_head(model, temperature=0.7, outputs=every)
        if ours:
            model.lm_head.register_forward_hook(lambda *_: calls.append(1))
            undo = use_plan_in_fused_heads(model)
        ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
        labels = ids.clone()
        labels[0, :3] = -100
        output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (output.loss + 0.1 * output.entropy.sum()).backward()
        results.append((output, model.lm_head.weight.grad))
    theirs, mine = results
    assert len(calls) >= 4
    for name in ("loss", *every):
        torch.testing.assert_close(mine[0][name], theirs[0][name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-6)
    undo()
    before = len(calls)
    model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert len(calls) == before


def test_monitor_reads_the_head_of_sft(tmp_path, tokenizer):
    trainer = sft(tmp_path, tokenizer)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1e7)
    seen = []
    attach(trainer, "fp16", health_every=1, max_skipped_steps=100)
    calls = trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    trainer.train()
    calls.remove()
    assert len(seen) >= 8
    assert max(entry.get("findings", 0) for entry in trainer.state.log_history) > 0


def preferences(count=16):
    return Dataset.from_list([
        {"prompt": WORDS[i], "chosen": f" {WORDS[i + 1]} w1", "rejected": f" {WORDS[i + 2]} w2"}
        for i in range(count)
    ])  # fmt: skip


def dpo(tmp_path, tokenizer, **changes):
    adapter = changes.pop("peft_config", None)
    special = {"peft_config": adapter} if adapter else {"ref_model": llama()}
    args = trl.DPOConfig(**settings(tmp_path, gradient_accumulation_steps=1, **changes))
    return trl.DPOTrainer(
        model=llama(), args=args, train_dataset=preferences(), processing_class=tokenizer, **special
    )


@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("policy", ["fp32", SPLIT])
def test_dpo_keeps_its_reference_and_learns(tmp_path, tokenizer, adapter, policy):
    trainer = dpo(tmp_path, tokenizer, bf16=True, peft_config=adapter)
    reference = None if adapter else copy.deepcopy(trainer.ref_model.state_dict())
    attach(trainer, policy).train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entries[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: equal to the reference
    assert entries[-1]["loss"] < entries[0]["loss"]
    if reference is not None:
        assert "_original_forward" not in vars(trainer.ref_model)  # no autocast of accelerate
        for name, value in trainer.ref_model.state_dict().items():
            assert torch.equal(value, reference[name])


def test_dpo_in_fp32_equals_plain_trl(tmp_path, tokenizer):
    plain, trainer = dpo(tmp_path, tokenizer), dpo(tmp_path, tokenizer)
    plain.train()
    attach(trainer, "fp32").train()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("policy", ["fp16", SPLIT])
def test_reinforcement_trainers_generate_and_learn(tmp_path, tokenizer, kind, policy):
    def reward(completions, **_):
        return [float(completion.count("w3")) for completion in completions]

    changes = {"num_generations": 4, "max_completion_length": 4, "max_steps": 2, "bf16": True}
    changes |= {"beta": 0.0}  # no reference model, which TRL would download
    args = getattr(trl, f"{kind}Config")(**settings(tmp_path, **changes))
    rows = Dataset.from_list([{"prompt": WORDS[i % 28]} for i in range(16)])
    with trainer_precision(policy):
        trainer = getattr(trl, f"{kind}Trainer")(
            model=llama(), reward_funcs=reward, args=args, train_dataset=rows,
            processing_class=tokenizer,
        )  # fmt: skip
    assert isinstance(trainer, TrainerMixin)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    after = trainer.model.state_dict()
    assert trainer.precision_run.steps_applied == 2
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert all(value.isfinite().all() for value in after.values())
