"""The table of supported combinations, which plans are checked against.

    check(Wanted(family="bloom", mode="ring_attn", ...))    # refused, naming what works instead

A combination is in the table because a test holds it against one process, forward and gradient
(`docs/parity.md`); whatever is not in it is refused by name. The rows are the records of
`gulliver.families`. Read `MODES`, `families`, `check`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gulliver.errors import GulliverError, nearest
from gulliver.families import (
    AUTO,
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    Sequences,
    all_families,
    is_hugging_face,
    type_of,
)
from gulliver.families import family_of as record_of

MODES = {
    "split_gather": "activations between blocks sharded over the tensor axis",
    "ring": "the same, gathers and scatters in pieces under the matmuls",
    "all_to_all": "Ulysses: sequence exchanged for heads around attention",
    "ring_attn": "keys and values go round a ring, of two levels if wished",
    AUTO: "Ulysses, a ring or both, by predicted time",
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Wanted:
    """What a plugin asks for."""

    family: str | None
    tp_size: int = 1
    pp_size: int = 1
    sp_size: int = 1
    mode: str | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    anonymous: bool = False
    """There is no model yet: only the sizes and the mode are looked at."""


HEADER = ("model", "sequence_parallelism_mode", "masks over shared sequences", "why not more")


def families() -> dict[str, Sequences]:
    """What is known of the sequences of each family, by its name."""
    found = {family.name: family.sequences for family in all_families()}
    return {name: known for name, known in found.items() if known is not None}


def table() -> list[tuple[str, ...]]:
    """Supported combinations, a row for each family under `HEADER`."""
    # All of them can be cut over the tensor axis and into stages, with any stage of ZeRO, in all
    # `DTYPES`.
    return [
        (name, ", ".join(known.modes), ", ".join(known.masks) or "-", known.why)
        for name, known in families().items()
    ]


def family_of(model: nn.Module) -> str | None:
    """The name of a model's family, or its model type; None for what no adapter is made for."""
    family, ours = record_of(model), is_hugging_face(model)
    if family.sequences is not None and (ours or family.classes):
        return family.name
    return type_of(model) if ours else None


def check(wanted: Wanted) -> None:
    """Refuses combinations that the table does not list."""
    _check_mode(wanted)
    for dtype in wanted.dtypes:
        if dtype not in DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise GulliverError(f"parameters of {dtype} cannot be trained so: one of {known}")
    if wanted.mode is None or wanted.anonymous:
        return
    every = families()
    known = every.get(wanted.family or "")
    if known is None:
        if wanted.mode in SHARED_BY_SEQUENCE:
            raise GulliverError(
                f"sequence_parallelism_mode={wanted.mode!r} needs a model that is in the table "
                f"({', '.join(every)}), not {wanted.family or 'this one'}: its attention has "
                "to be wired; tp_size with tensor_rules, or gulliver.parallel.sequence in the "
                "model's own code, work with any"
            )
        return
    if wanted.mode not in known.modes:
        raise GulliverError(
            f"{wanted.family} does not run under sequence_parallelism_mode={wanted.mode!r}: "
            f"{known.why}; take {known.modes[0]!r} with {_size_of(known.modes[0], wanted)}"
        )


def _size_of(mode: str, wanted: Wanted) -> str:
    size = max(2, wanted.sp_size, wanted.tp_size)
    return f"{'tp' if mode in SHARED_BY_TENSOR else 'sp'}_size={size}"


def _check_mode(wanted: Wanted) -> None:
    mode = wanted.mode
    if mode is not None and mode not in MODES:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} is not known: {nearest(str(mode), MODES)}"
        )
    if mode is None and wanted.sp_size > 1:
        raise GulliverError(
            f"sp_size={wanted.sp_size} needs a sequence_parallelism_mode: 'all_to_all' or "
            "'ring_attn'"
        )
    if mode in SHARED_BY_TENSOR and wanted.tp_size == 1:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} shares sequences over the tensor axis: it needs "
            "a tp_size of at least 2; with ranks of their own take 'all_to_all' or 'ring_attn'"
        )
    if mode in SHARED_BY_TENSOR and wanted.sp_size > 1:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} has no ranks of its own: leave sp_size out, "
            f"or take 'all_to_all' or 'ring_attn' for sp_size={wanted.sp_size}"
        )
    if mode in SHARED_BY_SEQUENCE and wanted.sp_size == 1:
        raise GulliverError(
            f"sequence_parallelism_mode={mode!r} needs an sp_size of at least 2: the ranks that "
            "share a sequence"
        )
