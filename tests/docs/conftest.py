"""Reading the documentation: its pages, their blocks, commands, tables and code words."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowcast.workloads import recipe_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
)
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$|^<!-- setup:[^\n]*\n(.*?)^-->$")
IN_CODE = re.compile(r"`([^`\n]+)`")
FILES_OF_A_RUN = {"report.html", "harvest.html", "recipe.yaml", "merges.txt", "my.yaml"}
FOLDERS_OF_A_RUN = ("runs/", ".venv", "checkpoints/", "best/")


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


def code_words(page):
    """Return what stands between backticks in the text of a page."""
    return IN_CODE.findall(prose(page))


def shell_commands(page):
    """Return (words, output) of each line of a bash block.

    A text block directly below shows the output of the last command.
    """
    text = page.read_text(encoding="utf-8")
    for body, output in re.findall(r"(?ms)^```bash\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", text):
        *first, last = body.splitlines()
        yield from ((shlex.split(command), "") for command in first)
        yield shlex.split(last), output


def inline_commands(page):
    """Return the words of each `narrowcast …` in the text of a page."""
    for code in code_words(page):
        if code.split()[0].rpartition("/")[2] == "narrowcast":
            yield code.split()


def table_rows(page, *, header):
    """Return the cells of each row below the table headers that begin with `header`."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(header):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                yield [cell.strip() for cell in row.strip("|").split(" | ")]


def places(page):
    """Return the paths that a page names in code, each with the test after its `::`, if any."""
    for code in code_words(page):
        path, _, test = code.partition("::")
        is_path = re.fullmatch(r"[\w./-]+/[\w./-]*|[\w./-]+\.(py|md|yaml|txt|html|png)", path)
        made_by_a_run = path in FILES_OF_A_RUN or path.startswith(FOLDERS_OF_A_RUN)
        if is_path and not made_by_a_run and path not in recipe_files():
            yield path, test


def file_at(path):
    """Return the file or folder that a page means by `path`; package paths need no root."""
    found = [base / path for base in (ROOT, ROOT / "src" / "narrowcast") if (base / path).exists()]
    return found[0] if found else None


@pytest.fixture(scope="session")
def docs():
    """All of the above."""
    return SimpleNamespace(**globals())


def pytest_generate_tests(metafunc):
    """Run a test that takes a `page` for every page, one that takes a `runnable` where there is."""
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=name_of)
    if "runnable" in metafunc.fixturenames:
        pages = [page for page in PAGES if any(kind == "python" for kind, *_ in blocks(page))]
        metafunc.parametrize("runnable", pages, ids=name_of)
