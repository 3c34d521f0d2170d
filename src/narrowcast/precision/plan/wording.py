"""Wording of advice: as settings of a recipe, or as arguments in a custom loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from narrowcast.precision.plan.gains import widened
from narrowcast.precision.plan.policy import Policy, short_text


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Names of what to change, for a recipe or for a call of `prepare`."""

    policy: Policy = field(default_factory=Policy)
    """What is in force, and changed."""
    in_recipe: bool = False
    clipped: bool = False
    """Whether gradients are clipped already."""

    def formats(self, exceptions: Mapping[str, str]) -> str:
        """Return how modules get other formats."""
        if not self.in_recipe:
            return self.whole(self.policy.with_exceptions(exceptions))
        pairs = [f'"{glob}": {_quoted(text)}' for glob, text in exceptions.items()]
        return f"precision.overrides={{{', '.join(pairs)}}}"

    def wider(self, module: str, name: str) -> str:
        """Return how one module, or the whole model, computes in a format."""
        policy = widened(self.policy, module, name)
        return (
            self.formats({module: dict(policy.exceptions)[module]})
            if module
            else self.whole(policy)
        )

    def whole(self, policy: Policy) -> str:
        """Return how the whole model gets another policy."""
        key = "precision.policy" if self.in_recipe else "policy"
        return f'{key}="{short_text(policy)}"'

    @property
    def lr(self) -> str:
        """The learning rate."""
        return "optimizer.lr" if self.in_recipe else "learning rate"

    @property
    def clip(self) -> str:
        """To clip gradients, or more than they are."""
        return "a lower clip_norm" if self.clipped else "clip_norm=1"

    def loss_scale(self, setting: str, value: str = "") -> str:
        """Name a setting of the loss scale, with a value if there is one to write."""
        inputs = f"={value}" if value else ""
        if self.in_recipe:
            return f"precision.loss_scale.{setting}{inputs}"
        return f"loss_scale=LossScale({setting}{inputs})" if inputs else f"LossScale.{setting}"


def _quoted(text: str) -> str:
    return f'"{text}"' if "," in text else text
