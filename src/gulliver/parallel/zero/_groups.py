"""Watches the groups of a sharded optimizer: their options may change, their members may not.

The groups show this rank's pieces, not the parameters, so moving one elsewhere means nothing. What
the options say has to be the same on all ranks, since each steps its shards with its own.

Both are asked in the vote that comes before every step anyway, see `_reducer.py`: a few bytes more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from numbers import Number
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import Group, gather_objects
from gulliver.errors import GulliverError, first_difference

DIGEST = 8
"""Bytes that stand for all options."""

MOVED = (
    "param_groups have other parameters than at boost: set groups up before it; afterwards only "
    "their options may change (lr = 0 stops a group)"
)


class GroupWatch:
    """Compares the optimizer's groups with what was put into them, and with those of other ranks.

    Args:
        inner: the user's optimizer.
        group: process group of the ranks that step shards of the same parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, group: Group) -> None:
        self._inner, self._group = inner, group
        self._members: list[list[Any]] = []

    def remember(self) -> None:
        """Takes the members of the groups as those that they have to have."""
        self._members = [list(group["params"]) for group in self._inner.param_groups]

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
        """This rank's part of a vote that takes the largest of each number: bytes."""
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
