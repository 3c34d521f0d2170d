import copy
import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.integrations.transformers import TrainerMixin, attach, trainer_precision
from narrowcast.precision.step.prepared import prepare

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch.compile

SPLIT = "bf16, params=bf16, master=split"
POLICIES = ("fp32", "fp16", SPLIT, "fp8-delayed")


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def token_rows(count=48):
    ids = torch.randint(3, 40, (count, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(count):  # so that micro-batches have different numbers of tokens
        labels[i, : i % 5] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


@pytest.fixture
def arguments(tmp_path):
    def make(**changes):
        settings = {
            "output_dir": tmp_path / "out", "max_steps": 6, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
            "train_sampling_strategy": "sequential", "max_grad_norm": 0.5,
        }  # fmt: skip
        return transformers.TrainingArguments(**settings | changes)

    return make


def plain_loop(model, args, rows, policy, *, loss_fn=None, **settings):
    """The same training in a loop of our own, with the optimizer and scheduler of Trainer."""
    host = transformers.Trainer(model=model, args=args, train_dataset=rows)
    optimizer = host.create_optimizer()
    scheduler = host.create_scheduler(args.max_steps)
    run = prepare(
        model, optimizer, policy=policy, clip_norm=args.max_grad_norm, scheduler=scheduler,
        **settings,
    )  # fmt: skip
    batches, outcomes = list(host.get_train_dataloader()), []
    model.train()
    for start in range(0, 2 * args.max_steps, 2):
        micro = batches[start : start + 2]
        items = sum((b["labels"][:, 1:] != -100).sum() for b in micro)
        for batch in micro:
            with run.autocast():
                if loss_fn is None:
                    loss = model(**batch, num_items_in_batch=items).loss
                else:
                    loss = loss_fn(model, batch, items)
            run.backward(loss)
        outcomes.append(run.step())
    return run.release(), outcomes


def assert_equal_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("policy", POLICIES)
def test_attached_trainer_equals_a_loop_with_prepare(arguments, policy):
    rows = token_rows()
    trainer = transformers.Trainer(model=llama(), args=arguments(bf16=True), train_dataset=rows)
    assert attach(trainer, policy) is trainer
    trainer.train()
    expected, outcomes = plain_loop(llama(), arguments(), rows, policy)
    assert_equal_weights(trainer.model, expected)
    assert logged(trainer, "grad_norm") == [outcome.grad_norm for outcome in outcomes]
    assert logged(trainer, "learning_rate") == [outcome.lr for outcome in outcomes]
    if policy == "fp16":
        assert logged(trainer, "loss_scale")[:-1] == [o.next_scale for o in outcomes]


def test_label_smoothing_equals_a_loop_with_prepare(arguments):
    rows, smoother = token_rows(), transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)

    def loss_fn(model, batch, items):
        outputs = model(input_ids=batch["input_ids"], num_items_in_batch=items)
        return smoother(outputs, batch["labels"], shift_labels=True, num_items_in_batch=items)

    args = arguments(label_smoothing_factor=0.1)
    trainer = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(trainer, SPLIT).train()
    expected, _ = plain_loop(llama(), arguments(), rows, SPLIT, loss_fn=loss_fn)
    assert_equal_weights(trainer.model, expected)


def test_gradient_checkpointing_and_compile_keep_the_weights(arguments):
    rows = token_rows()
    expected, _ = plain_loop(llama(), arguments(), rows, "fp32")
    args = arguments(
        gradient_checkpointing=True, torch_compile=True, torch_compile_backend="aot_eager"
    )
    trainer = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(trainer, "fp32").train()
    assert trainer.precision_run.plan.execution == "compiled"
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5)


def with_adapter():
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1
    )
    return peft.get_peft_model(llama(), config)


@pytest.mark.parametrize(
    ("make", "policy"), [(llama, each) for each in POLICIES] + [(with_adapter, SPLIT)]
)
def test_resuming_is_bit_exact(arguments, make, policy):
    args = arguments(save_strategy="steps", save_steps=2, train_sampling_strategy="random")
    rows, eval_rows = token_rows(), token_rows(4)
    straight = attach(transformers.Trainer(model=make(), args=args, train_dataset=rows), policy)
    straight.train()
    again = transformers.Trainer(
        model=make(), args=args, train_dataset=rows, eval_dataset=eval_rows
    )
    attach(again, policy).train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-4")
    assert again.state.global_step == 6
    assert_equal_weights(again.model, straight.model)
    state = torch.load(f"{args.output_dir}/checkpoint-4/optimizer.pt", weights_only=True)
    assert all("base_layer" not in name for name in state["weights"])  # frozen


def test_checkpoint_loads_in_plain_transformers_in_fp32(arguments):
    args = arguments(save_strategy="steps", save_steps=6)
    trainer = transformers.Trainer(model=llama(), args=args, train_dataset=token_rows())
    attach(trainer, SPLIT).train()
    trainer.save_model(f"{args.output_dir}/final")
    for folder in ("checkpoint-6", "final"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{args.output_dir}/{folder}")
        assert type(loaded) is transformers.LlamaForCausalLM
        assert loaded.dtype == torch.float32
        assert_equal_weights(loaded, trainer.model)
    assert trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=2).shape == (1, 4)


def test_save_pretrained_of_a_callback_or_a_submodule_writes_fp32(arguments, tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids, labels):
            return self.inner(input_ids=input_ids, labels=labels)

    class Saver(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            part = getattr(model, "inner", model)
            part.save_pretrained(tmp_path / "saved")
            copy.deepcopy(part).save_pretrained(tmp_path / "copied")

    for make in (llama, Wrapped):
        trainer = transformers.Trainer(
            model=make(), args=arguments(), train_dataset=token_rows(), callbacks=[Saver()]
        )
        attach(trainer, SPLIT).train()
        trained = getattr(trainer.model, "inner", trainer.model)
        assert "save_pretrained" not in vars(trained)
        for folder in ("saved", "copied"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert loaded.dtype == torch.float32
            assert_equal_weights(loaded, trained)


def test_checkpoint_of_a_plain_trainer_raises(arguments):
    args = arguments(save_strategy="steps", save_steps=6)
    transformers.Trainer(model=llama(), args=args, train_dataset=token_rows()).train()
    trainer = attach(transformers.Trainer(model=llama(), args=args, train_dataset=token_rows()))
    with pytest.raises(CheckpointError, match="not a prepared model's state"):
        trainer.train(resume_from_checkpoint=True)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def digit_rows(digits, *, bad=None):
    x, y = digits[0][:96].clone(), digits[1][:96]
    if bad is not None:
        x[bad] = float("inf")
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def test_skipped_step_is_logged_and_holds_only_the_scheduler(arguments, digits, caplog):
    seen = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    rows = digit_rows(digits, bad=20)  # the third step
    args = arguments(logging_steps=2, warmup_steps=2)
    trainer = transformers.Trainer(
        model=Digits(), args=args, train_dataset=rows, callbacks=[Tracker()]
    )
    with caplog.at_level(logging.WARNING, "narrowcast"):
        attach(trainer, "fp16").train()
    assert "step 3 was skipped" in caplog.text
    assert trainer.state.global_step == 6
    assert trainer.lr_scheduler.last_epoch == 5
    assert trainer.precision_run.steps_applied == 5
    losses = logged(trainer, "loss")
    assert len(losses) == 3
    assert all(0 < loss < 5 for loss in losses)
    assert logged(trainer, "skipped_steps") == [0, 1, 1, 1]
    assert [entry["loss_scale"] for entry in seen] == [65536, 32768, 32768, 32768]
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def test_logged_loss_equals_that_of_the_filter_of_trainer(arguments, digits):
    rows = digit_rows(digits, bad=47)  # last: a plain trainer has NaN weights from then on
    args = arguments(logging_steps=6)
    plain = transformers.Trainer(model=Digits(), args=args, train_dataset=rows)
    plain.train()
    trainer = transformers.Trainer(model=Digits(), args=args, train_dataset=rows)
    attach(trainer, "fp32", health_every=1).train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    assert logged(trainer, "findings") == [2, 2]  # the input, the skipped step
    assert args.logging_nan_inf_filter


@pytest.mark.parametrize("policy", ["fp32", "fp16", SPLIT])
def test_callbacks_edit_clipped_gradients_as_in_trainer(arguments, digits, policy):
    class Editor(transformers.TrainerCallback):
        def __init__(self):
            self.norms = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            grads = [p.grad.float() for p in model.parameters()]
            self.norms.append(torch.nn.utils.get_total_norm(grads).item())
            for p in model.parameters():
                p.grad.mul_(2)

    def trained(policy):
        editor, rows = Editor(), digit_rows(digits)
        args = arguments(max_grad_norm=0.1, optim="sgd")
        trainer = transformers.Trainer(
            model=Digits(), args=args, train_dataset=rows, callbacks=[editor]
        )
        (trainer if policy is None else attach(trainer, policy)).train()
        return trainer, editor.norms

    plain, expected = trained(None)
    trainer, norms = trained(policy)
    assert norms == pytest.approx(expected, rel=2**-6)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=2**-6)
    if policy == "fp32":
        assert_equal_weights(trainer.model, plain.model)


class OwnSchedule(transformers.Trainer):
    """A trainer whose methods set attributes and return nothing, as `Trainer` allows."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2)


class OwnScheduleOverMixin(TrainerMixin, transformers.Trainer):
    precision = "fp16"
    create_optimizer = OwnSchedule.create_optimizer
    create_scheduler = OwnSchedule.create_scheduler


@pytest.mark.parametrize("kind", [OwnSchedule, OwnScheduleOverMixin])
def test_own_optimizer_and_scheduler_methods_are_used(arguments, digits, kind):
    rows = digit_rows(digits, bad=20)  # the third step
    trainer = kind(model=Digits(), args=arguments(), train_dataset=rows)
    if kind is OwnSchedule:
        attach(trainer, "fp16")
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD
    assert trainer.precision_run.steps_applied == 5
    assert trainer.lr_scheduler.last_epoch == 5


def test_best_model_is_loaded_and_train_can_be_called_again(arguments, digits):
    args = arguments(
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", max_steps=4,
        learning_rate=2.0, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = digit_rows(digits)
    trainer = transformers.Trainer(
        model=Digits(), args=args, train_dataset=rows, eval_dataset=rows,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    attach(trainer, SPLIT).train()
    best = min(logged(trainer, "eval_loss"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=0.02)  # fp32 against bf16
    assert trainer.model.net[0].weight.dtype == torch.float32
    trainer.args.learning_rate = 1e-3
    trainer.train()
    assert trainer.predict(rows).predictions.shape == (96, 10)


def test_mixin_class_uses_its_precision(arguments):
    class Mine(TrainerMixin, transformers.Trainer):
        precision = SPLIT
        precision_settings = {"lost_updates_every": 1}  # noqa: RUF012

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    rows = token_rows()
    trainer = Mine(model=llama(), args=arguments(bf16=True), train_dataset=rows)
    assert trainer.accelerator.mixed_precision == "no"
    trainer.train()
    expected, _ = plain_loop(llama(), arguments(), rows, SPLIT, lost_updates_every=1)
    assert_equal_weights(trainer.model, expected)


def test_trainer_precision_attaches_to_trainers_built_inside(arguments):
    rows = token_rows()
    original = transformers.Trainer.__init__
    with trainer_precision(SPLIT, fuse="none"):
        inside = transformers.Trainer(model=llama(), args=arguments(), train_dataset=rows)
    outside = transformers.Trainer(model=llama(), args=arguments(bf16=True), train_dataset=rows)
    assert transformers.Trainer.__init__ is original
    assert not isinstance(outside, TrainerMixin)
    inside.train()
    assert outside.accelerator.native_amp  # two trainers in one process do not disturb each other
    outside.train()
    assert_equal_weights(inside.model, plain_loop(llama(), arguments(), rows, SPLIT)[0])


def test_schedule_changes_the_policy_and_resumes(arguments):
    rows, schedule = token_rows(), {2: SPLIT, 4: "fp32"}
    args = arguments(save_strategy="steps", save_steps=3)
    straight = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(straight, "fp32", schedule=schedule).train()
    again = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(again, "fp32", schedule=schedule)
    again.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-3")
    assert_equal_weights(again.model, straight.model)


def test_resumed_run_may_change_the_policy_at_the_step_of_the_checkpoint(arguments):
    rows, args = token_rows(), arguments(save_strategy="steps", save_steps=3)
    attach(transformers.Trainer(model=llama(), args=args, train_dataset=rows), SPLIT).train()
    checkpoint = f"{args.output_dir}/checkpoint-3"
    trainer = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    with pytest.raises(CheckpointError, match=r"schedule=\{3: \.\.\.\}"):
        attach(trainer, "fp16").train(resume_from_checkpoint=checkpoint)
    args = arguments(save_strategy="no")
    again = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(again, SPLIT, schedule={3: "fp16"}).train(resume_from_checkpoint=checkpoint)
    straight = transformers.Trainer(model=llama(), args=args, train_dataset=rows)
    attach(straight, SPLIT, schedule={3: "fp16"}).train()
    assert str(again.precision_run.plan.policy) == "compute=fp16"
    assert_equal_weights(again.model, straight.model)


def test_unsupported_trainers_raise(arguments):
    trainer = transformers.Trainer(model=llama(), args=arguments(), train_dataset=token_rows())
    with pytest.raises(ConfigError, match="needs a transformers Trainer, got LlamaForCausalLM"):
        attach(llama())
    with pytest.raises(ConfigError, match="polcy"):
        attach(trainer, polcy="bf16")
    trainer.model.is_quantized = True
    with pytest.raises(UnsupportedError, match="quantize_frozen"):
        attach(trainer)
    trainer.model.is_quantized, trainer.is_fsdp_enabled = False, True
    with pytest.raises(UnsupportedError, match="FSDP"):
        attach(trainer)


def test_failed_training_leaves_a_plain_model(arguments):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise InterruptedError

    trainer = transformers.Trainer(
        model=llama(), args=arguments(), train_dataset=token_rows(), callbacks=[Stop()]
    )
    with pytest.raises(InterruptedError):
        attach(trainer, SPLIT).train()
    assert trainer.model.dtype == torch.float32
    assert type(trainer.model) is transformers.LlamaForCausalLM


def test_image_classifier_with_custom_clipping_trains(arguments):
    class ValueClipping(transformers.Trainer):
        def _clip_grad_norm(self, model):
            self.accelerator.clip_grad_value_(model.parameters(), 0.01)

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_channels=1, num_labels=3,
    )  # fmt: skip
    pictures = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": x, "labels": i % 3} for i, x in enumerate(pictures)]
    model = transformers.ViTForImageClassification(config)
    trainer = ValueClipping(model=model, args=arguments(), train_dataset=rows)
    attach(trainer, "fp16", loss_scale=2.0**10).train()
    bound = 0.01 * sum(p.numel() for p in model.parameters()) ** 0.5
    assert all(0 < norm <= bound for norm in logged(trainer, "grad_norm"))


def test_bert_with_groups_by_length_and_evaluation_per_epoch(arguments):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).to(torch.bfloat16)
    rows = [{"input_ids": [3 + i % 20] * (2 + i % 7), "labels": i % 2} for i in range(20)]

    def collate(batch):
        ids = [torch.tensor(row["input_ids"]) for row in batch]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = torch.tensor([row["labels"] for row in batch])
        return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}

    args = arguments(
        max_steps=-1, num_train_epochs=2, train_sampling_strategy="group_by_length",
        eval_strategy="epoch", gradient_accumulation_steps=3, save_strategy="epoch",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate,
        compute_metrics=lambda p: {"right": (p.predictions.argmax(-1) == p.label_ids).mean()},
    )  # fmt: skip
    attach(trainer, "bf16").train()
    assert len(logged(trainer, "eval_right")) == 2
    assert trainer.model.dtype == torch.float32
    config = json.loads(Path(args.output_dir, "checkpoint-4", "config.json").read_text())
    assert config["dtype"] == "float32"
