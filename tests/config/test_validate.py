# ruff: noqa: E501 -- tables: one case a line
import pytest


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps=abc", "steps=abc: must be a whole number, got 'abc'"),
        ("steps=1.5", "must be a whole number, got 1.5"),
        ("steps=0", "must be at least 1, got 0"),
        ("steps=1e30", "must be a whole number, got 1e+30"),
        ("steps=true", "must be a whole number, got true"),
        ("steps=", "must be a whole number, got none"),
        ("steps=.inf", "must be a whole number, got .inf"),
        ("steps=[3]", "must be a whole number, got [3]"),
        ("steps=1_000", "must be a whole number, got '1_000'"),
        ("seed=9223372036854775808", "must be at most 9223372036854775807, got 9223372036854775808"),
        ("clip_norm=0", "must be above 0, or none, got 0. Write e.g. clip_norm=1"),
        ("clip_norm=.nan", "must be a finite number, or none, got .nan"),
        ("clip_norm=1e999", "must be a finite number, or none, got .inf"),
        ("optimizer.lr='1e-4'", "must be a number, got '1e-4'. Leave out the quotes"),
        ("optimizer.lr=-1e-4", "must be at least 0, got -0.0001. Write e.g. optimizer.lr=0.001"),
        ("optimizer.betas=0.9", "must be a list, got 0.9. Write e.g. optimizer.betas=[0.9, 0.999]"),
        ("optimizer.betas=[.9]", "must be a longer list, got [0.9]"),
        ("optimizer.betas=[.9, .9, .9]", "must have at most 2 items, got [0.9, 0.9, 0.9]"),
        ("optimizer.betas=[.9, 1]", "item 2 must be below 1, got 1"),
        ("optimizer.name=adamW", "must be 'adamw', 'adam', 'sgd', 'rmsprop' or 'adafactor', got 'adamW'. Did you mean adamw?"),
        ("compile=yes", "must be true or false, got 'yes'. Write true"),
        ("compile=1", "must be true or false, got 1. Write e.g. compile=false"),
        ("precision.emulate=off", "must be true or false, or none, got 'off'. Write false"),
        ("precision.policy=", "must have at least 1 character, got ''. Write e.g. precision.policy=default"),
        ("precision.overrides=fp32", "must be a mapping, got 'fp32'"),
        ("precision.overrides={a: 1}", 'a must be text, got 1. Put it in quotes: "1"'),
        ("precision.loss_scale.scale_groups=head", "must be a list, got 'head'"),
        ("precision.fuse=[gleu]", "must be operations to fuse: auto, none, or any of loss, gelu, layer_norm, mask, rms_norm, rotary, swiglu, got ['gleu']"),
        ("precision.loss_scale.growth_factor=1", "must be at least 2, got 1. Write e.g. precision.loss_scale.growth_factor=2"),
        ("precision.loss_scale.growth_factor=3", "growth_factor=3: must be a power of two. Write 2"),
        ("precision.loss_scale.backoff_factor=.3", "backoff_factor=.3: must be a power of two. Write 0.25"),
        ("device=gpu", "must be auto, cpu, mps, cuda or cuda:N, got 'gpu'. Write e.g. device=auto"),
        ("workload=", "workload=: must name a workload, got ''. Write e.g. workload=lm"),
        ("model.sizes=[a]", "model.sizes=[a]: item 1 must be a whole number, got 'a'"),
        ("data.held_out=1", "data.held_out=1: must be below 1, got 1"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_the_setting_takes(refusal, word, message):
    assert message in refusal(word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision.loss_scale.min_scale=4e5"], "precision.loss_scale.min_scale=4e5: min_scale must be at most max_scale, got 400000 and 262144"),
        (["precision.loss_scale.init_scale=1e30"], "precision.loss_scale.init_scale=1e30: init_scale must be at most max_scale 262144, got 1e+30. Write init_scale=262144, or raise max_scale"),
        (["precision.loss_scale.max_scale=1024"], "precision.loss_scale.max_scale=1024: init_scale must be at most max_scale 1024, got 65536. Write init_scale=1024, or raise max_scale"),
        (["precision.loss_scale.init_scale=.5"], "init_scale must be at least min_scale 1, got 0.5. Write init_scale=1, or lower min_scale"),
        (["optimizer.momentum=.9"], "optimizer.momentum=.9: adamw has no momentum. Leave momentum out, or choose sgd or rmsprop"),
        (["optimizer.name=sgd", "optimizer.betas=[.9, .95]"], "optimizer.betas=[.9, .95]: sgd has no betas. Leave betas out, or choose adamw or adam"),
        (["lr_schedule.min_lr_ratio=.1"], "min_lr_ratio has no effect in a constant schedule. Leave it out, or choose cosine or linear"),
    ],
)  # fmt: skip
def test_settings_that_exclude_each_other_are_refused(refusal, words, message):
    assert message in refusal(*words)


def test_a_trial_shorter_than_the_warmup_is_accepted(load):
    assert load("lr_schedule.warmup=100", "steps=3").recipe.lr_schedule.warmup == 100


def test_a_value_in_a_file_is_refused_with_its_line(refusal):
    message = refusal(more="optimizer:\n  lr: '1e-4'\nprecision: {policy: 8}\n")
    assert "quick.yaml:5: optimizer.lr: must be a number, got '1e-4'" in message
    assert 'quick.yaml:6: precision.policy: must be text, got 8. Put it in quotes: "8"' in message  # fmt: skip


def test_a_setting_of_several_types_is_refused_once(refusal):
    message = refusal("data.files={a: 1}", "seed=-1", "data.files=[1]")
    assert message.startswith("2 problems")
    assert "data.files=[1]: must be several files, got [1]" in message


def test_two_settings_the_optimizer_ignores_are_two_problems(refusal):
    message = refusal("optimizer.name=adafactor", "optimizer.momentum=.9", "optimizer.fused=true")
    assert message.startswith("2 problems")
