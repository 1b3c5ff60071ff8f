"""Every options dataclass refuses values that its annotations exclude, and names the field."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import gulliver
from gulliver.cli.dispatch import COMMANDS, _found, main
from gulliver.errors import GulliverError
from gulliver.options import Options, Range, check_options, from_plain, unchecked
from gulliver.schedule.live.options import Submission

NOT_SET = object()
REQUIRED = {"url": "http://127.0.0.1:8000", "prompt_words": (1, 2), "max_tokens": (1, 2)}
REQUIRED |= {"env": ["A=1"], "window": (450.0, 930.0)}
"""Values of fields that a class checks further."""


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
    configs = {
        kind for command in COMMANDS.values() for kind in _reachable(_found(command.options))
    }
    configs |= {
        kind for kind in _dataclasses() if kind.__name__.endswith(("Config", "Options", "Settings"))
    }
    assert len(configs) > 50
    assert not [kind.__qualname__ for kind in configs if not issubclass(kind, Options)]


def _arms(hint: Any) -> list[tuple[Any, Range | None]]:
    """Types that a value may have, each with its range."""
    if typing.get_origin(hint) is Annotated:
        inner, *extras = typing.get_args(hint)
        found = next((extra for extra in extras if isinstance(extra, Range)), None)
        return [(arm, own or found) for arm, own in _arms(inner)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [pair for arm in typing.get_args(hint) for pair in _arms(arm)]
    return [(hint, None)]


def _values(arm: Any, allowed: Range | None) -> tuple[list[Any], list[Any]]:
    """Values that a type accepts, and values near them that it does not."""
    if typing.get_origin(arm) is Literal:
        right = list(typing.get_args(arm))
        texts = [choice for choice in right if isinstance(choice, str)]
        near = [choice.upper() for choice in texts] + [choice.title() for choice in texts]
        near += [choice[:-1] for choice in texts] + [f"{choice} " for choice in texts]
        near += [str(choice) for choice in right] + [float(c) for c in right if c not in texts]
        wrong = [*near, "nonsense", "", 10**6, -1, True, False, 0.5, ["a"], {}]
        return right, [value for value in wrong if (type(value), value) not in _typed(right)]
    if arm is bool:
        return [True, False], ["yes", "no", "true", "False", 0, 1, 1.0, "", []]
    if arm is int:
        least, most = (allowed.least, allowed.most) if allowed else (-5, 5)
        right = [int(least) + (least != int(least) or bool(allowed and allowed.open_below))]
        wrong: list[Any] = ["1", "many", 1.5, math.nan, True, False, [1], ""]
        if allowed:
            right.append(int(most))
            wrong += [int(least) - 1, int(most) + 1]
        return right, wrong
    if arm is float:
        right = [0.5, 1] if allowed is None else [_middle(allowed)]
        wrong = ["0.5", "1e-3", True, False, [0.5], ""]
        if allowed:
            wrong += [math.nan, -math.inf, allowed.least - 1]
            wrong += [allowed.least] if allowed.open_below else []
            wrong += [allowed.most] if allowed.open_above else []
            wrong += [math.inf, allowed.most * 2 + 1] if allowed.most < math.inf else []
        return right, wrong
    if arm is str:
        return ["text"], [3, 0.5, True, ["text"], {}]
    if arm is Path:
        return ["folder", Path("folder")], [3, 0.5, True, ["folder"], {}]
    if arm is type(None):
        return [None], []
    if typing.get_origin(arm) is tuple:
        inner = typing.get_args(arm)
        right, wrong = _values(*_arms(inner[0])[0])
        many = 1 if inner[-1] is ... else len(inner)
        return [[one] * many for one in right], [3, True, {}, *([one] * many for one in wrong)]
    return [], [3, 0.5, True]


def _middle(allowed: Range) -> float:
    return allowed.least + 1 if allowed.most == math.inf else (allowed.least + allowed.most) / 2


def _typed(values: list[Any]) -> list[tuple[type, Any]]:
    return [(type(value), value) for value in values]


def _refused(value: Any, hint: Any) -> bool:
    """Whether all types that a value may have exclude it."""
    for arm, allowed in _arms(hint):
        if typing.get_origin(arm) in (Mapping, Sequence) and isinstance(value, dict | list):
            return False
        right, wrong = _values(arm, allowed)
        known = any(type(value) is type(one) and repr(value) == repr(one) for one in wrong)
        kinds = {type(one) for one in right}
        if not known and (type(value) in kinds or (arm is float and isinstance(value, int))):
            return False
    return value is not None


CLASSES = [kind for kind in _dataclasses() if issubclass(kind, Options)]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _required(kind: type) -> dict[str, Any]:
    """A value for each field that has none."""
    hints, given = _hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.default_factory is dataclasses.MISSING and "MISSING" in repr(field.default):
            right = REQUIRED.get(field.name) or next(
                (v for arm in _arms(hints[field.name]) for v in _values(*arm)[0]), NOT_SET
            )
            if right is NOT_SET:  # the command inside a command
                right = _made(next(_inside(hints[field.name])))
            given[field.name] = right
    return given | ({"samples": 10.0} if issubclass(kind, Submission) else {})


def _made(kind: type, **given: Any) -> Any:
    return kind(**{**_required(kind), **given})


def _cases(kind: type) -> Iterator[tuple[str, Any, Any, bool]]:
    """Name, annotation and value of each field, and whether the value is right."""
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        for arm, allowed in _arms(hint):
            right, wrong = _values(arm, allowed)
            for value in right:
                yield field.name, hint, value, True
            for value in wrong:
                if _refused(value, hint):
                    yield field.name, hint, value, False


def _alike(found: Any, given: Any) -> bool:
    if isinstance(given, list):
        return len(found) == len(given) and all(map(_alike, found, given))
    return found == (Path(given) if isinstance(found, Path) else given)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_values_outside_of_an_annotation_are_refused_by_name(kind: type) -> None:
    allowed: set[str] = set()
    for name, hint, value, is_right in _cases(kind):
        place = f"{kind.__name__}.{name} is "
        if is_right:
            # Another rule may refuse it, such as one of two fields together.
            with suppress(GulliverError):
                made = _made(kind, **{name: value})
                allowed.add(name)
                assert _alike(getattr(made, name), value)
            continue
        with pytest.raises(GulliverError) as refused:
            _made(kind, **{name: value})
        assert str(refused.value).startswith(place), (name, value)
        for arm, _ in _arms(hint):
            if typing.get_origin(arm) is Literal:
                assert all(repr(choice) in str(refused.value) for choice in typing.get_args(arm))
        # The same rule and message for a file and a command line, with their names of the option.
        said = str(refused.value).removeprefix(place)
        if not dataclasses.is_dataclass(_arms(hint)[0][0]):
            with pytest.raises(GulliverError) as refused:
                from_plain({name: value}, kind)
            assert str(refused.value) == f"config key {name!r} is {said}"
        if "__post_init__" not in vars(kind):  # such as those of a command
            with unchecked():
                made = _made(kind, **{name: value})
            with pytest.raises(GulliverError) as refused:
                check_options(made)
            assert str(refused.value) == f"--{name.replace('_', '-')} is {said}"
    # What a class checks further may exclude all values that are tried.
    fields = {name for name, _, _, is_right in _cases(kind) if is_right}
    assert allowed >= fields - set(REQUIRED)


def test_nested_options_are_named_as_the_command_line_names_them(
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--optimizer.learning-rate", "nan"])
    assert "--optimizer.learning-rate is nan" in capsys.readouterr().err
