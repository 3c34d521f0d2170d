from narrowcast.report.layers import active_formats, layers
from narrowcast.runs import PrecisionRecord


def change(step, module, before, after):
    return PrecisionRecord(step=step, module=module, before=before, after=after, reason="why")


def rows(modules, changes):
    return {
        row.label: (row.ended, row.since)
        for row in layers(modules, active_formats(modules, changes))
    }


def test_the_last_change_of_a_module_is_in_force(module):
    modules = [module("a"), module("b")]
    found = rows(modules, [change(5, "a", "e4m3", "bf16"), change(9, "a", "bf16", "fp32")])
    assert found == {"a": ("fp32", "9"), "b": ("", "")}


def test_a_change_that_was_taken_back_leaves_the_module_as_asked(module):
    modules = [module("a")]
    changes = [change(5, "a", "e4m3", "bf16"), change(9, "a", "bf16", "e4m3")]
    assert rows(modules, changes) == {"a": ("", "")}
    assert active_formats(modules, changes).changed == 0


def test_a_glob_names_every_module_it_matches(module):
    modules = [module(f"blocks.{i}.mlp") for i in range(3)] + [module("head")]
    ended = active_formats(modules, [change(5, "blocks.*", "e4m3", "bf16")])
    assert set(ended.modules) == {"blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"}
    assert ended.changed == 3


def test_a_change_of_the_whole_model_overrules_those_of_modules(module):
    modules = [module("a")]
    ended = active_formats(modules, [change(5, "a", "e4m3", "bf16"), change(9, "", "fp8", "bf16")])
    assert ended.modules == {}
    assert (ended.policy.format, ended.policy.step, ended.policy.returned) == ("bf16", 9, False)


def test_a_schedule_that_returns_to_its_first_policy_is_back(module):
    ended = active_formats(
        [module("a")], [change(5, "*", "fp32", "fp8"), change(9, "all", "fp8", "fp32")]
    )
    assert ended.policy.returned


def test_modules_that_ended_alike_are_folded_and_others_stand_apart(module):
    modules = [module(f"blocks.{i}.up") for i in range(6)]
    changes = [change(10 * n, f"blocks.{n}.up", "fp16", "bf16") for n in (1, 3, 5)]
    assert rows(modules, changes) == {
        "blocks.{0, 2, 4}.up": ("", ""),
        "blocks.{1, 3, 5}.up": ("bf16", "10 – 50"),
    }


def test_a_module_that_is_not_in_the_plan_is_counted(module):
    assert active_formats([module("a")], [change(5, "b", "e4m3", "bf16")]).changed == 1


PHASES = [
    {"policy": "fp32", "formats": {"a": "fp32", "b": "fp32"}},
    {"policy": "fp8", "formats": {"a": "e4m3/e5m2 delayed", "b": "fp32"}},
]


def test_what_a_policy_gives_each_module_is_known_from_the_phases(module):
    modules = [module("a"), module("b")]
    ended = active_formats(modules, [change(5, "*", "fp32", "fp8")], phases=PHASES)
    found = {row.label: (row.ended, row.since) for row in layers(modules, ended)}
    assert found == {"a": ("e4m3/e5m2 delayed", "5"), "b": ("", "")}
    assert ended.changed == 0  # none was changed by name


def test_a_module_that_returns_to_its_policy_in_a_later_phase_has_what_that_gives_it(module):
    modules = [module("a"), module("b")]
    whole = change(5, "*", "fp32", "fp8")
    raised = [whole, change(7, "a", "e4m3", "bf16")]
    assert active_formats(modules, raised, phases=PHASES).modules["a"].format == "bf16"
    assert active_formats(modules, raised, phases=PHASES).changed == 1
    lowered = [*raised, change(9, "a", "bf16", "e4m3")]
    ended = active_formats(modules, lowered, phases=PHASES)
    assert (ended.modules["a"].format, ended.changed) == ("e4m3/e5m2 delayed", 0)
