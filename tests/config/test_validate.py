# ruff: noqa: E501 -- tables: one case a line
import pytest


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps=abc", "steps=abc: needs a whole number of at least 1, got 'abc'"),
        ("steps=1.5", "needs a whole number of at least 1, got 1.5"),
        ("steps=0", "needs a whole number of at least 1, got 0"),
        ("steps=-3", "needs a whole number of at least 1, got -3"),
        ("steps=1e30", "needs a whole number of at most 1000000000, got 1e+30"),
        ("steps=true", "needs a whole number of at least 1, got true"),
        ("steps=", "needs a whole number of at least 1, got none"),
        ("steps=.nan", "needs a whole number of at least 1, got .nan"),
        ("steps=.inf", "needs a whole number of at most 1000000000, got .inf"),
        ("steps=[3]", "needs a whole number of at least 1, got [3]"),
        ("steps=1_000", "needs a whole number of at least 1, got '1_000'"),
        ("seed=-1", "needs a whole number of at least 0, got -1"),
        ("seed=9223372036854775808", "needs a whole number of at most 9223372036854775807, got 9223372036854775808"),
        ("clip_norm=0", "needs a number above 0, or none, got 0; e.g. clip_norm=1"),
        ("clip_norm=nan", "needs a number above 0, or none, got 'nan'"),
        ("clip_norm=.nan", "needs a number above 0, or none, got .nan"),
        ("clip_norm=.inf", "needs a number of at most 3.40282e+38, or none, got .inf"),
        ("clip_norm=1e999", "needs a number of at most 3.40282e+38, or none, got .inf"),
        ("optimizer.lr='1e-4'", "got '1e-4'; leave out the quotes"),
        ("optimizer.lr=-1e-4", "needs a number of at least 0, got -0.0001; e.g. optimizer.lr=0.001"),
        ("optimizer.betas=0.9", "needs a list of 2: a number of at least 0 and below 1 each, got 0.9"),
        ("optimizer.betas=[.9]", "got [0.9]; e.g. optimizer.betas=[0.9, 0.999]"),
        ("optimizer.betas=[.9, .9, .9]", "got [0.9, 0.9, 0.9]"),
        ("optimizer.betas=[.9, 1]", "got [0.9, 1]"),
        ("optimizer.name=adamW", "needs one of adamw, adam, sgd, rmsprop, adafactor, got 'adamW'; did you mean adamw?"),
        ("compile=yes", "needs true or false, got 'yes'; write true"),
        ("compile=1", "needs true or false, got 1; e.g. compile=false"),
        ("precision.emulate=off", "needs true or false, or none, got 'off'; write false"),
        ("precision.policy=", "needs text that is not empty, got ''; e.g. precision.policy=default"),
        ("precision.overrides=fp32", "needs a mapping of names to text, got 'fp32'"),
        ("precision.overrides={a: 1}", "needs a mapping of names to text, got {\"a\": 1}"),
        ("precision.loss_scale.scale_groups=head", "needs a list: text each, got 'head'"),
        ("precision.loss_scale.growth_factor=1", "needs a number of at least 2, got 1; e.g. precision.loss_scale.growth_factor=2"),
        ("precision.loss_scale.growth_factor=1.5", "needs a number of at least 2, got 1.5; e.g. precision.loss_scale.growth_factor=2"),
        ("precision.loss_scale.growth_factor=3", "growth_factor=3: must be a power of two. Write 2"),
        ("precision.loss_scale.backoff_factor=.3", "backoff_factor=.3: must be a power of two. Write 0.25"),
        ("precision.loss_scale.backoff_factor=1", "needs a number above 0 and below 1, got 1"),
        ("precision.loss_scale.min_scale=0", "needs a number of at least 5.96046e-08"),
        ("device=gpu", "needs auto, cpu, mps, cuda or cuda:N, got 'gpu'; e.g. device=auto"),
        ("device=cuda:x", "needs auto, cpu, mps, cuda or cuda:N, got 'cuda:x'"),
        ("workload=", "workload=: needs text that is not empty, got ''"),
        ("model.sizes=[a]", "model.sizes=[a]: needs a list: a whole number each, got ['a']"),
        ("data.held_out=1", "data.held_out=1: needs a number above 0 and below 1, got 1"),
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
    assert "quick.yaml:5: optimizer.lr: needs a number of at least 0, got '1e-4'" in message
    assert 'quick.yaml:6: precision.policy: needs text that is not empty, got 8; put it in quotes, "8"' in message  # fmt: skip


def test_a_setting_of_several_types_is_refused_once(refusal):
    message = refusal("data.files={a: 1}", "seed=-1", "data.files=[1]")
    assert message.startswith("2 problems")
    assert "data.files=[1]: needs text or a list: text each, got [1]" in message


def test_two_settings_the_optimizer_ignores_are_two_problems(refusal):
    message = refusal("optimizer.name=adafactor", "optimizer.momentum=.9", "optimizer.fused=true")
    assert message.startswith("2 problems")
