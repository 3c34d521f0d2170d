"""narrowcast: train PyTorch models in fewer bits, and know that it is safe.

Names are imported when first used, so that a command that needs no torch does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.hardware import Hardware, probe
    from narrowcast.health.explain import explain
    from narrowcast.health.verdict import Verdict
    from narrowcast.health.watching import watch
    from narrowcast.precision.linear_loss import linear_cross_entropy
    from narrowcast.precision.loss_scale import LossScale
    from narrowcast.precision.outcome import Outcome
    from narrowcast.precision.plan import Plan, plan
    from narrowcast.precision.policy import Policy
    from narrowcast.precision.prepare import Prepared, prepare
    from narrowcast.precision.presets import PRESETS
    from narrowcast.precision.presets import policy_from as policy

__version__ = "0.1.0"

_HOMES = {
    "Hardware": ("narrowcast.hardware", "Hardware"),
    "LossScale": ("narrowcast.precision.loss_scale", "LossScale"),
    "Outcome": ("narrowcast.precision.outcome", "Outcome"),
    "PRESETS": ("narrowcast.precision.presets", "PRESETS"),
    "Plan": ("narrowcast.precision.plan", "Plan"),
    "Policy": ("narrowcast.precision.policy", "Policy"),
    "Prepared": ("narrowcast.precision.prepare", "Prepared"),
    "Verdict": ("narrowcast.health.verdict", "Verdict"),
    "explain": ("narrowcast.health.explain", "explain"),
    "linear_cross_entropy": ("narrowcast.precision.linear_loss", "linear_cross_entropy"),
    "plan": ("narrowcast.precision.plan", "plan"),
    "policy": ("narrowcast.precision.presets", "policy_from"),
    "prepare": ("narrowcast.precision.prepare", "prepare"),
    "probe": ("narrowcast.hardware", "probe"),
    "watch": ("narrowcast.health.watching", "watch"),
}

__all__ = [
    "PRESETS",
    "Hardware",
    "LossScale",
    "Outcome",
    "Plan",
    "Policy",
    "Prepared",
    "Verdict",
    "__version__",
    "explain",
    "linear_cross_entropy",
    "plan",
    "policy",
    "prepare",
    "probe",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"narrowcast has no {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
