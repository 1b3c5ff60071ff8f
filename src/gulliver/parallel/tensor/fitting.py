"""Checks that the features of column layers match those of the next row layers.

Wrong styles can fit in shape and still give wrong results: blocks may be permuted, and complete
gradients may be summed. So before any change, column layers are paired with the row layers that
take their outputs, and each rank's intervals of features are compared.

The order in which modules run is unknown. Column layers are paired with the row layers of the
smallest module that has both. Layers outside of blocks are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from gulliver.errors import GulliverError
from gulliver.parallel.tensor.styles import STYLES, ShardedModule, head_groups, layer_of
from gulliver.precision.fp8.conversion import is_transposed


@dataclass(frozen=True)
class Choices:
    """The styles chosen so far, and properties of the model."""

    modules: Mapping[str, nn.Module]
    placed: Mapping[str, ShardedModule]  # Path to its sharding
    stacks: tuple[str, ...]  # Paths of the lists of blocks
    size: int
    # Maps a path to its style without the user's rule; None without a rule, or if unknown.
    known: Callable[[str], str | None]
    # Path and sharding of a layer to its sharding in whole heads.
    by_heads: Callable[[str, ShardedModule], ShardedModule]
    attention: Callable[[str], str]  # Maps a path to that of its attention module

    def shown(self, path: str) -> str:
        one = self.placed[path]
        ends = "inputs" if one.how.kind == "row" else "outputs"
        return f"{path} ({one.style!r}, {one.total} {ends})"

    def width(self, path: str) -> int:
        return self.placed[path].total // self.placed[path].how.blocks

    def block_of(self, path: str) -> str:
        """Returns the path of the block around a module; empty outside of blocks."""
        for stack in self.stacks:
            if path.startswith(f"{stack}."):
                number, _, inner = path[len(stack) + 1 :].partition(".")
                return f"{stack}.{number}" if inner else ""
        return ""


def check_fitting(choices: Choices) -> None:
    """Rejects styles whose result would differ from that of the unsharded model."""
    layers = {path: one for path, one in choices.placed.items() if not layer_of(path)[1]}
    columns = [p for p, one in layers.items() if one.how.kind == "column" and not one.how.gather]
    rows = [p for p, one in layers.items() if one.how.kind == "row" and not one.how.split]
    for path, one in layers.items():
        if one.how.kind == "summed":
            _check_summed(choices, path, columns)
        if choices.known(path) is not None:
            _check_known(choices, path)
    sites = list(_paired(choices, columns, rows))
    for site in sites:
        for part in site.parts(choices):
            part.check(choices)
    parents = {_site_of(column): column for site in sites for column in site.columns}
    for path in layers:
        _check_whole(choices, path, parents.get(_site_of(path)))
    done = {id(choices.modules[p]) for site in sites for p in (*site.columns, *site.rows)}
    _check_alone(
        choices,
        [p for p in columns if id(choices.modules[p]) not in done],
        [p for p in rows if id(choices.modules[p]) not in done],
    )


@dataclass(frozen=True)
class _Site:
    above: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    def parts(self, choices: Choices) -> list[_Site]:
        by_kind = [[], []]
        for row in self.rows:
            by_kind[choices.placed[row].how.heads].append(row)
        if not all(by_kind):
            return [self]
        return [
            _Site(
                self.above,
                tuple(c for c in self.columns if choices.placed[c].how.heads == heads),
                tuple(by_kind[heads]),
            )
            for heads in (False, True)
        ]

    def check(self, choices: Choices) -> None:
        members, placed = (*self.columns, *self.rows), choices.placed
        above = choices.modules[self.above]
        counted = "Attention" in type(above).__name__ and head_groups(above) > 0
        if counted or any(placed[path].how.heads for path in members):
            for path in members:
                self._check_heads(choices, path)
            if not self.columns:
                _refuse_row(choices, self.rows[0])
        else:
            self._check_features(choices)

    def _check_heads(self, choices: Choices, path: str) -> None:
        one, size = choices.placed[path], choices.size
        heads = choices.by_heads(path, one)
        whole = heads.total % (heads.units * one.how.blocks) == 0
        if not whole or any(one.runs(size, r) != heads.runs(size, r) for r in range(size)):
            kind = "row" if one.how.kind == "row" else "column"
            raise GulliverError(
                f"{choices.shown(path)} would be split within heads, next to "
                f"{self._others(choices, path)}: use '{kind} by heads'"
            )
        others = [column for column in self.columns if column != path]
        row = choices.placed[self.rows[0]].total
        # With keys and values in one layer, queries are in exactly one other.
        alone = len(others) == 1 and choices.placed[others[0]].how.blocks == 1
        if (one.how.blocks == 3 and one.total != 3 * row) or (
            one.how.blocks == 2 and not (alone and choices.width(path) <= row)
        ):
            self._refuse(choices, path, "column by heads")
        # Only within the attention do features belong to heads.
        inside = path.startswith(f"{choices.attention(path)}.")
        if one.how.kind == "column" and not inside and choices.width(path) != row:
            self._refuse(choices, path, "column, packed" if one.total == 2 * row else "column")

    def _check_features(self, choices: Choices) -> None:
        for column in self.columns:
            if not any(self._feeds(choices, column, row) for row in self.rows):
                total, wide = choices.placed[column].total, choices.placed[self.rows[0]].total
                right = {wide: "column", 2 * wide: "column, packed"}.get(total, "column, gathered")
                self._refuse(choices, column, right)
        for row in self.rows:
            if not any(self._feeds(choices, column, row) for column in self.columns):
                _refuse_row(choices, row)

    def _feeds(self, choices: Choices, column: str, row: str) -> bool:
        features, width = choices.placed[row].total, choices.width(column)
        if width == features:
            return True
        # Fewer heads: grouped keys and values next to queries.
        even = features % width == 0 and width % choices.size == 0
        beside = any(choices.width(other) == features for other in self.columns)
        return even and choices.placed[column].how.blocks == 1 and beside

    def _others(self, choices: Choices, path: str) -> str:
        return ", ".join(choices.shown(p) for p in (*self.columns, *self.rows) if p != path)

    def _refuse(self, choices: Choices, path: str, right: str) -> NoReturn:
        raise GulliverError(
            f"{choices.shown(path)} would give ranks features that do not match "
            f"{self._others(choices, path)}: use {right!r}, or 'replicate' for all of them"
        )


def _paired(choices: Choices, columns: list[str], rows: list[str]) -> Iterator[_Site]:
    """Pairs column and row layers in the smallest modules of a block that have both."""
    beneath: dict[str, list[str]] = {}
    for path in (*columns, *rows):
        above, block = path, choices.block_of(path)
        while above != block:
            above = above.rpartition(".")[0]
            beneath.setdefault(above, []).append(path)
    left, is_row = {*columns, *rows}, set(rows)
    for above in sorted(beneath, key=lambda p: p.count(".") + bool(p), reverse=True):
        inside = [path for path in beneath[above] if path in left]
        found = [p for p in inside if p not in is_row], [p for p in inside if p in is_row]
        if all(found):
            left.difference_update(inside)
            yield _Site(above, tuple(found[0]), tuple(found[1]))


def _check_alone(choices: Choices, columns: list[str], rows: list[str]) -> None:
    """Rejects column layers without row layers in a block, and vice versa."""
    in_blocks = [path for path in columns if choices.block_of(path)]
    past_blocks = [path for path in rows if not choices.block_of(path)]
    # Row layers after a list may take outputs of the list's members.
    apart = bool(in_blocks and past_blocks)
    for path in columns:
        if choices.placed[path].how.blocks > 1 or (path in in_blocks and not apart):
            raise GulliverError(
                f"{choices.shown(path)} has sharded outputs, but no row layer consumes them; use "
                "'column, gathered', or make the next layer 'row'"
            )
    for path in rows:
        if not (apart and path in past_blocks):
            _refuse_row(choices, path)


def _refuse_row(choices: Choices, row: str) -> NoReturn:
    raise GulliverError(
        f"{choices.shown(row)} takes sharded inputs, but no column layer provides them: use 'row, "
        "split', or make the previous layer 'column'"
    )


def _check_whole(choices: Choices, path: str, beside: str | None) -> None:
    """Rejects full outputs that a known model combines with sharded ones."""
    how, known = choices.placed[path].how, STYLES[choices.known(path) or "replicate"]
    if beside and (how.gather or how.split) and known.kind == "column" and not known.gather:
        raise GulliverError(
            f"{choices.shown(path)} has full outputs, but {choices.shown(beside)} has sharded "
            "ones: use the same style for both"
        )


def _check_known(choices: Choices, path: str) -> None:
    """Rejects a style with sharded outputs other than the one in a known model's plan."""
    name, one = choices.known(path), choices.placed[path]
    known = STYLES[name or "replicate"]
    if known.kind not in ("column", "row") or known.gather or known.split:
        return
    local = one.how.kind in ("column", "row") and not (one.how.gather or one.how.split)
    if local and (one.how.kind, one.how.blocks) != (known.kind, known.blocks):
        raise GulliverError(
            f"{choices.shown(path)} is {name!r} in this model's plan, and its code requires that; "
            "use it, or use 'replicate' or gathered outputs for the entire parent module"
        )


def _check_summed(choices: Choices, path: str, columns: Iterable[str]) -> None:
    """Rejects the style 'summed' for gradients that are complete on every rank."""
    known = choices.known(path) or "replicate"
    if known == "summed":
        return
    module = choices.modules[path]
    sizes = {
        p.shape[0 if is_transposed(module) else -1]
        for p in module._parameters.values()
        if p is not None and p.dim()
    }
    around = [column for column in columns if f"{path}.".startswith(_site_of(column))]
    # Norms of heads have the width of a head, those of hidden states the width of the columns'
    # input.
    partial = known == "replicate" and around
    if partial and not any(_inputs(choices.modules[column]) in sizes for column in around):
        return
    raise GulliverError(
        f"{path} is 'summed', but its gradients are complete on every rank and would be counted "
        "several times: use 'replicate'"
    )


def _site_of(path: str) -> str:
    parent = layer_of(path)[0].rpartition(".")[0]
    return f"{parent}." if parent else ""


def _inputs(column: nn.Module) -> int:
    weight = column._parameters["weight"]
    assert weight is not None
    return weight.shape[0 if is_transposed(column) else 1]
