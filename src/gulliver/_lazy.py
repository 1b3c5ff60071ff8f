"""Lazy exports of packages (PEP 562): importing a package costs nothing until a name is used."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gulliver.errors import missing_extra


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package that exports names of these modules.

    A name may be exported under another one: ``"AttentionShape as Shape"``. If importing a module
    fails because a package is missing, the error names the optional `extra` that contains it.
    """
    places: dict[str, tuple[str, str]] = {}
    for module, names in modules.items():
        for name in names:
            defined, _, exported = name.partition(" as ")
            places[exported or defined] = module, defined

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
