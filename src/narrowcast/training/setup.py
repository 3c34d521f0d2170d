"""From a recipe and a plan to a model that is ready to train."""

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from narrowcast.config.sections import LossScaleSection, Recipe
from narrowcast.precision.gradients.loss_scale import LossScale
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepare import prepare
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.schedules import lr_factor


def prepare_recipe(recipe: Recipe, model: nn.Module, *, plan: Plan) -> Prepared:
    """Carry out `plan` on `model`, with the optimizer, schedule and scale of `recipe`."""
    optimizer = build_optimizer(recipe.optimizer, model, device=next(model.parameters()).device)
    settings = recipe.precision.loss_scale
    return prepare(
        model,
        optimizer,
        policy=plan,
        clip_norm=recipe.clip_norm,
        scheduler=LambdaLR(optimizer, lr_factor(recipe.lr_schedule, recipe.steps)),
        loss_scale=loss_scale_of(settings) if plan.policy.needs_loss_scale else None,
        scale_groups=settings.scale_groups,
        ema_decay=recipe.ema.decay,
        patience=settings.patience,
    )


def loss_scale_of(settings: LossScaleSection) -> LossScale:
    """Return the loss scale that a recipe asks for."""
    return LossScale(
        initial=settings.initial,
        growth=settings.growth,
        backoff=settings.backoff,
        growth_interval=settings.growth_interval,
        min=settings.min,
        max=settings.max,
        hysteresis=settings.hysteresis,
        dynamic=settings.dynamic,
    )
