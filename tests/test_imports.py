"""The drawing of `src`: whom a module may import, that nobody imports in circles, short files.

`[tool.importlinter]` knows the floors; what it does not know is here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"
LINES = 600


class Import(NamedTuple):
    """A module that is imported, and the name that is taken from it, if any."""

    module: str
    name: str | None
    deferred: bool
    """Only when a function runs."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> list[Import]:
    return list(_found(ast.parse(path.read_text(encoding="utf-8")), False))


def _found(node: ast.AST, deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, None, deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (Import(node.module or "", alias.name, deferred) for alias in node.names)
    inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    # Statements alone: expressions, most of a tree, import nothing.
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()) if not isinstance(node, ast.expr) else ():
            yield from _found(child, inside)


def _package(module: str) -> str:
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def _target(found: Import) -> str | None:
    """The module of ours that an import means."""
    inner = f"{found.module}.{found.name}"
    return inner if inner in modules() else found.module if found.module in modules() else None


def _private(module: str) -> tuple[str, str] | None:
    """The package that has a private module, and the module; None where all of it is public."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.startswith("_"):
            return ".".join(parts[:place]), ".".join(parts[: place + 1])
    return None


def test_private_modules_are_imported_inside_their_package_only() -> None:
    reaching = set()
    for module, path in modules().items():
        for found in imports(path):
            target = _target(found)
            private = None if target is None else _private(target)
            if private is not None and not f"{_package(module)}.".startswith(f"{private[0]}."):
                reaching.add((module, private[1]))
    found = sorted(reaching)
    assert not found, f"import these names from the package's __init__, which is its face: {found}"


def test_private_names_stay_in_their_package() -> None:
    reaching = {
        (module, found.module, found.name)
        for module, path in modules().items()
        for found in imports(path)
        if re.match("_[^_]", found.name or "") and _target(found) == found.module
        if not f"{_package(module)}.".startswith(f"{_package(found.module)}.")
    }
    assert not reaching, f"make these names public, or leave them alone: {sorted(reaching)}"


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import one another: strongly connected components (Tarjan 1972)."""
    numbers, low, stack = dict[str, int](), dict[str, int](), list[str]()
    found: list[set[str]] = []

    def visit(node: str) -> None:
        numbers[node] = low[node] = len(numbers)
        stack.append(node)
        for other in edges[node]:
            if other not in numbers:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == numbers[node]:
            place = stack.index(node)
            component = set(stack[place:])
            del stack[place:]
            if len(component) > 1:
                found.append(component)

    for node in edges:
        if node not in numbers:
            visit(node)
    return found


def test_modules_do_not_import_in_circles() -> None:
    edges = {
        module: {
            target
            for found in imports(path)
            if not found.deferred and (target := _target(found)) is not None and target != module
        }
        for module, path in modules().items()
    }
    found = [sorted(circle) for circle in circles(edges)]
    assert not found, f"these import one another: {found}"


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(edges) == [{"b", "c"}]


def test_no_file_is_longer_than_a_reader_can_keep_in_mind() -> None:
    long = {
        str(path.relative_to(SOURCE))
        for path in modules().values()
        if len(path.read_text(encoding="utf-8").splitlines()) > LINES
    }
    assert not long, f"over {LINES} lines: {sorted(long)}"
