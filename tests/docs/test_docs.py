"""What the documentation shows is run, and what it names exists."""

import contextlib
import io
import re

import click
import pytest
import yaml

import narrowcast as nc
from narrowcast.cli.entry import narrowcast as group
from narrowcast.cli.entry import run_command
from narrowcast.integrations.hosted_run import HostedSettings
from narrowcast.workloads import REGISTRY, load_recipe, recipe_files


def test_the_python_of_a_page_runs_and_prints_what_is_shown(docs, runnable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": runnable.stem}
    printed = None
    for language, body, line in docs.blocks(runnable):
        if language == "python":
            output = io.StringIO()
            code = compile("\n" * line + body, docs.name_of(runnable), "exec")
            with contextlib.redirect_stdout(output):
                exec(code, namespace)
            printed = output.getvalue()
        elif language == "bash":
            printed = None
        elif language == "text" and printed is not None:
            assert printed == body, f"{docs.name_of(runnable)}:{line}"
            printed = None


def test_every_loop_that_is_shown_fits_twenty_lines(docs):
    names = ("custom-loops", "clipping-and-accumulation", "ema-and-averaging", "several-gpus")
    names += ("compile-and-cuda-graphs", "loss-scaling")
    pages = [docs.DOCS / "guides" / f"{name}.md" for name in names]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert len(shown) > 20
    assert max(len(body.splitlines()) for body in shown) <= 20


def test_every_block_is_of_a_kind_that_is_checked(docs, page):
    checked = {"python", "text", "bash", "yaml", "diff"}
    assert {language for language, *_ in docs.blocks(page)} <= checked


def test_both_sides_of_a_diff_are_python(docs, page):
    for language, body, line in docs.blocks(page):
        if language == "diff":
            for left_out in "+-":
                kept = [row[2:] for row in body.splitlines() if not row.startswith(left_out)]
                compile("\n".join(kept), f"{docs.name_of(page)}:{line}", "exec")


def test_a_recipe_that_is_shown_is_a_recipe(docs, page, tmp_path):
    for language, body, _ in docs.blocks(page):
        if language == "yaml" and not body.startswith("plugins:"):
            (tmp_path / "shown.yaml").write_text(body, encoding="utf-8")
            if "\npolicy: " in body:  # a policy file
                assert nc.policy(f"@{tmp_path}/shown.yaml").exceptions
                continue
            assert load_recipe(tmp_path / "shown.yaml").recipe.workload in REGISTRY.names


def test_the_axolotl_config_that_is_shown_has_settings_of_attach(docs):
    page = docs.DOCS / "migrate" / "transformers.md"
    (body,) = (body for language, body, _ in docs.blocks(page) if language == "yaml")
    assert len(body.splitlines()) == 6
    settings = yaml.safe_load(body)["narrowcast"]
    policy, every = settings.pop("policy"), settings.pop("health_every")
    HostedSettings(policy=policy, health_every=every, prepare=settings)  # raises for unknown names


def test_every_command_that_is_shown_can_be_typed(docs, page, tmp_path, monkeypatch):
    (tmp_path / "p.yaml").write_text("policy: bf16")
    monkeypatch.chdir(tmp_path)
    for words, shown in docs.shell_commands(page):
        if words[0] != "narrowcast":
            assert words[0] in ("make", ".venv/bin/pytest", "pip", "cd"), words
            continue
        command = group.get_command(click.Context(group), words[1])
        context = command.make_context(words[1], words[2:])
        if context.params.get("recipe") in recipe_files() and not shown:
            words = [each for each in context.params["overrides"] if "hardware=" not in each]
            load_recipe(context.params["recipe"], words)  # hardware= is not a setting but of `plan`
    for words in docs.inline_commands(page):
        command = group
        for verb in (word for word in words[1:] if not word.startswith("-")):
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), verb)
        known = {opt for p in command.params for opt in p.opts} | {"--help"}
        assert {word for word in words[1:] if word.startswith("-")} <= known


SMALL = (
    "steps=6", "batch_size=2", "model.layers=1", "model.width=16", "model.heads=2",
    "data.length=16", "health.every=0", "data.eval_windows=4",
)  # fmt: skip
SMALL_SFT = ("steps=6", "batch_size=2", "data.validation_split=0.01", "eval_tasks.samples=0")


@pytest.mark.parametrize("name", ["README.md", "docs/start/recipes.md"])
def test_commands_typed_in_order_find_the_runs_they_name(docs, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, shown in docs.shell_commands(docs.ROOT / name):
        if words == ["make", "demo"]:
            words = ["narrowcast", "train", "quickstart"]
        if words[0] != "narrowcast" or shown:
            continue
        verb, rest = words[1], [word.replace("=400", "=8") for word in words[2:]]
        if verb == "train":
            small = SMALL_SFT if rest[0].startswith("sft/") else SMALL
            assert run_command([verb, *rest, *small, "--quiet"]) == 0, words
        elif verb in ("resume", "report", "compare"):
            assert run_command([verb, *rest]) == 0, words
        elif verb == "watch":
            assert (tmp_path / rest[0] / "records.jsonl").exists(), words


def test_an_answer_that_is_shown_is_the_answer(docs, page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, shown in docs.shell_commands(page):
        if shown:
            code = run_command(words[1:])
            said = capsys.readouterr()
            assert said.out + said.err == shown
            assert code == (2 if shown.startswith("narrowcast: ") else 0)


@pytest.mark.parametrize("verb", ["recipes", "schema"])
def test_a_cheap_command_runs(verb, capsys):
    assert run_command([verb]) == 0
    assert capsys.readouterr().out


def test_every_verb_is_shown_somewhere(docs):
    commands = [words for page in docs.PAGES for words, _ in docs.shell_commands(page)]
    assert set(group.commands) <= {words[1] for words in commands}


def test_only_make_targets_that_exist_are_mentioned(docs, page):
    makefile = (docs.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_every_link_inside_the_project_leads_somewhere(docs, page):
    for target in re.findall(r"\]\(([^)\s]+)\)", docs.prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", docs.prose(found), re.MULTILINE)
            assert anchor in {re.sub(r"\W+", "-", h.lower()).strip("-") for h in headings}, target


def test_every_page_is_in_the_navigation(docs):
    navigation = (docs.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"- (?:Home: )?([\w/.-]+\.md)$", navigation, re.MULTILINE))
    assert listed == {page.relative_to(docs.DOCS).as_posix() for page in docs.DOCS.rglob("*.md")}


def test_every_path_and_every_test_that_is_named_exists(docs, page):
    for path, test in docs.places(page):
        found = docs.file_at(path)
        assert found, path
        assert not test or f"def {test}(" in found.read_text(encoding="utf-8"), f"{path}::{test}"


def test_every_setting_that_is_named_exists(docs, page):
    settings = [*load_recipe("quickstart").resolved(), "optimizer.step"]
    for code in docs.code_words(page):
        if re.fullmatch(r"(precision|optimizer|lr_schedule|checkpoint|eval|ema)\.[\w.]+", code):
            assert any(f"{known}.".startswith(f"{code}.") for known in settings), code


def test_nobody_is_sent_to_a_folder_of_some_machine(docs, page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"/(?:home|root|work|Users|tmp)/\S+", text)
