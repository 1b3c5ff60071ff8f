"""Prints the size and shape of the code base, and fails when a number has risen.

The limits are in `tools/budgets.json`; `--write` lowers them to what is measured (it raises none).
All numbers come from the sources alone: nothing is imported.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_suffix(".json")
LONG_FUNCTION = 60
"""Lines from `def` to the last statement, decorators excluded."""

MANY_METHODS = 25
FLOORS = {"comment lines, per thousand"}
"""Measures that must not fall; all others must not rise."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One parsed module of the package."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def read_modules(source: Path) -> dict[str, Module]:
    """Returns the modules below a source folder, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, text, ast.parse(text), is_package)
    return found


def imported_at_import_time(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports that run when the module does: none of functions or type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_at_import_time(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imported_at_import_time(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from imported_at_import_time(handler.body)


def imports_of(module: Module, modules: dict[str, Module]) -> set[str]:
    """Returns the modules of ours, and the packages around them, that a module imports."""
    names = set()
    for node in imported_at_import_time(module.tree.body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & modules.keys()
    return found


def closure(class_name: str, modules: dict[str, Module]) -> set[str]:
    """Returns all modules that importing a class imports, itself included."""
    pending = [
        name
        for name, module in modules.items()
        if any(isinstance(n, ast.ClassDef) and n.name == class_name for n in module.tree.body)
    ][:1]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports_of(modules[name], modules) - seen
    return seen


def comment_lines(text: str) -> int:
    """Returns the number of lines that are comments and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and t.line.strip().startswith("#") for t in tokens)


def python_lines(folder: Path) -> int:
    return sum(p.read_text(encoding="utf-8").count("\n") for p in folder.rglob("*.py"))


def measure(root: Path) -> dict[str, int]:
    """Returns all measures of a checkout, by what they are called."""
    modules = read_modules(root / "src")
    nodes = [node for module in modules.values() for node in ast.walk(module.tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, Function)]
    methods = {
        node: [member for member in node.body if isinstance(member, Function)] for node in classes
    }
    constructors = [
        len(member.args.args) + len(member.args.kwonlyargs) - 1
        for node, members in methods.items()
        if not node.name.startswith("_")
        for member in members
        if member.name == "__init__"
    ]
    lines = sum(module.lines for module in modules.values())
    comments = sum(comment_lines(module.text) for module in modules.values())
    return {
        "lines in src": lines,
        "files in src": len(modules),
        "lines in tests": python_lines(root / "tests"),
        "lines in benchmarks": python_lines(root / "benchmarks"),
        "modules imported with Booster": len(closure("Booster", modules)),
        "modules imported with LLM": len(closure("LLM", modules)),
        f"functions over {LONG_FUNCTION} lines": sum(
            (node.end_lineno or 0) - node.lineno + 1 > LONG_FUNCTION for node in functions
        ),
        "class names that occur more than twice": sum(
            count > 2 for count in Counter(node.name for node in classes).values()
        ),
        f"classes with more than {MANY_METHODS} public methods": sum(
            sum(not member.name.startswith("_") for member in members) > MANY_METHODS
            for members in methods.values()
        ),
        "parameters of the longest public constructor": max(constructors),
        "comment lines, per thousand": 1000 * comments // lines,
    }


def main() -> int:
    """Prints measures beside their limits; 1 if one is exceeded."""
    limits: dict[str, int] = json.loads(LIMITS.read_text(encoding="utf-8"))
    found = measure(ROOT)
    worse = []
    for name, value in found.items():
        limit = limits.get(name, value)
        exceeded = value < limit if name in FLOORS else value > limit
        if exceeded:
            worse.append(name)
        bound = "at least" if name in FLOORS else "at most"
        print(f"{name:50} {value:9,}  ({bound} {limit:,}){'  EXCEEDED' if exceeded else ''}")
    if "--write" in sys.argv:
        better = {
            name: max(value, limits.get(name, value))
            if name in FLOORS
            else min(value, limits.get(name, value))
            for name, value in found.items()
        }
        LIMITS.write_text(json.dumps(better, indent=2) + "\n", encoding="utf-8")
    if worse:
        print(f"exceeded: {', '.join(worse)}; shorten, or raise {LIMITS.name} and say why")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
