import pytest
from pydantic import ValidationError

from narrowcast.config import load_recipe, recipe_schema
from narrowcast.config.sections import DataSection, Section, Sections
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.judge.settings import EvalTasksSection


class Nothing(Section):
    pass


SECTIONS = Sections(data=DataSection, model=Nothing, eval_tasks=EvalTasksSection)
BOUNDED = {"integer": "maximum", "number": "maximum", "string": "maxLength", "array": "maxItems"}


def test_nothing_is_measured_unless_it_is_asked_for():
    section = EvalTasksSection()
    assert (section.texts, section.exact_match, section.every) == ((), None, 0)
    assert not section.measures
    assert EvalTasksSection(perplexity="a.txt").texts == ("a.txt",)
    assert EvalTasksSection(perplexity=("a.txt", "b*.txt")).measures


@pytest.mark.parametrize(
    "settings",
    [
        {"perplexity_tokens": 5},
        {"perplexity_length": 64},
        {"exact_match_rows": 3},
        {"exact_match_by": "text"},
        {"every": 10},
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings):
    with pytest.raises(ValidationError, match="nothing is measured"):
        EvalTasksSection(**settings)
    EvalTasksSection(**settings, perplexity="a.txt", exact_match="b.jsonl")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("eval_tasks.samples=-1", "samples"),
        ("eval_tasks.samples=1001", "samples"),
        ("eval_tasks.max_new_tokens=0", "max_new_tokens"),
        ("eval_tasks.exact_match_by=letters", "exact_match_by"),
        ("eval_tasks.perplexty=x", "Did you mean perplexity"),
        ("eval_tasks.every=5", "set perplexity to a file"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, word, said):
    path = tmp_path / "recipe.yaml"
    path.write_text("workload: sft\nsteps: 1\nbatch_size: 1\n")
    with pytest.raises(ConfigError, match=said):
        load_recipe(path, [word], sections=lambda name: SECTIONS)


def test_every_setting_says_what_it_is_and_every_value_has_a_bound():
    assert all(field.description for field in EvalTasksSection.model_fields.values())
    schema = recipe_schema({"sft": SECTIONS})
    parts, found = [schema], []
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict) and part.get("type") in BOUNDED:
            found.append(part)
    assert len(found) > 20
    known = {*BOUNDED.values(), "exclusiveMaximum", "enum", "const", "pattern"}
    assert [part for part in found if not known & set(part)] == []
