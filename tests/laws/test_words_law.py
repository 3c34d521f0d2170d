"""Identifiers use standard terms: the banned words of the old vocabulary stay out."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "narrowcast"
FILES = sorted(SOURCE.rglob("*.py"))
BANNED = re.compile(
    r"(^|_)(told|asked|given|found|kept|beside|apart|words|island|onlooker|refuse)(_|$)"
    r"|in_force|standing_in|_of$|Kept|Told|Onlooker|Island|Asked|Given|Found",
)
ALLOWED = {"file_not_found", "found_inf"}  # names of Python and torch


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_banned_words_stay_out_of_identifiers():
    uses = {
        (str(path.relative_to(SOURCE)), name)
        for path in FILES
        for name in identifiers(ast.parse(path.read_text()))
        if BANNED.search(name) and name not in ALLOWED
    }
    assert uses == set()


def test_banned_words_stay_out_of_file_names():
    assert [path.stem for path in FILES if BANNED.search(path.stem)] == []


def test_public_class_names_are_unique_outside_the_workloads():
    names = {}
    for path in FILES:
        if path.is_relative_to(SOURCE / "workloads"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in names.items() if len(where) > 1} == {}
