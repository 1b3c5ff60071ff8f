"""What is known of a model family: one frozen record, whose parts are asked by name.

Plain data. `Tensors` is read by tensor parallelism, `Blocks` by the pipeline, `Sequences` by
sequence parallelism and by what a plugin checks.
A part that is None is found out by looking at the model, or is not supported: each says which.

What it does not know: how anything is cut. Names of styles are those of
`gulliver.parallel.tensor.STYLES`, names of modes those of `gulliver.planner.capability.MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

SHARED_BY_TENSOR = ("split_gather", "ring")
"""Sequence modes of the tensor axis: each rank's attention sees whole sequences, so any mask and
any bias will do."""

AUTO = "auto"
SHARED_BY_SEQUENCE = ("all_to_all", "ring_attn", AUTO)
"""Sequence modes with ranks of their own, over which attention reaches."""


@dataclass(frozen=True)
class Tensors:
    """How the tensors of a family are cut over the tensor axis.

    A pattern names a module by the last parts of its path, ``*`` standing for one part; the longest
    pattern that fits decides.

    Attributes:
        rules: pattern to the name of a style.
        sliced: pattern of a module to names of arguments of which a rank takes its heads' part;
            dim 0 of these is batch x heads.
        rest: cut what no rule names in the way that is exact for any module.
        own: the model's own plan (`tp_plan`) decides where no rule does.
        refused: reason why a cut would not be exact; empty where it is.
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    sliced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rest: bool = False
    own: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Blocks:
    """Where the stack of blocks is, and what lies around it.

    Attributes:
        lists: last parts of the paths of the lists of blocks, in running order; none: the longest
            list of equal blocks.
        interleaved: the lists run in turns, one block of each.
        extra: number of entries that a block returns after the hidden state; None: it returns a
            plain tensor; -1: not known, found out as blocks run.
        after: last parts of the paths of modules that run after the blocks although they are
            registered before them.
        everywhere: last parts of the paths of modules whose results go into every block.
        first_only: path inside a block of a module that only the first block of a list has, and
            whose result the others share.
        encoders: paths that the blocks of an encoder may have; those of its decoder are called
            alike. Looked for where the configuration speaks of an encoder and a decoder.
        parts: the layers are lists of parts, so that nothing can be handed from block to block.
        refused: reason why the stack cannot be cut into stages; empty where it can.
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
    """How sequences enter a model and leave it, and what may be combined.

    Attributes:
        modes: sequence modes that are exact, each held to one process by a test.
        causal: tokens see only those before them, so that a zigzag layout balances the work.
        masks: masks that are exact where the sequence has ranks of its own.
        why: reason that keeps the family from the other modes.
        by_positions: positions that begin anew begin a document.
        positions: function that makes positions of a padding mask, where the model does so.
        entry: path in the base model of the module that makes the tokens, of whose output each
            rank takes its part; None where tokens are given.
        exit: path in the base model of the module whose output is brought together, where more
            than the region reads it; None for the end of the base model.
        masked: the model takes a padding mask.
        dropouts: values of the configuration that draw at random, other than by dropout modules.
        refused: values of the configuration that must not be set where the sequence has ranks of
            its own.
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
    """What is particular to the models of one family.

    Attributes:
        name: name in tables and messages.
        types: model types (`config.model_type` of transformers) that it is of; none: its name.
        classes: names of classes that it is of, for models that are not transformers'.
        tensors: how tensors are cut; None: by the model's own plan.
        blocks: where the blocks are; None: looked for by the names that transformers uses.
        sequences: how sequences enter and leave; None: attention is not known, so only the modes
            of the tensor axis can be tried.
        experts: the loss of its routers is Mixtral's, which can be computed of parts.
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
        """The model types that the record is looked up by."""
        return self.types if self.types or self.classes else (self.name,)
