"""Finds the blocks of a model that a pipeline splits into stages, and the modules around them.

A model runs some modules, then its blocks in sequence, then other modules. The hidden state is each
block's first argument and first output. An encoder-decoder has two lists of blocks. Known families
are described by `gulliver.families.Blocks`; in other models, `stack_of` searches for the longest
list of equal blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from gulliver.errors import GulliverError
from gulliver.families.lookup import family_of, type_of
from gulliver.families.record import Blocks
from gulliver.hardware.costs import linear_flops
from gulliver.solve.partition import chain_times, partition_chain


@dataclass(frozen=True)
class Stack:
    """The blocks of a model, in execution order."""

    blocks: tuple[str, ...]
    lists: tuple[str, ...]  # Paths of the lists that contain them
    # Path of the module around the first list, whose output every block of the second list reads;
    # None if there is only one list.
    memory: str | None = None
    border: int = 0  # Number of blocks in it; 0 without one
    # Number of entries after the hidden state in a block's output; None: a plain tensor; -1:
    # unknown, detected when a block is skipped.
    extra: int | None = -1
    # Paths of modules that run after the blocks but are registered before them.
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()  # Paths of modules that every stage keeps
    # Path, in a block, of a module that only the first block has, as in `gulliver.families.Blocks`.
    first_only: str | None = None
    # Name of the model's family; None if its blocks were named by the user or searched for.
    family: str | None = None

    def place(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self.blocks)}


def stack_of(
    model: nn.Module,
    path: str | None = None,
    *,
    extra: int | None = -1,
    after: Sequence[str] = (),
    everywhere: Sequence[str] = (),
) -> Stack:
    """Finds the blocks of a model.

    Args:
        model: full model; its parameters may be on meta.
        path: path of its list of blocks; None searches for it.
        extra: number of entries after the hidden state in a block's output; None for a plain
            tensor, -1 to detect it.
        after: paths of modules that run after the blocks but are registered before them.
        everywhere: paths of modules whose results every block uses.

    Returns:
        The blocks.

    Raises:
        GulliverError: there is no list of blocks, or no module at a path.
    """
    paths = dict(model.named_modules())
    for name in (*([path] if path is not None else []), *after, *everywhere):
        if name not in paths:
            raise GulliverError(f"the model has no module {name!r}")
    family = family_of(model)
    if path is None and family.blocks is not None:
        found = _of_record(model, paths, family.name, family.blocks)
        return replace(
            found,
            extra=found.extra if extra == -1 else extra,
            after=(*found.after, *after),
            everywhere=(*found.everywhere, *everywhere),
        )
    if path is None and isinstance(model, nn.Sequential):
        path = ""
    path = _longest(paths) if path is None else path
    inner = paths[path]
    if not isinstance(inner, nn.ModuleList | nn.Sequential):
        raise GulliverError(
            f"{path!r} is a {type(inner).__name__}: blocks must be in a ModuleList or a Sequential"
        )
    blocks = tuple(_join(path, child) for child, _ in inner.named_children())
    if isinstance(inner, nn.Sequential) and extra == -1:
        extra = None
    return Stack(blocks, (path,), extra=extra, after=tuple(after), everywhere=tuple(everywhere))


def _of_record(model: nn.Module, paths: dict[str, nn.Module], family: str, known: Blocks) -> Stack:
    _check_record(model, known)
    # A part of an encoder-decoder may be its own model.
    lists = [found for end in known.lists if (found := _ending(paths, end)) is not None]
    lists = lists or _encoder_and_decoder(model, paths, known) or [_longest(paths)]
    rows = [[_join(path, child) for child, _ in paths[path].named_children()] for path in lists]
    two = len(rows) > 1 and not known.interleaved
    turns = zip(*rows, strict=True) if known.interleaved else rows
    return Stack(
        tuple(block for turn in turns for block in turn),
        tuple(lists),
        memory=lists[0].rpartition(".")[0] if two else None,
        border=len(rows[0]) if two else 0,
        extra=known.extra,
        after=tuple(_all_ending(paths, known.after, lists)),
        everywhere=tuple(_all_ending(paths, known.everywhere, lists)),
        first_only=known.first_only,
        family=family,
    )


def _check_record(model: nn.Module, known: Blocks) -> None:
    if known.refused:
        raise GulliverError(
            f"{type_of(model)} does not support pipelines: {known.refused}; use tp_size instead of "
            "pp_size"
        )
    biases = {getattr(m, "has_relative_attention_bias", None) for m in model.modules()}
    if known.first_only is None and len(biases) > 2:
        raise GulliverError(
            f"{type(model).__name__} has blocks that share a bias computed by the first one: "
            "pipelines do not support it; use tp_size instead of pp_size"
        )


def _encoder_and_decoder(model: nn.Module, paths: dict[str, nn.Module], known: Blocks) -> list[str]:
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not known.encoders or not both:
        return []
    encoder = next((p for end in known.encoders if (p := _ending(paths, end)) is not None), None)
    decoder = None if encoder is None else encoder.replace("encoder.", "decoder.")
    if encoder is None or decoder not in paths:
        raise GulliverError(
            f"{type(model).__name__} is an encoder-decoder model, but lacks two lists of blocks "
            f"with known names ({', '.join(known.encoders)}): it does not support pipelines"
        )
    return [encoder, decoder]


def _ending(paths: dict[str, nn.Module], end: str) -> str | None:
    return next((p for p in paths if p == end or p.endswith(f".{end}")), None)


def _all_ending(
    paths: dict[str, nn.Module], ends: Sequence[str], lists: Sequence[str]
) -> Iterator[str]:
    inside = tuple(f"{path}." for path in lists)
    for end in ends:
        for path in paths:
            if (path == end or path.endswith(f".{end}")) and not path.startswith(inside):
                yield path


def _longest(paths: dict[str, nn.Module]) -> str:
    best, length = None, 1
    for path, module in paths.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) <= length:
            continue
        kinds = {type(block) for block in module}
        if len(kinds) == 1 and all(any(True for _ in b.parameters()) for b in module):
            best, length = path, len(module)
    # A list with this name may have blocks of several kinds.
    named = [p for p in paths if p.rpartition(".")[2] in LISTS and _many(paths[p])]
    if named and (best is None or best.startswith(f"{named[0]}.")):
        best = named[0]
    if best is None:
        raise GulliverError(
            "the model has no list of equal blocks to split: put them into an nn.ModuleList, or "
            "name the list (blocks=... of the plugin, path of stack_of)"
        )
    return best


LISTS = ("layers", "layer", "h", "blocks", "block")


def _many(module: nn.Module) -> bool:
    blocks = list(module.children())
    held = all(any(True for _ in block.parameters()) for block in blocks)
    return isinstance(module, nn.ModuleList) and len(blocks) > 1 and held


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child


@dataclass(frozen=True)
class Unit:
    """A module around the blocks that is kept or replaced as a unit."""

    path: str
    home: int | None  # Index of the block whose stage keeps it; None: every stage keeps it


@dataclass
class _Walk:
    model: nn.Module
    stack: Stack
    units: list[Unit] = field(default_factory=list)
    seen: int = 0

    def visit(self, path: str, module: nn.Module) -> None:
        if path in self.stack.lists:
            self.seen += 1
            return
        around = any(_inside(inner, path) for inner in self.stack.lists)
        if not around and not isinstance(module, nn.ModuleDict | nn.ModuleList):
            if any(True for _ in module.parameters()):
                self.units.append(Unit(path, self._home(path)))
            return
        for name, child in module.named_children():
            self.visit(_join(path, name), child)

    def _home(self, path: str) -> int | None:
        """Returns the block that a module is assigned to, by registration order."""
        # Modules before a list of blocks are assigned to its first block, those after it to its
        # last.
        stack, last = self.stack, len(self.stack.blocks) - 1
        if any(path == p or _inside(path, p) for p in stack.everywhere):
            return None
        if any(path == p or _inside(path, p) for p in stack.after):
            return last if not stack.memory or not _inside(path, stack.memory) else stack.border - 1
        if stack.memory is None:
            if self.seen == 0:
                return 0
            # If the blocks of two lists alternate, the position of modules between them is unknown.
            return last if self.seen == len(stack.lists) else None
        if _inside(path, stack.memory):
            return 0 if self.seen == 0 else stack.border - 1
        return (0, stack.border, last)[self.seen]


def units_of(model: nn.Module, stack: Stack) -> list[Unit]:
    walk = _Walk(model, stack)
    walk.visit("", model)
    return walk.units


def around(model: nn.Module, stack: Stack) -> list[str]:
    found = (path for path, _ in model.named_modules())
    return [p for p in found if p in stack.lists or any(_inside(i, p) for i in stack.lists)]


def _inside(path: str, outer: str) -> bool:
    return outer == "" or path == outer or path.startswith(f"{outer}.")


# Splits a model into stages: by the predicted cost of its blocks, or as the user specifies.
#
# The cost of a block is the forward work of its matrix products for one token, 2 FLOPs for each
# element of its weights. Modules around the blocks are added to the blocks that they are assigned
# to; embeddings cost nothing, the output head costs as much as any other weight. This ignores the
# products inside attention, which are equal for all blocks of a list, and different lengths in the
# two lists of an encoder-decoder; pass `costs` if these matter.


@dataclass(frozen=True)
class Cut:
    """An assignment of blocks to stages."""

    # Stage k has the blocks ``bounds[k]`` to ``bounds[k + 1] - 1``.
    bounds: tuple[int, ...]
    costs: tuple[float, ...]  # Cost of each block with its assigned modules, in any unit
    times: tuple[float, ...]  # Cost of each stage, in that unit
    lower: float  # Lower bound of the slowest stage's cost

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.bounds))

    def __str__(self) -> str:
        slowest, mean = max(self.times), sum(self.times) / len(self.times)
        imbalance = slowest / mean - 1 if mean else 0.0
        return (
            f"{' + '.join(map(str, self.sizes))} blocks, slowest stage {imbalance:.1%} above the "
            "mean"
        )


def block_costs(model: nn.Module, stack: Stack) -> list[float]:
    """Returns forward FLOPs per token of each block, including its assigned modules."""
    paths = dict(model.named_modules())
    costs = [_work(paths[path]) for path in stack.blocks]
    for unit in units_of(model, stack):
        if unit.home is not None:
            costs[unit.home] += _work(paths[unit.path])
    return costs


def _work(module: nn.Module) -> float:
    weights = 0
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            continue
        weights += sum(p.numel() for p in inner.parameters(recurse=False) if p.ndim > 1)
    return linear_flops(weights)


def cut(
    model: nn.Module,
    stack: Stack,
    stages: int,
    *,
    at: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Cut:
    """Assigns the blocks of a model to stages so that the slowest stage is as fast as possible.

    Args:
        model: full model; its parameters may be on meta.
        stack: blocks of the model.
        stages: number of stages: ranks of the pipeline times stages per rank.
        at: number of blocks of each stage, or the index of the first block of each stage except the
            first; None for the fastest split.
        costs: cost of each block, in any unit; None predicts them.
        speeds: relative speed of each stage's device; None for equal speeds.

    Returns:
        The assignment.

    Raises:
        GulliverError: there are fewer blocks than stages, or `at` does not cover all blocks.
    """
    count = len(stack.blocks)
    if count < stages:
        raise GulliverError(
            f"the model has {count} blocks ({', '.join(stack.lists) or 'its own'}), too few for "
            f"{stages} stages: use at most {count}"
        )
    known = list(costs) if costs is not None else block_costs(model, stack)
    if len(known) != count:
        raise GulliverError(f"costs has {len(known)} entries, but there are {count} blocks")
    if at is None:
        found = partition_chain(known, stages, speeds=speeds)
        return Cut(found.bounds, tuple(known), found.times, found.lower)
    bounds = _bounds(list(at), stages, count)
    times = chain_times(known, bounds, speeds)
    return Cut(bounds, tuple(known), times, partition_chain(known, stages, speeds=speeds).lower)


def _bounds(at: list[int], stages: int, count: int) -> tuple[int, ...]:
    sizes = [0, *itertools.accumulate(at)]
    given = sizes if len(at) == stages else [0, *at, count]
    steps = [b - a for a, b in itertools.pairwise(given)]
    if len(given) != stages + 1 or given[-1] != count or min(steps) < 1:
        raise GulliverError(
            f"cut={at} does not split {count} blocks into {stages} stages; pass the number of "
            f"blocks of each stage ({stages} numbers of at least 1 that add up to {count}), or the "
            "first block of each stage except the first"
        )
    return tuple(given)
