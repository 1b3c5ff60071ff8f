"""Imports of `src`: no cycles between modules, and packages export what they list.

`[tool.importlinter]` checks the layers, `tools/budgets.py` sizes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Modules that are imported when a file is, and the names that are taken from them."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from ((node.module or "", alias.name) for alias in node.names)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _for_type_checkers(node):
        return
    # Statements alone: expressions, most of a tree, import nothing.
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from imports(child)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _target(module: str, name: str | None) -> str | None:
    """The module of ours that an import means."""
    inner = f"{module}.{name}"
    return inner if inner in modules() else module if module in modules() else None


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
            for found in imports(ast.parse(path.read_text(encoding="utf-8")))
            if (target := _target(*found)) is not None and target != module
        }
        for module, path in modules().items()
    }
    found = [sorted(circle) for circle in circles(edges)]
    assert not found, f"these import one another: {found}"


def test_import_cycle_check_finds_cycles() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(edges) == [{"b", "c"}]


def test_packages_export_what_they_list() -> None:
    for package, path in modules().items():
        if path.name != "__init__.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        listed, lazy = list[str](), set[str]()
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed = ast.literal_eval(node.value)
            elif _for_type_checkers(node):
                assert isinstance(node, ast.If)
                taken = (inner for inner in node.body if isinstance(inner, ast.ImportFrom))
                lazy |= {alias.asname or alias.name for inner in taken for alias in inner.names}
        assert set(listed) <= lazy, package
