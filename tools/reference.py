"""Writes the reference pages from the code: the command line, the errors, and the list of names.

`python tools/reference.py` writes `docs/cli.md`, `docs/errors.md` and the tables of `docs/api.md`;
with `--check` it only says which are stale.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import gulliver
from gulliver.cli.dispatch import WHAT, run
from gulliver.errors import GulliverError

ROOT = Path(__file__).parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "gulliver"
WIDTH = "100"
BOX = re.compile(r"[╭╰─╮╯│]+")
WORD, FEWEST = re.compile(r"[A-Za-z]{3,}"), 4
"""Words that a message needs, next to its values, to be found by them."""

MARKS = re.compile(r"(<!-- names -->\n).*?(<!-- /names -->)", re.DOTALL)


def help_of(arguments: list[str]) -> str:
    """Returns the help of a command, without boxes."""
    plain = patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"})
    ended = contextlib.suppress(SystemExit)
    with plain, contextlib.redirect_stdout(io.StringIO()) as printed, ended:
        run([*arguments, "--help"])
    lines = (BOX.sub(" ", line).rstrip() for line in printed.getvalue().splitlines())
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip("\n")


def command_line() -> str:
    """Returns the page of the command line."""
    codes = "Exit codes: 0 success, 1 failure, 2 usage error."
    parts = ["# Command line\n", f"Generated from the code by `make docs`. {codes}\n"]
    for name, what in WHAT.items():
        level = "#" * (2 + name.count(" "))
        shown = help_of(name.split())
        parts.append(f"{level} gulliver {name}\n\n{_sentence(what)}\n\n```text\n{shown}\n```\n")
    return "\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def messages() -> Iterator[tuple[str, str]]:
    """Yields package and text of the errors raised for users; `...` stands for values."""
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            name = node.exc.func
            if not (
                isinstance(name, ast.Name) and name.id in ("GulliverError", "IoError", "UsageError")
            ):
                continue
            text = _template(node.exc.args[0]) if node.exc.args else None
            if text is not None and len(WORD.findall(text)) >= FEWEST:
                yield package, text


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        return "".join(map(str, parts))
    return None


def errors() -> str:
    """Returns the page of errors: cause before the colon, remedy after it."""
    kinds = sorted(_subclasses(GulliverError), key=lambda kind: kind.__name__)
    lines = [
        "# Error index\n",
        "Generated from the code by `make docs`. Errors that you can fix are a `GulliverError` of",
        "one line: the cause, then the remedy. Search this page for a part of the message without",
        "names and numbers; `...` stands for those. The most common ones are explained in",
        "[troubleshooting](troubleshooting.md).\n",
        "| class | base | raised when |",
        "|---|---|---|",
    ]
    for kind in [GulliverError, *kinds]:
        what = (inspect.getdoc(kind) or "").partition("\n")[0]
        base = kind.__base__.__name__ if kind.__base__ else ""
        lines.append(f"| `{kind.__module__}.{kind.__name__}` | `{base}` | {what} |")
    found: dict[str, set[str]] = {}
    for package, text in messages():
        found.setdefault(package, set()).add(text)
    for package, texts in sorted(found.items()):
        lines += [f"\n## {package}\n", "| cause | remedy |", "|---|---|"]
        lines += [
            _row(text) for text in sorted(texts, key=lambda text: (text.strip(". ").lower(), text))
        ]
    return "\n".join(lines) + "\n"


def _row(text: str) -> str:
    flat = re.sub(r"(\.\.\.)+", "...", " ".join(text.split())).replace("`", "'").replace("|", "\\|")
    cause, _, remedy = flat.partition(": ")
    return f"| `{cause}` | {f'`{remedy}`' if remedy else ''} |"


def _subclasses(kind: type[Exception]) -> set[type[Exception]]:
    """Returns the public errors of all modules, whichever have been imported before."""
    for module in pkgutil.walk_packages(gulliver.__path__, "gulliver."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # extras that are not installed
                importlib.import_module(module.name)
    found, rest = set[type[Exception]](), [kind]
    while rest:
        subclasses = [sub for sub in rest.pop().__subclasses__() if sub.__name__[0] != "_"]
        rest += subclasses
        found.update(sub for sub in subclasses if sub.__module__.startswith("gulliver"))
    return found


def names() -> str:
    """Returns the tables of public names, one for each package."""
    parts = []
    for module in pkgutil.iter_modules(gulliver.__path__):
        if not module.ispkg or module.name.startswith("_"):
            continue
        package = importlib.import_module(f"gulliver.{module.name}")
        public = [name for name in getattr(package, "__all__", ()) if not name.startswith("_")]
        if not public:
            continue
        parts.append(f"### gulliver.{module.name}\n\n| name | |\n|---|---|")
        parts += [f"| `{name}` | {_first_line(package, name)} |" for name in sorted(public)]
        parts.append("")
    return "\n".join(parts)


def _first_line(package: object, name: str) -> str:
    value = getattr(package, name)
    if not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)):
        return ""
    if inspect.isclass(value) and "__doc__" not in vars(value):
        return ""
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    line = " ".join(text.split())
    return "" if line.startswith(f"{name}(") else line.replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Returns the pages as they should be."""
    api = (DOCS / "api.md").read_text(encoding="utf-8")
    return {
        DOCS / "cli.md": command_line(),
        DOCS / "errors.md": errors(),
        DOCS / "api.md": MARKS.sub(lambda found: f"{found[1]}\n{names()}\n{found[2]}", api),
    }


def main() -> None:
    """Writes the pages, or checks them."""
    made = pages()
    stale = [p for p, text in made.items() if not p.is_file() or p.read_text("utf-8") != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"stale: {', '.join(path.name for path in stale)}; run python tools/reference.py")
    for path in stale:
        path.write_text(made[path], encoding="utf-8")


if __name__ == "__main__":
    main()
