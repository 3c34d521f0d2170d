"""A prepared model in a few lines, of what the host knows: nothing here waits for the device."""

from narrowcast.precision.plan.module_plan import multiplies
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.plan.policy import short_text
from narrowcast.precision.step.engine import Engine


def described(engine: Engine) -> str:
    """Say what is trained, in which formats, how it is updated, and how far it has come."""
    policy, plan = engine.plan.policy, engine.plan
    lines = {
        "policy": f"{short_text(policy)}, {_how(plan)} on {plan.hardware.name}",
        "weights": f"{_weights(engine)}, stored in {policy.params}, master {policy.master}",
        "update": _update(engine),
        "steps": _steps(engine),
        "loss scale": _scale(engine),
    }
    if (point := engine.weights.lookahead) is not None:
        ahead = point.settings
        lines["lookahead"] = (
            f"interpolation {ahead.interpolation:g}, rate {ahead.rate:g}, leads in {ahead.storage}"
        )
    fused = dict.fromkeys(each.piece for each in plan.fused if each.fused)
    lines |= {"fused": ", ".join(fused)} if fused else {}
    saved = "; ".join(text for _, text in plan.memory.lines)
    lines |= {"memory": saved} if saved else {}
    name = type(engine.model).__name__
    return "\n".join([f"{name}, prepared", *(f"  {key:<12}{text}" for key, text in lines.items())])


def _how(plan: Plan) -> str:
    ways = {module.how for module in plan.modules if multiplies(module.kind)}
    if "emulated" not in ways:
        return "native"
    return "part native, part emulated" if "native" in ways else "emulated"


def _weights(engine: Engine) -> str:
    trained = sum(weight.numel() for weight in engine.weights.all)
    whole = sum(weight.numel() for weight in engine.model.parameters())
    return f"{trained:,}" if trained == whole else f"{trained:,} trained of {whole:,}"


def _update(engine: Engine) -> str:
    name, path = type(engine.optimizer).__name__, engine.update_path
    return path if name in path else f"{name}, {path}"


def _steps(engine: Engine) -> str:
    stats = engine.log.stats
    on_their_way = engine.steps_begun - stats.steps
    later = f"; {on_their_way} more pending on the device" if on_their_way > 0 else ""
    return f"{stats.applied:,} applied, {stats.skipped:,} skipped{later}"


def _scale(engine: Engine) -> str:
    value = engine.scales.value
    if value is None:
        return "none"
    if value.device.type == "cpu":
        return f"{float(value):g}"
    known = engine.log.stats.scale_history
    return f"{known[-1][1]:g} in the last finished step" if known else "on the device"
