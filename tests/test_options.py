"""Options refuse values that their annotations exclude, and name the field."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import gulliver
from gulliver.cli.dispatch import PLACES, _found, main
from gulliver.errors import GulliverError
from gulliver.options import (
    AT_LEAST_1,
    RATE,
    Options,
    Range,
    Size,
    check_options,
    from_plain,
    unchecked,
)


def _modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(gulliver.__path__, "gulliver."):
        if not found.name.endswith("__main__"):
            try:
                yield importlib.import_module(found.name)
            except ImportError:  # of an extra
                continue


def _dataclasses() -> list[type]:
    kinds = {
        kind
        for module in _modules()
        for kind in vars(module).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    own = [kind for kind in kinds if kind.__module__.startswith("gulliver.")]
    return sorted(own, key=lambda kind: (kind.__module__, kind.__qualname__))


def _inside(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint):
        yield typing.cast(type, hint)
    for inner in typing.get_args(hint):
        yield from _inside(inner)


def _reachable(kind: type) -> Iterator[type]:
    yield kind
    for hint in typing.get_type_hints(kind).values():
        for inner in _inside(hint):
            yield from _reachable(inner)


def test_every_config_is_checked_when_it_is_made() -> None:
    configs = {kind for places in PLACES.values() for kind in _reachable(_found(places.split()[0]))}
    configs |= {
        kind for kind in _dataclasses() if kind.__name__.endswith(("Config", "Options", "Settings"))
    }
    assert len(configs) > 50
    assert not [kind.__qualname__ for kind in configs if not issubclass(kind, Options)]


@dataclass(frozen=True)
class Sample(Options):
    """An option of each kind of annotation."""

    choice: Literal["auto", "lora"] = "auto"
    number: Literal[0, 1] | None = None
    flag: bool = True
    count: Annotated[int, AT_LEAST_1] = 1
    least: Annotated[int | None, Range(2, 9)] = None
    rate: Annotated[float, RATE] = 1.0
    share: Annotated[float | Path, Range(0, 1, open_above=True)] = 0.5
    text: str = "a"
    place: Path = Path("a")
    sizes: tuple[int, ...] = ()
    pair: tuple[float, float] = (1.0, 2.0)
    limit: Annotated[str | None, Size()] = None
    part: Annotated[str, Size(share=True)] = "70%"


RIGHT: dict[str, list[tuple[Any, Any]]] = {
    "choice": [("lora", "lora")],
    "number": [(1, 1), (None, None)],
    "flag": [(False, False)],
    "count": [(1, 1), (2**31 - 1, 2**31 - 1)],
    "least": [(2, 2), (9, 9), (None, None)],
    "rate": [(10, 10.0), (1e-9, 1e-9)],
    "share": [(0, 0.0), ("file", Path("file"))],
    "place": [("b", Path("b"))],
    "sizes": [([1, 2], (1, 2)), ((), ())],
    "pair": [([1, 2], (1.0, 2.0))],
}
WRONG: dict[str, list[Any]] = {
    "choice": ["LORA", "Auto", "lor", "auto ", "", 1, True, ["auto"]],
    "number": [True, False, 2, -1, 1.0, "1"],
    "flag": ["yes", 0, 1, 1.0, ""],
    "count": [0, -1, 2**31, "1", 1.5, math.nan, True, [1]],
    "least": [1, 10, "2", False],
    "rate": [0, 0.0, -1, 10.1, math.nan, math.inf, "1e-3", True],
    "share": [1.0, -0.1, math.nan, True],
    "text": [3, True, ["a"]],
    "place": [3, True, ["a"]],
    "sizes": [3, True, ["1"], [1.5]],
    "pair": [(1.0,), (1.0, 2.0, 3.0), ("a", 1.0)],
}


def test_sizes_are_checked_before_they_are_used() -> None:
    assert Sample(limit="6GiB", part="5GiB").limit == "6GiB"
    for value in ("6XiB", "10", "70%", "-1GiB", "text", 3):
        with pytest.raises(GulliverError, match="limit"):
            Sample(limit=value)  # type: ignore[arg-type]
    with pytest.raises(GulliverError, match="part"):
        Sample(part="170%")


@pytest.mark.parametrize("name", WRONG)
def test_values_outside_of_an_annotation_are_refused_by_name(name: str) -> None:
    for value, wanted in RIGHT.get(name, []):
        found = getattr(Sample(**{name: value}), name)
        assert (found, type(found)) == (wanted, type(wanted))
        assert getattr(from_plain({name: value}, Sample), name) == wanted
    for value in WRONG[name]:
        with pytest.raises(GulliverError) as refused:
            Sample(**{name: value})
        message = str(refused.value)
        assert message.startswith(f"Sample.{name} is "), value
        if name in ("choice", "number"):
            assert all(repr(c) in message for c in (("auto", "lora"), (0, 1))[name == "number"])
        # The same rule and message for a file and a command line, with their names of the option.
        said = message.removeprefix(f"Sample.{name} is ")
        with pytest.raises(GulliverError) as refused:
            from_plain({name: value}, Sample)
        assert str(refused.value) == f"config key {name!r} is {said}"
        with unchecked():
            made = Sample(**{name: value})
        with pytest.raises(GulliverError) as refused:
            check_options(made)
        assert str(refused.value) == f"--{name} is {said}"


def test_nested_options_are_named_as_the_command_line_names_them(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--optimizer.learning-rate", "nan"])
    assert "--optimizer.learning-rate is nan" in capsys.readouterr().err
