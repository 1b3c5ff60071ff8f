"""Imports of `src`: no cycles between modules, and packages export what they list.

`[tool.importlinter]` checks the layers, `tools/budgets.py` sizes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src"


class Import(NamedTuple):
    """A module that is imported, and the name that is taken from it, if any."""

    module: str
    name: str | None
    deferred: bool
    """Only when a function runs, or for type checkers."""


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
    inside |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    # Statements alone: expressions, most of a tree, import nothing.
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()) if not isinstance(node, ast.expr) else ():
            yield from _found(child, inside)


def _target(found: Import) -> str | None:
    """The module of ours that an import means."""
    inner = f"{found.module}.{found.name}"
    return inner if inner in modules() else found.module if found.module in modules() else None


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


def test_modules_have_no_import_cycles() -> None:
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


def test_import_cycle_check_finds_cycles() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(edges) == [{"b", "c"}]


def test_packages_export_what_they_list() -> None:
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]
    for package in map(importlib.import_module, packages):
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            documented = not inspect.isclass(value) and not inspect.isfunction(value)
            assert documented or value.__doc__, f"{package.__name__}.{name} has no docstring"
