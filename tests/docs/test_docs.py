"""What the documentation shows is run, and what it names exists."""

import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from narrowcast.cli.entry import exit_code_of
from narrowcast.cli.entry import narrowcast as group
from narrowcast.config.shipped import recipe_files
from narrowcast.workloads import load_recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "narrowcast"
DOCS = ROOT / "docs"
FEATURES = DOCS / "features.md"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
)
NO_DEFAULT = ("workload", "steps", "batch_size", "name", "description")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$|^<!-- setup:[^\n]*\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
IN_CODE = re.compile(r"`([^`\n]+)`")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """Return (language, text, line) of each fenced block; a hidden set-up is python."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        language, body, setup = found.groups()
        line = text[: found.start()].count("\n") + 1
        yield ("python", setup, line) if setup is not None else (language, body, line)


def prose(page):
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def console_commands(page):
    """Return (words, what is shown below them) of each `$ …` line of a console block."""
    for language, body, _ in blocks(page):
        if language == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield shlex.split(command), shown


def inline_commands(page):
    for code in IN_CODE.findall(prose(page)):
        if code.split()[0].rpartition("/")[2] == "narrowcast":
            yield code.split()


def table_rows(page, *, header):
    """Return the cells of each row below the table header that begins with `header`."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(header):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                yield [cell.strip() for cell in row.strip("|").split(" | ")]


PYTHON_PAGES = [page for page in PAGES if any(b[0] == "python" for b in blocks(page))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    printed = None
    for language, body, line in blocks(page):
        if language == "python":
            output = io.StringIO()
            code = compile("\n" * line + body, name_of(page), "exec")
            with contextlib.redirect_stdout(output):
                exec(code, namespace)
            printed = output.getvalue()
        elif language == "text" and printed is not None:
            assert printed == body, f"{name_of(page)}:{line}"
            printed = None


def test_every_block_of_the_documentation_is_of_a_kind_that_is_checked():
    languages = {block[0] for page in PAGES for block in blocks(page)}
    assert languages <= {"python", "text", "console", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_is_shown_can_be_typed(page):
    for words, shown in console_commands(page):
        if words[0] == "narrowcast":
            verb = group.commands[words[1]]
            context = verb.make_context(words[1], words[2:])
            if context.params.get("recipe") in recipe_files() and not shown:
                load_recipe(context.params["recipe"], context.params["overrides"])
        else:
            assert words[0] in ("make", "git", "pytest", ".venv/bin/pytest"), words
    for words in inline_commands(page):
        verb = next((word for word in words[1:] if not word.startswith("-")), None)
        command = group.commands[verb] if verb else group
        known = {opt for p in command.params for opt in p.opts} | {"--help"}
        assert {word for word in words[1:] if word.startswith("-")} <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_answer_that_is_shown_is_the_answer(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, shown in console_commands(page):
        if shown:
            code = exit_code_of(words[1:])
            said = capsys.readouterr()
            assert said.out + said.err == shown
            assert code == (2 if shown.startswith("narrowcast: ") else 0)


@pytest.mark.parametrize("verb", ["recipes", "schema"])
def test_a_cheap_command_of_the_documentation_runs(verb, capsys):
    assert exit_code_of([verb]) == 0
    assert capsys.readouterr().out


def test_every_verb_is_shown_somewhere():
    shown = {words[1] for page in PAGES for words, _ in console_commands(page) if len(words) > 1}
    assert set(group.commands) <= shown


def test_only_make_targets_that_exist_are_mentioned():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        mentioned = re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, re.MULTILINE)
        assert set(mentioned) <= targets, name_of(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_inside_the_project_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(found), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w]+", "-", h.lower()).strip("-") for h in headings}


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"- ([\w/.-]+\.md)$", navigation, re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


# Settings, names and tables against the code they describe.


def looks_like_a_path(code):
    return re.fullmatch(r"[\w./-]+/[\w./-]*|[\w./-]+\.(py|md|yaml|txt|html|png)", code) is not None


FILES_OF_A_RUN = {"report.html", "recipe.yaml", "merges.txt", "my.yaml"}


def places(page):
    """Return the paths, tests among them as (path, name), that a page names in code."""
    for code in IN_CODE.findall(prose(page)):
        path, _, test = code.partition("::")
        if looks_like_a_path(path) and not path.startswith(("runs/", ".venv", "checkpoints/")):
            if path not in FILES_OF_A_RUN and path not in recipe_files():
                yield path, test


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_and_every_test_that_is_named_exists(page):
    for path, test in places(page):
        found = next((base / path for base in (ROOT, PACKAGE) if (base / path).exists()), None)
        assert found, path
        assert not test or f"def {test}(" in found.read_text(encoding="utf-8"), f"{path}::{test}"


def test_every_feature_has_a_place_or_is_said_to_be_missing():
    rows = list(table_rows(FEATURES, header="| feature |"))
    assert len(rows) > 150
    for row in rows:
        assert len(row) == 2, row
        assert "not yet" in row[1] or "`" in row[1] or row[1].startswith("no:"), row


def test_settings_that_are_named_exist():
    settings = load_recipe("quickstart").resolved()
    for page in PAGES:
        for code in IN_CODE.findall(prose(page)):
            if re.fullmatch(r"(precision|optimizer|lr_schedule|checkpoint|eval|ema)\.[\w.]+", code):
                assert code in {*settings, "optimizer.step"}, f"{name_of(page)}: {code}"


def test_the_tables_of_settings_are_complete_and_give_the_defaults(tmp_path):
    bare = tmp_path / "bare.yaml"
    bare.write_text("workload: lm\nsteps: 1\nbatch_size: 1\n", encoding="utf-8")
    defaults = load_recipe(bare).resolved()
    rows = [
        row
        for page in (DOCS / "quickstart.md", DOCS / "workloads" / "lm.md")
        for row in table_rows(page, header="| setting |")
    ]
    assert {name.strip("`") for name, *_ in rows} == set(defaults)
    for name, default, _ in rows:
        key = name.strip("`")
        if key not in NO_DEFAULT:
            given = load_recipe(bare, [f"{key}={default}"]).resolved()
            assert given[key]["value"] == defaults[key]["value"], key


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "ideas" / "policy.md"], ids=name_of)
def test_the_table_of_presets_is_that_of_the_code(page):
    from narrowcast.precision.presets import PRESETS

    header = "| policy | in full" if page.name == "README.md" else "| preset |"
    shown = {row[0].strip("`"): row[1:] for row in table_rows(page, header=header)}
    shown.pop("auto", None)
    assert list(shown) == list(PRESETS)
    for name, (roles, *scaled) in shown.items():
        same_as = re.fullmatch(r"as `(.*)`", roles)
        expected = str(PRESETS[same_as[1]] if same_as else PRESETS[name])
        assert expected == str(PRESETS[name])
        assert same_as or roles.strip("`") == expected
        assert scaled in ([], ["yes" if PRESETS[name].needs_loss_scale else "no"])


def test_the_table_of_roles_names_every_role():
    from dataclasses import fields

    from narrowcast.precision.policy import Policy

    shown = [row[0].strip("`") for row in table_rows(DOCS / "ideas/policy.md", header="| role |")]
    assert shown == [field.name for field in fields(Policy) if field.name != "exceptions"]


def test_the_table_of_formats_has_the_numbers_of_the_formats():
    from narrowcast.numerics import FORMATS, Format

    page = DOCS / "ideas" / "formats.md"
    shown = {row[0].strip("`"): row[1:] for row in table_rows(page, header="| name | exponent")}
    assert list(shown) == [name for name, known in FORMATS.items() if isinstance(known, Format)]
    for name, (exponent, mantissa, *numbers, dtype) in shown.items():
        known = FORMATS[name]
        assert (int(exponent), int(mantissa)) == (known.exponent_bits, known.mantissa_bits)
        exact = (known.largest, known.smallest_normal, known.smallest, known.epsilon)
        assert [float(n) for n in numbers] == pytest.approx(exact, rel=5e-3)
        assert dtype.strip("`") == ("none" if known.dtype is None else str(known.dtype))


def test_the_bytes_a_weight_are_those_of_the_plan():
    from torch import nn

    from narrowcast.hardware import Hardware
    from narrowcast.precision.plan import plan

    machine = Hardware(device="cpu", name="any", memory_bytes=0)
    page = DOCS / "ideas" / "master-weights.md"
    rows = list(table_rows(page, header="| policy | weight"))
    assert rows
    for policy, *shown in rows:
        counted = plan(nn.Linear(16, 16, bias=False), policy.strip("`"), hardware=machine).bytes
        each = [counted[role] // 256 for role in ("params", "grads", "master", "moments")]
        assert [int(n) for n in shown] == [*each, sum(each)], policy


def test_the_exit_codes_are_those_of_the_errors():
    from narrowcast import errors
    from narrowcast.training.trainer import Interrupted

    named = {**vars(errors), "Interrupted": Interrupted}
    for code, _, raised in table_rows(DOCS / "ideas/checkpoints.md", header="| code |"):
        for name in IN_CODE.findall(raised):
            assert named[name].exit_code == int(code)


def test_the_reference_has_every_public_name_and_no_other():
    import importlib

    import narrowcast
    from narrowcast import numerics

    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    for path in shown:
        module, _, name = path.rpartition(".")
        assert path == "narrowcast.errors" or hasattr(importlib.import_module(module), name), path
    public = {f"narrowcast.{name}" for name in narrowcast.__all__} - {"narrowcast.__version__"}
    functions = {f"narrowcast.numerics.{n}" for n in numerics.__all__ if not n.isupper()}
    constants = {"narrowcast.numerics.FORMATS", "narrowcast.errors"}
    assert set(shown) == public | functions - {"narrowcast.numerics.Per"} | constants


def test_the_recipe_in_yaml_that_is_shown_is_a_recipe(tmp_path):
    for page in PAGES:
        for language, body, _ in blocks(page):
            if language == "yaml":
                path = tmp_path / "shown.yaml"
                path.write_text(textwrap.dedent(body), encoding="utf-8")
                load_recipe(path)


def test_the_documentation_sends_nobody_to_a_machine_or_a_host():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"/(?:home|root|work|Users|tmp)/\S+", text), name_of(page)
