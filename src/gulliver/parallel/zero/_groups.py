"""The groups of a sharded optimizer: their options may change, their members may not.

Steps use the pieces that belong to the members at boost, so moving one elsewhere means nothing.
Options have to be the same on all ranks, since each steps its shards with its own. Both are checked
in the vote that comes before every step anyway, see `reduce.py`: a few bytes more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Number
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import Group, gather_objects
from gulliver.errors import GulliverError, first_difference
from gulliver.memory import ShardPiece
from gulliver.parallel.zero._sharded import ShardedChunk

DIGEST = 8
"""Bytes that stand for all options."""

MOVED = (
    "param_groups have other parameters than at boost: set groups up before it; afterwards only "
    "their options may change (lr = 0 stops a group)"
)


class OptimizerGroups:
    """The groups of the user's optimizer, over the ranks that step shards of the same parameters.

    Between steps they show the model's parameters, where users look and write; a step shows them
    this rank's pieces.
    """

    def __init__(self, inner: torch.optim.Optimizer, group: Group) -> None:
        self._inner, self._group = inner, group
        self.given = [list(group["params"]) for group in inner.param_groups]
        # Names of the trained parameters of each group.
        self.names: list[list[str]] = []
        self._number_of: dict[str, int] = {}
        self._members: list[list[Any]] = []
        self._pieces: list[list[nn.Parameter]] = []
        self._by_chunk: list[list[list[nn.Parameter]]] = []

    def list_members(self, names: Mapping[nn.Parameter, str]) -> None:
        """Lists the trained parameters, of these names, of each group."""
        self.names = [[names[p] for p in found if p in names] for found in self.given]
        self._number_of = {name: n for n, found in enumerate(self.names) for name in found}

    def of(self, name: str) -> dict[str, Any]:
        """The group that a trained parameter is in."""
        return self._inner.param_groups[self._number_of[name]]

    def alike(self, names: Collection[str], pieces: Iterable[ShardPiece]) -> list[ShardPiece]:
        """The pieces whose parameters are in the groups of these names."""
        numbers = {self._number_of[name] for name in names}
        return [piece for piece in pieces if self._number_of[piece.name] in numbers]

    def list_pieces(self, chunks: Sequence[ShardedChunk]) -> None:
        """Makes the lists of pieces that the groups are given, once for all steps."""
        mine = {piece.name: owned for c in chunks for piece, owned in c.pieces}
        self._pieces = [[mine[n] for n in names if n in mine] for names in self.names]
        self._by_chunk = []
        for sharded in chunks:
            here = {piece.name: owned for piece, owned in sharded.pieces}
            self._by_chunk.append([[here[n] for n in m if n in here] for m in self.names])
        self.show_parameters()
        self._members = [list(group["params"]) for group in self._inner.param_groups]

    def show_pieces(self, number: int | None = None) -> None:
        """Puts this rank's pieces of one chunk, or of all, into the groups."""
        self._show(self._pieces if number is None else self._by_chunk[number])

    def show_parameters(self) -> None:
        """Puts the model's parameters into the groups."""
        # A write to a piece would be known on one rank only, and race with its gather.
        self._show(self.given)

    def _show(self, members: Sequence[Sequence[nn.Parameter]]) -> None:
        for group, found in zip(self._inner.param_groups, members, strict=True):
            group["params"] = list(found)

    def capturing(self) -> set[Tensor]:
        """Pieces whose counters kernels read: torch wants them on the parameter's device."""
        return {
            owned
            for group, pieces in zip(self._inner.param_groups, self._pieces, strict=True)
            for owned in pieces
            if group.get("capturable") or group.get("fused")
        }

    def is_moved(self) -> bool:
        """Whether the groups have other members; options and the lists themselves may be new."""
        groups = self._inner.param_groups
        return len(groups) != len(self._members) or any(
            len(group["params"]) != len(members) or not all(map(is_, group["params"], members))
            for group, members in zip(groups, self._members, strict=True)
        )

    def check_members(self) -> None:
        """Refuses groups with other members, on this rank."""
        if self.is_moved():
            raise GulliverError(MOVED)

    def votes(self) -> list[int]:
        """Input of this rank to a max all-reduce: bytes."""
        moved = self.is_moved()
        # Of a byte and its complement both largest are this rank's only if all ranks have it.
        digest = hashlib.sha256(repr([] if moved else self.options()).encode()).digest()[:DIGEST]
        return [moved, *digest, *(255 - byte for byte in digest)]

    def check_votes(self, votes: Sequence[int]) -> None:
        """Refuses, on all ranks alike, what the vote has shown."""
        moved, digest, complement = votes[0], votes[1 : DIGEST + 1], votes[DIGEST + 1 :]
        if moved:
            raise GulliverError(MOVED)
        if any(a + b != 255 for a, b in zip(digest, complement, strict=True)):
            raise GulliverError(_difference(gather_objects(self.options(), self._group)))

    def options(self) -> dict[str, str]:
        """The numbers among the options, by name and group."""
        # Options on a device are left out: the host would have to wait for them.
        known = self._inner.defaults
        return {
            f"{key} of the optimizer's group {number}": repr(_numbers(value))
            for number, group in enumerate(self._inner.param_groups)
            for key, value in group.items()
            if key in known
        }


def first_change(then: dict[str, str], now: dict[str, str]) -> tuple[str, str, str] | None:
    """The first option of which two reports differ, with both values."""
    for name in then | now:
        if then.get(name) != now.get(name):
            return name, str(then.get(name)), str(now.get(name))
    return None


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return [_numbers(entry) for entry in value]
    return value if isinstance(value, Number) else None


def _difference(every: Sequence[dict[str, str]]) -> str:
    found = first_difference(every)
    if found is None:
        return "the options of the optimizer differ between ranks: set the same on all"
    rank, name, first, other = found
    return (
        f"{name} is {first} on rank 0 and {other} on rank {rank}: give schedulers the same "
        "numbers on all ranks, such as a loss averaged over them"
    )


def gradient_was_set(foreign: Sequence[str]) -> GulliverError:
    """The refusal of gradients of these names, or of another rank's, that backward did not make."""
    whose = f"the gradient of {foreign[0]!r}" if foreign else "a gradient on another rank"
    return GulliverError(
        f"{whose} was set: the optimizer steps what backward has reduced to the shards, and "
        "setting .grad is not supported with ZeRO: change the loss, or register_hook on the "
        "parameter"
    )
