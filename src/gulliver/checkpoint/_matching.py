"""Compares what is there with what is asked for: names, shapes, and parts of tensors.

Read `match`. Every road goes by it, before anything is changed: steps, Hugging Face's folders, raw
tensors, the command that compares two checkpoints. `Mismatch.refuse` says what `strict` means, and
`merge_parts` whether the parts that ranks have make up whole tensors. Whether values fit a dtype is
checked by `_fits.py`. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gulliver.checkpoint._image import DTYPES
from gulliver.checkpoint._manifest import tensor_from_json
from gulliver.errors import GulliverError
from gulliver.memory import whole_shape

SHOWN = 4
"""Number of names that a message shows of a list."""


class Shaped(Protocol):
    """Anything with the shape of a whole tensor: a tensor, a part, an entry of a manifest."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        ...


@dataclass
class Mismatch:
    """Names and shapes that did not match."""

    # Names that are wanted and not there.
    missing: list[str] = field(default_factory=list)
    # Names that are there and not wanted.
    unexpected: list[str] = field(default_factory=list)
    # Shapes there and here by name, where they differ.
    unlike: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        said = [listed("missing from it", self.missing), listed("left over", self.unexpected)]
        for name, (theirs, ours) in list(self.unlike.items())[:1]:
            said.append(
                f"{len(self.unlike)} of other shapes ({name} is {theirs} there, {ours} here)"
            )
        return "; ".join(text for text in said if text)

    def refuse(self, where: str, wanted: int, strict: bool = True) -> None:
        """Raises unless this may be left as it is."""
        # Without `strict` names may be left over or missing, but not all missing, and no shape may
        # differ.
        if self.unlike or (strict and self) or (wanted and len(self.missing) == wanted):
            raise GulliverError(f"{where} does not fit: {self}")


def listed(what: str, names: list[str]) -> str:
    """Counts names and shows the first few, for messages; empty where there are none."""
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {what} ({shown})" if names else ""


def match(
    saved: Mapping[str, Shaped],
    wanted: Mapping[str, Shaped],
    prefix: str = "",
    elsewhere: Collection[str] = (),
) -> Mismatch:
    """Compares names and shapes."""
    found = Mismatch()
    for name, leaf in sorted(wanted.items()):
        there, ours = saved.get(prefix + name), _shape(leaf)
        if there is None:
            found.missing.append(name)
        elif tuple(there.shape) != ours:
            found.unlike[name] = (tuple(there.shape), ours)
    if not prefix:
        found.unexpected = sorted(saved.keys() - wanted.keys() - set(elsewhere))
    return found


def _shape(leaf: Shaped) -> tuple[int, ...]:
    return whole_shape(leaf) if isinstance(leaf, Tensor) else tuple(leaf.shape)


def merge_parts(
    every: Iterable[Mapping[str, Mapping[str, Any]]], where: str = ""
) -> dict[str, dict[str, Any]]:
    """Merges what each rank has of tensors, and checks that the parts are the whole."""
    merged: dict[str, dict[str, Any]] = {}
    for tensors in every:
        for name, found in tensors.items():
            known = merged.setdefault(name, {**found, "parts": []})
            if (known["dtype"], known["shape"]) != (found["dtype"], found["shape"]):
                raise GulliverError(f"{where}{name} has another shape or dtype on each rank")
            known["parts"] = known["parts"] + found["parts"]
    for name, found in merged.items():
        if found["dtype"] not in DTYPES:
            raise GulliverError(f"{where}{name} is {found['dtype']}: safetensors cannot hold it")
        try:
            tensor_from_json(found)
        except ValueError as error:
            raise GulliverError(
                f"{where}{name} {error}: do all ranks save the same state?"
            ) from error
    return merged
