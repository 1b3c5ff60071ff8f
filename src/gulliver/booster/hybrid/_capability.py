"""What may be combined: the one table that is asked when a plan is made.

    check(Wanted(family="bloom", mode="ring_attn", ...))    # refused, naming what works instead

A combination is in the table because a test holds it against one process, forward and gradient
(`docs/parity.md`); whatever is not in it is refused by name. Read `MODES`, `FAMILIES`, `check`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gulliver.errors import GulliverError, nearest
from gulliver.parallel import hugging_face_of

SHARED_BY_TENSOR = ("split_gather", "ring")
"""Sequence modes in which the tensor axis shares the sequences, too."""

AUTO = "auto"
SHARED_BY_SEQUENCE = ("all_to_all", "ring_attn", AUTO)
"""Sequence modes with ranks of their own."""

MODES = {
    "split_gather": "activations between blocks sharded over the tensor axis",
    "ring": "the same, gathers and scatters in pieces under the matmuls",
    "all_to_all": "Ulysses: sequence exchanged for heads around attention",
    "ring_attn": "keys and values go round a ring, of two levels if wished",
    AUTO: "Ulysses, a ring or both, by predicted time",
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ANY_ATTENTION = ("split_gather", "ring")
"""Modes in which each rank's attention sees whole sequences: any mask, any bias."""


@dataclass(frozen=True)
class Family:
    """What holds for the models of one type.

    Attributes:
        sequence: modes that it runs under.
        causal: whether tokens see only those before them, so that zigzag balances the work.
        masks: that it runs with where the sequence is shared by ranks of its own.
        why: what keeps it from the other modes.
    """

    sequence: tuple[str, ...] = tuple(MODES)
    causal: bool = False
    masks: tuple[str, ...] = ("full", "padding")
    why: str = ""


_DECODER = Family(causal=True, masks=("causal", "padding", "documents"))
_WINDOWED = Family(causal=True, masks=("causal", "window", "padding", "documents"))
_BIASED = "its attention adds a bias to the scores, which no ring carries"
FAMILIES = {
    "llama": _DECODER,
    "mistral": _WINDOWED,
    "qwen2": _WINDOWED,
    "gpt2": _DECODER,
    "opt": Family(causal=True, masks=("causal", "padding")),
    "bert": Family(),
    "vit": Family(masks=("full",)),
    "bloom": Family(ANY_ATTENTION, True, (), _BIASED),
    "t5": Family(ANY_ATTENTION, False, (), _BIASED),
    "whisper": Family(ANY_ATTENTION, False, (), "its encoder makes tokens by convolution"),
    "STDiT3": Family(
        SHARED_BY_SEQUENCE,
        masks=("full", "padding"),
        why="its tokens are cut by frames or places, by modes of its own",
    ),
}


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


def table() -> list[tuple[str, ...]]:
    """What may be combined, a row for each family under `HEADER`.

    All of them can be cut over the tensor axis and into stages, with any stage of ZeRO, in all
    `DTYPES`.
    """
    return [
        (name, ", ".join(family.sequence), ", ".join(family.masks) or "-", family.why)
        for name, family in FAMILIES.items()
    ]


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model's class, or one that it derives from, is one of transformers'."""
    model = hugging_face_of(model)
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def family_of(model: nn.Module) -> str | None:
    """The name under which a model stands in the table; None for others."""
    model = hugging_face_of(model)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(kind, str) and is_hugging_face(model):
        return kind
    return next((c.__name__ for c in type(model).__mro__ if c.__name__ in FAMILIES), None)


def check(wanted: Wanted) -> None:
    """Refuses what the table does not list.

    Raises:
        GulliverError: what cannot be combined, and the nearest that can.
    """
    _check_mode(wanted)
    for dtype in wanted.dtypes:
        if dtype not in DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise GulliverError(f"parameters of {dtype} cannot be trained so: one of {known}")
    if wanted.mode is None or wanted.anonymous:
        return
    family = FAMILIES.get(wanted.family or "")
    if family is None:
        if wanted.mode in SHARED_BY_SEQUENCE:
            raise GulliverError(
                f"sequence_parallelism_mode={wanted.mode!r} needs a model that is in the table "
                f"({', '.join(FAMILIES)}), not {wanted.family or 'this one'}: its attention has "
                "to be wired; tp_size with tensor_rules, or gulliver.parallel.sequence in the "
                "model's own code, work with any"
            )
        return
    if wanted.mode not in family.sequence:
        raise GulliverError(
            f"{wanted.family} does not run under sequence_parallelism_mode={wanted.mode!r}: "
            f"{family.why}; take {family.sequence[0]!r} with {_size_of(family.sequence[0], wanted)}"
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
