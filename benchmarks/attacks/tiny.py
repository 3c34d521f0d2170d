"""Tiny runs that hold all that decides a step: formats, scales, averages, phases, data."""

from random import Random

SHAPE = (
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.length=16",
    "data.eval_windows=4",
    "batch_size=2",
)
STEPS = 12
COURSE = (f"steps={STEPS}", "checkpoint.every=3", "eval.every=6", "health.every=4")
PHASES = (
    "[{policy: fp32, until: 4}, "
    '{policy: "fp8-delayed, params=bf16, master=split", until: 8}, {policy: bf16}]'
)

RECIPES: dict[str, tuple[str, ...]] = {
    "bf16": ("quickstart", *SHAPE, *COURSE),
    "fp16": (
        "quickstart",
        *SHAPE,
        *COURSE,
        "precision.policy=fp16",
        "gradient_accumulation_steps=2",
        "ema.decay=0.9",
        "precision.loss_scale.max_scale=1e30",
        "precision.loss_scale.init_scale=1e20",
        "precision.loss_scale.backoff_factor=0.0009765625",
    ),
    "adapting": (
        "quickstart",
        *SHAPE,
        *COURSE,
        "health.every=2",
        "precision.policy=fp8-delayed",
        "precision.adapt.enabled=true",
        "precision.adapt.cooldown=2",
        "fault_injection=[{step: 5, module: blocks.0.mlp.up, role: output, value: inf}]",
    ),
    "phases": ("quickstart", *SHAPE, *COURSE, f"precision.schedule={PHASES}"),
    "kept in bf16": (
        "quickstart",
        *SHAPE,
        *COURSE,
        "precision.policy=bf16, params=bf16, master=stochastic",
        "data.workers=1",
    ),
    "tutorial": (
        "tutorial",
        *COURSE,
        "batch_size=8",
        "precision.policy=fp16, params=fp16, master=fp32",
    ),
}
"""Words of `narrowcast train`, by what is special about them."""

LONG = "long"
WORDS = {
    **RECIPES,
    LONG: (
        "quickstart",
        *SHAPE,
        "steps=200",
        "checkpoint.every=50",
        "eval.every=100",
        "health.every=0",
    ),
}
"""The same, and a run that takes seconds."""

_FORMATS = ("fp32", "bf16", "fp16", "fp8-tensor", "fp8-delayed", "fp8-row", "fp8-block")
_CHOICES = {
    "optimizer.name": ("adamw", "adam", "sgd", "rmsprop", "adafactor"),
    "optimizer.lr": ("1e-4", "3e-3", "0.05"),
    "lr_schedule.name": ("constant", "cosine", "linear"),
    "lr_schedule.warmup": ("0", "5"),
    "clip_norm": ("none", "0.5", "1"),
    "gradient_accumulation_steps": ("1", "2", "3"),
    "batch_size": ("1", "2", "3"),
    "seed": ("0", "1", "9223372036854775807"),
    "ema.decay": ("none", "0.5", "0.99"),
    "model.norm": ("rmsnorm", "layernorm"),
    "model.mlp": ("gelu", "swiglu"),
    "model.bias": ("true", "false"),
    "model.tied": ("true", "false"),
    "data.workers": ("0", "1"),
    "data.text": ("python-topics", "synthetic"),
    "checkpoint.every": ("1", "2", "5"),
    "checkpoint.keep": ("1", "3"),
    "eval.every": ("0", "1", "5"),
    "health.every": ("0", "1", "3"),
    "precision.loss_scale.growth_interval": ("1", "3"),
}


def any_recipe(rng: Random) -> tuple[str, ...]:
    """Return the words of a tiny run drawn by chance, one that can be planned."""
    from narrowcast.errors import NarrowcastError
    from narrowcast.runner.run import plan_recipe

    while True:
        words = _drawn(rng)
        try:
            plan_recipe(words[0], words[1:])
        except NarrowcastError:  # settings that exclude each other
            continue
        return words


def _drawn(rng: Random) -> tuple[str, ...]:
    chosen = rng.sample(sorted(_CHOICES), k=rng.randint(2, 9))
    policy = rng.choice(_FORMATS)
    if rng.random() < 0.4 and policy != "fp32":
        kept = "fp16" if policy == "fp16" else "bf16"
        masters = ("fp32",) if kept == "fp16" else ("fp32", "split", "kahan", "stochastic")
        policy += f", params={kept}, master={rng.choice(masters)}"
    words = [f"{key}={rng.choice(_CHOICES[key])}" for key in chosen]
    return ("quickstart", *SHAPE, *COURSE, *words, f"precision.policy={policy}")
