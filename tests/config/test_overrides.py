# ruff: noqa: E501 -- tables: one case a line
import pytest


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stesp=3", "stesp=3: no such setting. Did you mean steps? Write steps=3"),
        ("Steps=3", "Did you mean steps? Write steps=3"),
        ("batch-size=3", "Did you mean batch_size? Write batch_size=3"),
        (
            "precision.polcy=bf16",
            "precision.polcy=bf16: no such setting. Did you mean policy? "
            "Write precision.policy=bf16",
        ),
        ("precison.policy=bf16", "Did you mean precision? Write precision.policy=bf16"),
        (
            "precision.loss_scale.inital=4",
            "Did you mean init_scale? Write precision.loss_scale.init_scale=4",
        ),
        ("lr=1e-3", "Did you mean optimizer.lr? Write optimizer.lr=1e-3"),
        ("policy=fp16", "Did you mean precision.policy? Write precision.policy=fp16"),
        ("warmpu=3", "Did you mean lr_schedule.warmup? Write lr_schedule.warmup=3"),
        ("loss_scale.init_scale=4", "Did you mean precision.loss_scale.init_scale?"),
        ("model.heda.tied=true", "Did you mean head? Write model.head.tied=true"),
        ("data.lenght=3", "Did you mean length? Write data.length=3"),
        ("eval.xyzzy=3", "eval.xyzzy=3: no such setting. eval has every"),
        ("xyzzy=3", "xyzzy=3: no such setting. A recipe has workload, name, description, seed"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_word_to_write(refusal, word, message):
    assert message in refusal(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision=bf16", "precision=bf16: precision is a section. Write precision.policy=bf16"),
        ("optimizer=sgd", "Write optimizer.name=sgd"),
        ("eval=100", "Write eval.every=100"),
        ("ema=0.999", "Write ema.decay=0.999"),
        ("model=32", "Write model.width=32"),
        ("precision.loss_scale=1024", "Write precision.loss_scale.init_scale=1024"),
        (
            "checkpoint=abc",
            "checkpoint is a section. Write checkpoint.every=abc, or another of its settings: every, keep",
        ),
        (
            "precision=compute=e4m3; *.norm: fp32",
            "Write precision.policy=compute=e4m3; *.norm: fp32",
        ),
        (
            "precision={policy: a, policy: b}",
            "policy is set twice, also in line 1. Keep one of them",
        ),
        ("precision={policy: a", "precision={policy: a: not YAML: "),
        ("precision={polcy: a}", "no such setting. Did you mean policy?"),
    ],
)
def test_a_value_for_a_section_is_refused_with_the_setting_that_takes_it(refusal, word, message):
    assert message in refusal(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps", "steps: must be KEY=VALUE. Write steps=VALUE"),
        ("steps:3", "steps:3: must be KEY=VALUE. Write steps=3"),
        ("", "must be KEY=VALUE"),
        ("=3", "=3: must be KEY=VALUE. Write steps=VALUE"),
        ("steps.x=3", "steps.x=3: steps has no settings in it. Write steps=VALUE"),
        ("model.sizes=[1", "model.sizes=[1: not YAML: "),
        ("model.sizes=[*a]", "must be in quotes"),
        ("steps=!x 3", "the tag !x is not supported. Leave it out"),
        ("name=\udcff", "surrogate"),
    ],
)
def test_a_word_that_is_no_setting_is_refused_with_what_to_write(refusal, word, message):
    assert message in refusal(word)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("precision:\n  polcy: bf16\n", "quick.yaml:5: precision.polcy: no such setting. Did you mean policy?"),
        ("precision: bf16\n", "quick.yaml:4: precision: precision is a section. Write precision: {policy: 'bf16'}"),
        ("precision.policy: bf16\n", "quick.yaml:4: precision.policy: no such setting. Dotted keys are for the command line. In a file write policy under precision:"),
        ("lr: 3\n", "quick.yaml:4: lr: no such setting. Did you mean optimizer.lr?"),
        ("<<: {seed: 3}\n", "quick.yaml:4: <<: no such setting. A recipe has"),
        ("7: 3\n", "quick.yaml:4: 7: no such setting. A recipe has"),
        ("steps: 3\n", "quick.yaml:4: steps is set twice, also in line 2. Keep one of them"),
    ],
)  # fmt: skip
def test_a_bad_key_in_a_file_is_refused_with_its_line(refusal, more, message):
    assert message in refusal(more=more)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "per line, got none. Begin with e.g. workload: lm"),
        ("# nothing yet\n", "per line, got none"),
        ("---\n", "per line, got none"),
        ("- a\n- b\n", "quick.yaml: a recipe must have one `key: value` per line, got ['a', 'b']"),
        ("quickstart\n", "got 'quickstart'"),
        ("3\n", "per line, got 3"),
        ("a:\n\tb: 1\n", "quick.yaml:2: a tab is used for indentation. Indent with spaces"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(refusal, text, message):
    assert message in refusal(text=text)


def test_a_very_long_word_does_not_flood_the_message(refusal):
    assert len(refusal("seed=" + "9" * 100_000)) < 300


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=1e-4", "learning_rate=1e-4: no such setting. Write optimizer.lr=1e-4"),
        ("warmup_steps=3", "Write lr_schedule.warmup=3"),
        ("scale_growth_factor=2", "Write precision.loss_scale.growth_factor=2"),
        ("output_dir=x", "output_dir=x: no such setting. Leave it out, and write --out DIR"),
        ("bf16=true", "Write precision.policy=bf16"),
        ("lora_rank=4", "lora_rank=4: no such setting. A recipe has"),  # not of this workload
        ("use_4bit=true", "use_4bit=true: no such setting. A recipe has"),
    ],
)
def test_keys_of_other_trainers_point_to_ours(refusal, word, message):
    assert message in refusal(word)


def test_flat_file_of_another_trainer_points_to_sections(refusal):
    message = refusal(more="learning_rate: 2e-4\nmax_grad_norm: 1.0\n")
    assert "learning_rate: no such setting. Write lr under optimizer:" in message
    assert "max_grad_norm: no such setting. Write clip_norm" in message
