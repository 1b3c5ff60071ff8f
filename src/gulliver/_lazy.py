"""Lazy exports of packages (PEP 562): importing a package costs nothing until a name is used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gulliver.errors import missing_extra


def lazy_exports(
    package: str, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    Its names are those that the package imports under ``if TYPE_CHECKING:``, which type checkers
    read too, so each is listed with its module once. Those imported as themselves (``from a import
    b as b``, which type checkers require too) become ``__all__``, if the package has none; the
    others are old names. If importing a module fails because a package is missing, the error names
    the optional `extra` that contains it.
    """
    places: dict[str, tuple[str, str]] = {}
    module_of_package = sys.modules[package]
    source = Path(str(module_of_package.__file__)).read_text(encoding="utf-8")
    for block in ast.parse(source).body:
        for statement in block.body if isinstance(block, ast.If) else ():
            if isinstance(statement, ast.ImportFrom):
                for name in statement.names:
                    places[name.asname or name.name] = str(statement.module), name.name
    exported = sorted(name for name, (_, defined) in places.items() if name == defined)
    vars(module_of_package).setdefault("__all__", exported)

    def load(name: str) -> Any:
        if name in places:
            module, defined = places[name]
            try:
                return getattr(import_module(module), defined)
            except ModuleNotFoundError as error:
                if extra is None or (error.name or "").startswith("gulliver"):
                    raise
                raise missing_extra(f"{package}.{name} needs {error.name}", extra) from error
        if not name.startswith("__") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted(places)
