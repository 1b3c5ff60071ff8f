"""Model family records: frozen dataclasses of plain data.

`Tensors` is read by tensor parallelism, `Blocks` by the pipeline, `Sequences` by sequence
parallelism and by plugin checks. A part that is None is either detected from the model or not
supported, as documented below.

Styles are defined in `gulliver.parallel.tensor.STYLES`, modes in
`gulliver.planner.capability.MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

SHARED_BY_TENSOR = ("split_gather", "ring")
"""Sequence modes on the tensor axis: attention sees full sequences, with any mask and bias."""

AUTO = "auto"
SHARED_BY_SEQUENCE = ("all_to_all", "ring_attn", AUTO)
"""Sequence modes with their own ranks, whose attention communicates."""


@dataclass(frozen=True)
class Tensors:
    """Sharding of a family's tensors over the tensor axis.

    A pattern matches the last components of a module's path; ``*`` matches one component. The
    longest matching pattern decides.

    Attributes:
        rules: style by pattern.
        sliced: pattern of a module to names of arguments that a rank slices to its heads; their dim
            0 is batch x heads.
        rest: whether to shard modules without a rule, in the way that is exact for any module.
        own: whether the model's own plan (`tp_plan`) applies where no rule does.
        refused: reason why sharding would not be exact; empty if it is.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    sliced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rest: bool = False
    own: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Blocks:
    """Location of the stack of blocks, and the modules around it.

    Attributes:
        lists: path suffixes of the lists of blocks, in running order; if empty, the longest list of
            equal blocks.
        interleaved: whether the lists alternate, one block of each.
        extra: number of entries that a block returns after the hidden state; None: it returns a
            plain tensor; -1: detected when blocks run.
        after: path suffixes of modules that run after the blocks although they are registered
            before them.
        everywhere: path suffixes of modules whose results are inputs of every block.
        first_only: path inside a block of a module that only the first block of a list has, with
            its result shared by the others.
        encoders: possible paths of an encoder's blocks; the decoder's have the same names. Used if
            the configuration has an encoder and a decoder.
        parts: whether the layers are lists of modules, which cannot be split into stages.
        refused: reason why the stack cannot be split into stages; empty if it can.
    """

    lists: tuple[str, ...] = ()
    interleaved: bool = False
    extra: int | None = None
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    first_only: str | None = None
    encoders: tuple[str, ...] = ()
    parts: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Sequences:
    """Entry and exit points of sequences in a model, and the supported combinations.

    Attributes:
        modes: exact sequence modes, each compared with a single process by a test.
        causal: whether attention is causal, so that a zigzag layout balances the work.
        masks: masks that are exact with sequence ranks.
        why: reason why the family does not support the other modes.
        by_positions: whether restarting positions start a new document.
        positions: function that computes positions from a padding mask, if the model does so.
        entry: path in the base model of the module that creates the tokens and whose output is
            split over ranks; None if tokens are inputs.
        exit: path in the base model of the module whose output is gathered, if it is read outside
            of the region; None for the end of the base model.
        masked: whether the model takes a padding mask.
        dropouts: configuration values that enable randomness other than dropout modules.
        refused: configuration values that must not be set with sequence ranks.
    """

    modes: tuple[str, ...] = (*SHARED_BY_TENSOR, *SHARED_BY_SEQUENCE)
    causal: bool = False
    masks: tuple[str, ...] = ("full", "padding")
    why: str = ""
    by_positions: bool = False
    positions: Callable[[Tensor], Tensor] | None = None
    entry: str | None = None
    exit: str | None = None
    masked: bool = True
    dropouts: tuple[str, ...] = ("attention_dropout",)
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Everything specific to one model family.

    Attributes:
        name: name in tables and messages.
        types: model types (`config.model_type` in transformers); if empty, the name.
        classes: names of the model classes that are not from transformers.
        tensors: sharding of tensors; None: by the model's own plan.
        blocks: location of the blocks; None: detected by transformers' usual names.
        sequences: where sequences enter and leave; None: attention is unknown, so only the modes of
            the tensor axis can be tried.
        experts: whether the router loss is Mixtral's, which can be computed from shards.
    """

    name: str
    types: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    tensors: Tensors | None = None
    blocks: Blocks | None = None
    sequences: Sequences | None = None
    experts: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Model types that select the record."""
        return self.types if self.types or self.classes else (self.name,)
