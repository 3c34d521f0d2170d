"""narrowcast: train PyTorch models in fewer bits, and know that it is safe.

Names are imported when first used, so that a command that needs no torch does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowcast.hardware import Hardware, probe
    from narrowcast.health.diagnose.explain import explain
    from narrowcast.health.diagnose.verdict import Verdict
    from narrowcast.health.watch import watch
    from narrowcast.precision.fused.linear_cross_entropy import linear_cross_entropy
    from narrowcast.precision.gradients.loss_scale import LossScale
    from narrowcast.precision.plan.plan import Plan, plan
    from narrowcast.precision.plan.policy import Policy
    from narrowcast.precision.plan.presets import PRESETS
    from narrowcast.precision.plan.presets import policy_from as policy
    from narrowcast.precision.step.outcome import Outcome
    from narrowcast.precision.step.prepare import Prepared, prepare

__version__ = "0.1.0"

_HOMES = {
    "Hardware": ("narrowcast.hardware", "Hardware"),
    "LossScale": ("narrowcast.precision.gradients.loss_scale", "LossScale"),
    "Outcome": ("narrowcast.precision.step.outcome", "Outcome"),
    "PRESETS": ("narrowcast.precision.plan.presets", "PRESETS"),
    "Plan": ("narrowcast.precision.plan.plan", "Plan"),
    "Policy": ("narrowcast.precision.plan.policy", "Policy"),
    "Prepared": ("narrowcast.precision.step.prepare", "Prepared"),
    "Verdict": ("narrowcast.health.diagnose.verdict", "Verdict"),
    "explain": ("narrowcast.health.diagnose.explain", "explain"),
    "linear_cross_entropy": (
        "narrowcast.precision.fused.linear_cross_entropy",
        "linear_cross_entropy",
    ),
    "plan": ("narrowcast.precision.plan.plan", "plan"),
    "policy": ("narrowcast.precision.plan.presets", "policy_from"),
    "prepare": ("narrowcast.precision.step.prepare", "prepare"),
    "probe": ("narrowcast.hardware", "probe"),
    "watch": ("narrowcast.health.watch", "watch"),
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
