"""Rename symbols across the project, with the tables beside this file as data.

    npm install pyright
    python tools/rename/rename.py public       # public names: symbols by pyright, then text
    python tools/rename/rename.py definitions  # functions and classes
    python tools/rename/rename.py fields       # fields and attributes
    python tools/rename/rename.py locals       # arguments and local variables, named by their type

Pyright's language server renames a symbol wherever it is used: attributes, keyword arguments and
f-strings in src, tests and benchmarks. What it cannot see (strings, YAML, Markdown, untyped
fixtures) is renamed by the patterns of `public_text.tsv`. Afterwards run ruff, mypy and the tests.
Delete this folder once the names are changed.
"""

import ast
import builtins
import json
import keyword
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "narrowcast"
SERVER = ROOT / "node_modules" / "pyright" / "langserver.index.js"
CONFIG = {
    "include": ["src", "tests", "benchmarks", "examples", "docs"],
    "extraPaths": ["src"],
    "venvPath": ".",
    "venv": ".venv",
    "typeCheckingMode": "off",
}
LEFT_ALONE = re.compile(r"^(CHANGELOG\.md|benchmarks/results/|tools/)")
BANNED = {"found", "told", "kept", "given", "asked", "beside", "apart", "words", "place", "loss_of"}
BY_TYPE = {
    "found": {"list": "matches", "dict": "results", "str": "text", "Path": "path"},
    "told": {"list": "lines", "dict": "info", "str": "text"},
    "kept": {"bool": "is_stored"},
    "given": {"dict": "settings", "str": "value", "Any": "value", "Path": "path"},
    "beside": {"Tensor": "residual", "list": "residuals"},
    "words": {"list": "overrides", "str": "choices"},
    "place": {"int": "index", "Path": "path", "device": "device"},
}
ELSE = {
    "found": ("result", "matched"),
    "told": ("message", "notice"),
    "kept": ("stored", "saved"),
    "given": ("inputs", "settings"),
    "asked": ("requested", "request"),
    "beside": ("extra", "other"),
    "apart": ("separate", "distance"),
    "words": ("terms", "names"),
    "place": ("location", "position"),
    "loss_of": ("loss_fn", "compute_loss"),
}


class LanguageServer:
    """A pyright process; it reads files from disk, and edits are written there."""

    def __init__(self) -> None:
        config = ROOT / "pyrightconfig.json"
        config.write_text(json.dumps(CONFIG))
        self._process = subprocess.Popen(
            ["node", str(SERVER), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._versions: dict[str, int] = {}
        self._last = 0
        threading.Thread(target=self._listen, daemon=True).start()
        folder = {"uri": ROOT.as_uri(), "name": ROOT.name}
        workspace = {"configuration": True, "workspaceEdit": {"documentChanges": True}}
        settings = {"rootUri": ROOT.as_uri(), "workspaceFolders": [folder], "processId": None}
        self._call("initialize", settings | {"capabilities": {"workspace": workspace}})
        self._send({"method": "initialized", "params": {}})

    def close(self) -> None:
        """End the process and remove its configuration."""
        self._process.kill()
        (ROOT / "pyrightconfig.json").unlink(missing_ok=True)

    def wait_until_indexed(self) -> None:
        """Wait until the references of `prepare` are complete: a rename before would miss some."""
        path, last = SOURCE / "precision/step/prepare.py", -1
        line, column = position(path.read_text(), r"\ndef (prepare)\(")
        for _ in range(30):
            where = self._where(path, line, column) | {"context": {"includeDeclaration": True}}
            count = len(self._call("textDocument/references", where) or [])
            if count == last and count > 50:
                return
            last = count
            time.sleep(4)

    def type_text(self, path: Path, line: int, column: int, name: str) -> str:
        """Return the type of a variable as the editor would show it."""
        answer = self._call("textDocument/hover", self._where(path, line, column))
        shown = re.search(rf"\b{name}: ([^\n`]+)", json.dumps(answer)) if answer else None
        return shown.group(1) if shown else ""

    def rename(self, path: Path, line: int, column: int, new: str) -> int:
        """Rename the symbol at a place everywhere; return the number of edits."""
        where = self._where(path, line, column) | {"newName": new}
        answer = self._call("textDocument/rename", where) or {}
        count = 0
        for change in answer.get("documentChanges", []):
            target = Path(change["textDocument"]["uri"].removeprefix("file://"))
            lines = target.read_text().split("\n")
            order = sorted(change["edits"], key=lambda e: list(e["range"]["start"].values()))
            for edit in reversed(order):
                start, end = edit["range"]["start"], edit["range"]["end"]
                text = lines[start["line"]]
                head, tail = text[: start["character"]], text[end["character"] :]
                lines[start["line"]] = head + edit["newText"] + tail
                count += 1
            target.write_text("\n".join(lines))
            self._open(target)
        return count

    def _where(self, path: Path, line: int, column: int) -> dict[str, Any]:
        self._open(path)
        return {
            "textDocument": {"uri": path.as_uri()},
            "position": {"line": line, "character": column},
        }

    def _open(self, path: Path) -> None:
        uri, text = path.as_uri(), path.read_text()
        version = self._versions[uri] = self._versions.get(uri, 0) + 1
        if version == 1:
            document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
            params: dict[str, Any] = {"textDocument": document}
            self._send({"method": "textDocument/didOpen", "params": params})
            return
        params = {
            "textDocument": {"uri": uri, "version": version},
            "contentChanges": [{"text": text}],
        }
        self._send({"method": "textDocument/didChange", "params": params})

    def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._last += 1
        self._send({"id": self._last, "method": method, "params": params})
        while (answer := self._answers.get(timeout=600))["id"] != self._last:
            pass
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _listen(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while line := stream.readline():
            length = int(line.split(b":")[1])
            while stream.readline() != b"\r\n":
                pass
            message = json.loads(stream.read(length))
            if "method" in message and "id" in message:
                answer = None
                if message["method"] == "workspace/configuration":
                    answer = [{} for _ in message["params"]["items"]]
                self._send({"id": message["id"], "result": answer})
            elif "id" in message:
                self._answers.put(message)


def position(text: str, pattern: str) -> tuple[int, int]:
    """Return line and column, counted from zero, of the group of a pattern; (-1, -1) for none."""
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return -1, -1
    at = next(match.start(n) for n in range(1, match.re.groups + 1) if match.group(n))
    return text.count("\n", 0, at), at - text.rfind("\n", 0, at) - 1


def rows(name: str) -> Iterator[list[str]]:
    """Yield the rows of a table, without its head."""
    for line in (HERE / name).read_text().splitlines()[1:]:
        yield line.split("\t")


def rename_rows(server: LanguageServer, table: list[tuple[Path, str, str]]) -> None:
    """Rename what the patterns name, and print what is missing."""
    for path, pattern, new in table:
        line, column = position(path.read_text(), pattern) if path.exists() else (-1, -1)
        count = server.rename(path, line, column, new) if line >= 0 else 0
        print(f"{count:4d} edits  {new}  {path.relative_to(ROOT)}", flush=True)


def public_table() -> list[tuple[Path, str, str]]:
    return [(SOURCE / file, pattern, new) for file, pattern, new in rows("public_symbols.tsv")]


def definition_table() -> list[tuple[Path, str, str]]:
    pattern = r"^\s*(?:def|class) ({0})\b|^({0}) = "
    return [(SOURCE / f, pattern.format(old), new) for f, old, new in rows("definitions.tsv")]


def field_table() -> list[tuple[Path, str, str]]:
    pattern = r"^    ({0}): |(?:self|worker|layer)\.({0})(?:\s*[:=,]| =)|^({0})(?: =|:)"
    return [(SOURCE / f, pattern.format(old), new) for f, old, new in rows("fields.tsv")]


def rename_text() -> None:
    """Apply the patterns of plain text to every tracked file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    kinds = (".py", ".md", ".yaml", ".yml", ".html", ".js", ".toml")
    names = [n for n in listed.splitlines() if n.endswith(kinds) and not LEFT_ALONE.match(n)]
    table = [(re.compile(f), re.compile(p, re.MULTILINE), r) for f, p, r in rows("public_text.tsv")]
    for name in names:
        text = before = (ROOT / name).read_text()
        for files, pattern, replacement in table:
            if files.search(name):
                text = pattern.sub(replacement, text)
        if text != before:
            (ROOT / name).write_text(text)


def bindings(tree: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield each binding of a banned name in a function, and the outermost function around it."""
    for node in ast.iter_child_nodes(tree):
        inner = scopes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = (*scopes, node)
        name = ""
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in BANNED and inner:
            yield node, name, inner[0]
        yield from bindings(node, inner)


def new_name(name: str, kind: str, taken: set[str]) -> str | None:
    """Return a name that says what the type does not, and that nothing else has."""
    first = re.split(r"[\[|(. ]", kind.strip(), maxsplit=1)[0]
    kinds = {"tuple": "list", "Sequence": "list", "set": "list", "Mapping": "dict"}
    candidates = [BY_TYPE.get(name, {}).get(kinds.get(first, first), ""), *ELSE[name]]
    return next((c for c in candidates if c and c not in taken), None)


def rename_locals(server: LanguageServer) -> None:
    """Rename arguments and local variables, one after another: each rename moves the others."""
    for path in sorted(SOURCE.rglob("*.py")):
        failed: set[tuple[int, int]] = set()
        while True:
            text = path.read_text()
            tree = ast.parse(text)
            used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            used |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
            used |= {*dir(builtins), *keyword.kwlist}
            found = (b for b in bindings(tree, ()) if (b[0].lineno, b[0].col_offset) not in failed)  # type: ignore[attr-defined]
            node, name, _ = next(found, (None, "", None))
            if node is None:
                break
            line = node.lineno - 1  # type: ignore[attr-defined]
            column = len(text.split("\n")[line].encode()[: node.col_offset].decode())  # type: ignore[attr-defined]
            kind = server.type_text(path, line, column, name)
            new = new_name(name, kind, used)
            count = server.rename(path, line, column, new) if new else 0
            print(f"{count:4d} edits  {name} -> {new}  {path.relative_to(ROOT)}:{line + 1}")
            if not count:
                failed.add((node.lineno, node.col_offset))  # type: ignore[attr-defined]


def main(what: str) -> None:
    server = LanguageServer()
    try:
        server.wait_until_indexed()
        if what == "locals":
            rename_locals(server)
        else:
            tables = {"public": public_table, "definitions": definition_table}
            rename_rows(server, tables.get(what, field_table)())
    finally:
        server.close()
    if what == "public":
        rename_text()


if __name__ == "__main__":
    main(sys.argv[1])
