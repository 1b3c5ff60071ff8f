"""Finds the family record of a model: ``family_of(model).blocks``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import nn

from gulliver.errors import GulliverError
from gulliver.families import records
from gulliver.families.hugging_face import HUGGING_FACE, TYPES
from gulliver.families.loss import hugging_face_of
from gulliver.families.record import SHARED_BY_SEQUENCE, SHARED_BY_TENSOR, Family

UNKNOWN = Family("unknown")

_added: list[Family] = []


# [Note: the rule] The first match of these names determines the family: the model type of the
# configuration; then, along the method resolution order of the model's class, the class name and
# the model type of its configuration class; then the model types along the method resolution order
# of the configuration's class. So a subclass of a known class is treated as that class, whatever
# model type its configuration has, and a subclass of a subclass finds the nearest one. Model types
# only count for transformers models and direct wrappers of one. For PEFT, the adapted model is
# used. Without a match the record is `HUGGING_FACE` for a transformers model, else `UNKNOWN`.
@cache
def _shipped() -> tuple[Family, ...]:
    known = [record for record in vars(records).values() if isinstance(record, Family)]
    return (*sorted(known, key=lambda record: record.name.lower()), HUGGING_FACE, *TYPES)


def all_families() -> tuple[Family, ...]:
    return (*_added, *_shipped())


def register(family: Family) -> None:
    """Registers the record of an additional family; called on every rank.

    Args:
        family: the record; it overrides the package's for the same names.

    Raises:
        GulliverError: a record for one of its names is already registered, or it lists modes that
            need an adapter for its attention.
    """
    known = family.sequences
    if family.classes and not family.types and known and {*known.modes} & {*SHARED_BY_SEQUENCE}:
        raise GulliverError(
            f"family {family.name!r} lists sequence modes with their own ranks, which need "
            f"transformers attention; list only {' and '.join(SHARED_BY_TENSOR)}"
        )
    for other in _added:
        shared = {*family.kinds, *family.classes} & {*other.kinds, *other.classes}
        if shared and other != family:
            raise GulliverError(
                f"families {family.name!r} and {other.name!r} both claim {sorted(shared)[0]!r}; "
                "register only one of them"
            )
    if family not in _added:
        _added.insert(0, family)
        _named.cache_clear()


@cache
def _named() -> tuple[dict[str, Family], dict[str, Family]]:
    kinds: dict[str, Family] = {}
    classes: dict[str, Family] = {}
    for family in all_families():
        for kind in family.kinds:
            kinds.setdefault(kind, family)
        for name in family.classes:
            classes.setdefault(name, family)
    return kinds, classes


def family_of(model: nn.Module) -> Family:
    """Returns the record of a model's family.

    Args:
        model: any module, possibly adapted by PEFT.

    Returns:
        Its record; without one, `HUGGING_FACE` for a transformers model, else `UNKNOWN`.
    """
    model = hugging_face_of(model)
    kinds, classes = _named()
    ours = is_hugging_face(model)
    typed = ours or any(is_hugging_face(child) for child in model.children())
    for name, table in _names(model, kinds if typed else {}, classes):
        if name in table:
            return table[name]
    return HUGGING_FACE if ours else UNKNOWN


def is_hugging_face(model: nn.Module) -> bool:
    model = hugging_face_of(model)
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def type_of(model: nn.Module) -> str:
    """Returns the model type in the configuration, or else the class name."""
    kind = getattr(getattr(hugging_face_of(model), "config", None), "model_type", None)
    return kind if isinstance(kind, str) and kind else type(model).__name__


def _names(
    model: nn.Module, kinds: dict[str, Family], classes: dict[str, Family]
) -> Iterator[tuple[str, dict[str, Family]]]:
    config = getattr(model, "config", None)
    yield str(getattr(config, "model_type", "")), kinds
    for kind in type(model).__mro__:
        yield kind.__name__, classes
        made_for = vars(kind).get("config_class")
        yield str(getattr(made_for, "model_type", "")), kinds
    for kind in type(config).__mro__:
        yield str(vars(kind).get("model_type", "")), kinds
