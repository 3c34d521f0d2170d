"""How large a thing may grow before it is taken apart: what one look holds."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "narrowcast"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})


def name(path):
    return str(path.relative_to(SOURCE.parent))


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_package_has_at_most_20_modules_side_by_side(folder):
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 20


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_has_at_most_350_lines_and_a_class_250(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    lines = {each.name: each.end_lineno - each.lineno + 1 for each in classes}
    assert {who: count for who, count in lines.items() if count > 250} == {}
