"""The one place to ask which family a model is of.

family_of(model).blocks
"""

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
"""A model of which nothing is known."""

_added: list[Family] = []


# [Note: the rule] A model is of the family that the first of these names leads to: the model type
# of its configuration; then, along the method resolution order of its class, the name of each class
# and the model type of the configuration which that class is made for; then the model types along
# the order of the configuration's class. So a subclass of a known class is treated as that class,
# whatever its own configuration calls itself, and a subclass of a subclass finds the nearest one.
# Model types count only for models of transformers, and for what wraps one directly. What PEFT has
# put adapters into is the model inside. What no name leads to is `HUGGING_FACE`, for a model of
# transformers, or `UNKNOWN`.
@cache
def _shipped() -> tuple[Family, ...]:
    """The records of this package, those with more to say first."""
    known = [record for record in vars(records).values() if isinstance(record, Family)]
    return (*sorted(known, key=lambda record: record.name.lower()), HUGGING_FACE, *TYPES)


def all_families() -> tuple[Family, ...]:
    """All records: those of this package, and what was registered."""
    return (*_added, *_shipped())


def register(family: Family) -> None:
    """Adds the record of a family that this package does not have; every rank calls it.

    Args:
        family: the record; it goes before one of the package for the same names.

    Raises:
        GulliverError: a record for one of its names was registered before, or lists modes that
            need an adapter of its attention.
    """
    known = family.sequences
    if family.classes and not family.types and known and {*known.modes} & {*SHARED_BY_SEQUENCE}:
        raise GulliverError(
            f"family {family.name!r} lists modes of ranks of their own, which reach into attention "
            f"as transformers calls it: list {' and '.join(SHARED_BY_TENSOR)} at most"
        )
    for other in _added:
        shared = {*family.kinds, *family.classes} & {*other.kinds, *other.classes}
        if shared and other != family:
            raise GulliverError(
                f"family {family.name!r} is for {sorted(shared)[0]!r}, and so is {other.name!r}: "
                "register one of them"
            )
    if family not in _added:
        _added.insert(0, family)
        _named.cache_clear()


@cache
def _named() -> tuple[dict[str, Family], dict[str, Family]]:
    """Records by model type, and by name of a class."""
    kinds: dict[str, Family] = {}
    classes: dict[str, Family] = {}
    for family in all_families():
        for kind in family.kinds:
            kinds.setdefault(kind, family)
        for name in family.classes:
            classes.setdefault(name, family)
    return kinds, classes


def family_of(model: nn.Module) -> Family:
    """The record of a model's family.

    Args:
        model: module of any kind; one that PEFT has adapted is looked into.

    Returns:
        Its record; `HUGGING_FACE` for a model of transformers that has none, else `UNKNOWN`.
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
    """Whether a model's class, or one that it derives from, is one of transformers'."""
    model = hugging_face_of(model)
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def type_of(model: nn.Module) -> str:
    """What a model calls itself: the model type of its configuration, or its class's name."""
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
