"""Parses a command's arguments into its options with tyro. Nothing here imports torch.

tyro parses a view of the options dataclass, with the same fields but our help texts. Before that,
old spellings are replaced (`RENAMED`), positionals may be given by name, and ``--config`` replaces
the defaults.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from gulliver.errors import UsageError, usage_errors
from gulliver.options import (
    DTYPES,
    Options,
    alternative_dtype,
    bare,
    check_options,
    field_hints,
    plain_fields,
    renamed_fields,
    renamed_value,
    resolved,
    unchecked,
)

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
SHORT = {name: short for short, name in DTYPES.items()}
"""Dtype names shown in help."""
FEW = 10
"""Maximum number of options of a command whose help omits ``--config``."""


class Printed(Exception):
    """Raised after ``--print-config``, so that the command does not run."""


class Option(NamedTuple):
    """An option of a command, with its name on the command line."""

    flag: str
    field: str
    hint: Any
    positional: bool


def parse(kind: type[Options], arguments: list[str], prog: str) -> Any:
    """Parses options from arguments; raises `Printed` if ``--print-config`` showed them instead."""
    if "--out=" in arguments or ("--out", "") in pairwise(arguments):
        # As a path, it would be the current folder.
        raise UsageError("--out is empty: pass a folder or file (. is the current folder)")
    arguments = respelled(kind, arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    file, options = _taken(arguments[:end], "--config")
    to_print = "--print-config" in options
    options = [word for word in options if word != "--print-config"] + arguments[end:]
    with usage_errors():
        # Checked below, where nested options have their command-line names.
        with unchecked():
            view, default = _view(kind, True), _viewed(_defaults(kind, file))
            made = _options(kind, tyro.cli(view, args=options, default=default, prog=prog))
        check_options(made)
    if to_print:
        from gulliver.io.files import to_yaml

        sys.stdout.write(to_yaml(resolved(made)))
        raise Printed
    return made


# --- Old spellings, positionals by name, files ------------------------------------------------


def options_of(kind: type, prefix: str = "--") -> Iterator[Option]:
    """Lists the options of a command, including nested ones."""
    for name, hint in field_hints(kind).items():
        inner, flag = bare(hint), prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(inner):
            yield from options_of(typing.cast(type, inner), f"{flag}.")
        elif not _has(hint, tyro.conf.Suppress):
            yield Option(flag, name, hint, _has(hint, tyro.conf.Positional))


def respelled(kind: type, arguments: list[str]) -> list[str]:
    """Replaces old spellings; moves a positional given by name to the front."""
    table, known = _old_flags(kind), {option.flag: option for option in options_of(kind)}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found, positionals, rest = list[str](), dict[str, str](), iter(arguments[:end])
    option: Option | None = None
    for word in rest:
        if not word.startswith("--"):
            found.append(_as_choice(word, option))
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        old, (name, owner) = name, table.get(name, (name, kind))
        old = old.rpartition(".")[2].removeprefix("--")
        option = known.get(name)
        if option is not None and option.positional:
            value = value if equals else next(rest, "")
            if not value or value.startswith("--"):
                raise UsageError(f"{name} needs a value")
            positionals[name] = value
        elif equals:
            value = renamed_value(owner, old, _as_choice(value, option))
            found.append(f"{name}={value}")
        else:
            found.append(name)
            if old == "memory" and (value := next(rest, "")):
                found.append(renamed_value(owner, old, value))
    first = [value for flag in known if (value := positionals.get(flag)) is not None]
    return [*first, *found, *arguments[end:]]


@cache
def _old_flags(kind: type, prefix: str = "--") -> Mapping[str, tuple[str, type]]:
    hints, found = field_hints(kind), {}
    hidden = [name for name, hint in hints.items() if _has(hint, tyro.conf.Suppress)]
    for old, new in renamed_fields(kind, hidden).items():
        found[prefix + old.replace("_", "-")] = prefix + new.replace("_", "-"), kind
    for name, hint in hints.items():
        if dataclasses.is_dataclass(inner := bare(hint)):
            nested = f"{prefix}{name.replace('_', '-')}."
            found |= _old_flags(typing.cast(type, inner), nested)
    return found


def _as_choice(value: str, option: Option | None) -> str:
    """Returns the spelling of a dtype that an option accepts, such as bf16 for bfloat16."""
    return value if option is None else alternative_dtype(value, choices_of(option.hint))


def _taken(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Extracts an option's value, in the form ``--a b`` or ``--a=b``, from the arguments."""
    for place, word in enumerate(arguments):
        if word == flag and place + 1 < len(arguments):
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
        if word.startswith(f"{flag}=") and word != f"{flag}=":
            return word.partition("=")[2], arguments[:place] + arguments[place + 1 :]
        if word in (flag, f"{flag}="):
            raise UsageError(
                f"{flag} needs a YAML or JSON file, such as one written by --print-config"
            )
    return None, arguments


def _defaults(kind: type, file: str | None) -> Any:
    """Returns options read from a file, with defaults for the rest."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {f.name: tyro.MISSING for f in fields if _is_required(f)}
    if file is not None:
        values |= plain_fields(_read(Path(file)), kind)
    return kind(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _read(file: Path) -> Any:
    from gulliver.checkpoint.files import read_json
    from gulliver.io.files import named_errors

    if file.suffix == ".json":
        return read_json(file)
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that parses 1e-4 as a number; PyYAML's parses it as text."""

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    with named_errors(file, "read"):
        text = file.read_text(encoding="utf-8")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"--config {file} is neither YAML nor JSON: {error}") from None


# --- What tyro sees ---------------------------------------------------------------------------


def _has(hint: Any, marker: Any) -> bool:
    (mark,) = marker[int].__metadata__
    return mark in getattr(hint, "__metadata__", ())


def choices_of(hint: Any) -> tuple[Any, ...]:
    """Returns the choices of an option, including those of literals inside a union."""
    hint = bare(hint)
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(c for inner in typing.get_args(hint) for c in choices_of(inner))
    return ()


def _metavar(hint: Any) -> str | None:
    """Returns the placeholder of a value in help; None for tyro's default."""
    inner = bare(hint)
    if typing.get_origin(inner) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(inner) if part is not type(None)]
        names = [_metavar(part) for part in parts]
        return None if None in names else "|".join(name for name in names if name)
    if typing.get_origin(inner) is Literal:
        return "{" + ",".join(SHORT.get(c, str(c)) for c in typing.get_args(inner)) + "}"
    if typing.get_origin(inner) is tuple and typing.get_args(inner)[-1] is ...:
        return f"[{_metavar(typing.get_args(inner)[0])} ...]"
    return METAVARS.get(inner)


def _hint(label: str) -> str:
    """Formats the default for help; empty for switches, or if the help text states it."""
    return {"None": "", "False": "", "": "", "''": "", "True": "(default: on)"}.get(
        label, f"(default: {SHORT.get(label, label)})"
    )


@cache
def _texts(kind: type) -> Mapping[str, str]:
    import docstring_parser

    return {
        p.arg_name: " ".join((p.description or "").split())
        for base in reversed(kind.__mro__)
        if base is not object
        for p in docstring_parser.parse_from_object(base).params
    }


def _field(kind: type, field: dataclasses.Field[Any], hint: Any) -> tuple[str, Any, Any]:
    inner, positional = bare(hint), _has(hint, tyro.conf.Positional)
    default = dataclasses.field(default=field.default)
    if dataclasses.is_dataclass(inner):
        view = _view(typing.cast(type, inner), False)
        return field.name, view, dataclasses.field(default_factory=view)
    if _is_required(field):
        default = dataclasses.field(default=tyro.MISSING)
    if field.default_factory is not dataclasses.MISSING:
        default = dataclasses.field(default_factory=field.default_factory)
    metavar = _metavar(hint)
    if positional and metavar is not None:
        metavar = f"[{field.name.upper()} ...]" if "..." in metavar else field.name.upper()
    text = _texts(kind).get(field.name, "")
    given = tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=_hint)
    made = Annotated[hint, given]
    # A switch that is on by default can be turned off, and help shows both flags.
    return (
        field.name,
        made if field.default is True else tyro.conf.FlagCreatePairsOff[made],
        default,
    )


_GROUPED: dict[type, dict[str, str]] = {}
"""Group of each field, by view."""


@cache
def _view(kind: type, top: bool) -> type:
    """Creates the dataclass that tyro parses; `Options.GROUPS` become boxes in help."""
    hints, groups = field_hints(kind), getattr(kind, "GROUPS", {})
    boxes: dict[str, list[Any]] = {"": []}
    group, where = "", {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        group = groups.get(field.name, group)
        where[field.name] = group
        boxes.setdefault(group, []).append(_field(kind, field, hints[field.name]))
    fields = boxes.pop("")
    if top and len(list(options_of(kind))) > FEW:
        text = "Read options from a YAML or JSON file; command-line options override them."
        fields.append(_extra("config", Path | None, None, text, "FILE"))
        text = "Print all options as YAML for --config and exit."
        fields.append(_extra("print_config", bool, False, text, None))
    for name, members in boxes.items():
        box = dataclasses.make_dataclass(name, members)
        box.__doc__ = ""
        made = tyro.conf.OmitArgPrefixes[box]
        fields.append((name, made, dataclasses.field(default_factory=box)))
    view = dataclasses.make_dataclass(kind.__name__, fields)
    view.__doc__ = kind.__doc__
    _GROUPED[view] = where
    return view


def _extra(name: str, hint: Any, default: Any, text: str, metavar: str | None) -> Any:
    given = tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint="")
    return name, tyro.conf.FlagCreatePairsOff[Annotated[hint, given]], default


def _viewed(options: Any, top: bool = True) -> Any:
    kind = type(options)
    view = _view(kind, top)
    values: dict[str, Any] = {}
    boxes: dict[str, dict[str, Any]] = {}
    for name, group in _GROUPED[view].items():
        value = getattr(options, name)
        value = _viewed(value, False) if dataclasses.is_dataclass(value) else value
        (boxes.setdefault(group, {}) if group else values)[name] = value
    types_ = {field.name: field.default_factory for field in dataclasses.fields(view)}
    return view(**values, **{name: types_[name](**inner) for name, inner in boxes.items()})  # type: ignore[operator]


def _options(kind: type, parsed: Any) -> Any:
    values = {}
    for name, group in _GROUPED[type(parsed)].items():
        value = getattr(getattr(parsed, group) if group else parsed, name)
        if type(value) in _GROUPED:
            value = _options(bare(field_hints(kind)[name]), value)
        values[name] = value
    return kind(**values)
