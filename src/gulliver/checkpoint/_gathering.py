"""Gathers tensors of which ranks hold parts on rank 0, run by run.

`on_gathered` is all that others call. The first rank reads `GatheredWeights` as it would read
files, in an order that it announces; the others go through the same order, and send what they have
of each run of elements. No rank ever has more than a batch of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint._fits import fitted
from gulliver.checkpoint._image import CODES
from gulliver.checkpoint._manifest import PartEntry, tensor_from_json
from gulliver.checkpoint._matching import merge_parts
from gulliver.checkpoint._regions import Copies, PartPlace, copy_bytes, overlap, place_of
from gulliver.checkpoint._tree import Leaf
from gulliver.checkpoint._weights import TensorInfo, Weights
from gulliver.comm import (
    broadcast_object,
    gather_objects,
    guard,
    host_rank_group,
    post,
    return_rank_group,
    together,
)
from gulliver.errors import GulliverError
from gulliver.io import FileMappings
from gulliver.memory import Part

TAG = 310
"""Tag of messages with elements."""
Run = tuple[str, int, int]
"""Name of a tensor, first element of a run and one past the last."""


class GatheredWeights(Weights):
    """Tensors that lie with all ranks; every rank makes one."""

    # The first rank calls `read`, after `announce`, and `drain` in the end, whatever happened. The
    # others call `serve`.

    def __init__(
        self, leaves: Mapping[str, Leaf], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self.path, self.files = Path(), []
        # What travels is in host memory.
        self.ranks = host_rank_group(None, "checkpoint")
        self.rank, self._group = self.ranks.rank, self.ranks.process_group
        self._leaves = dict(leaves)
        dtypes = dtypes or {}
        found = {n: _described(leaf, self.rank, dtypes.get(n)) for n, leaf in leaves.items()}
        merged = merge_parts(_first_of_alike(gather_objects(found, self._group)))
        self._entries = {name: tensor_from_json(entry) for name, entry in merged.items()}
        self.infos = {name: TensorInfo(e.dtype, e.shape) for name, e in self._entries.items()}
        self._order: deque[Run] | None = None
        self._flat: tuple[str, Tensor] | None = None
        self._mapped = FileMappings()

    def announce(self, runs: Iterable[Run]) -> None:
        """Tells the others what will be read, and in which order; once."""
        assert self._order is None, "the order is announced once"
        # One message for the whole order instead of one for each run: the ranks then send without
        # being asked.
        self._order = deque(broadcast_object(list(runs), 0, self._group))

    def read(self, wanted: Mapping[str, Part]) -> None:
        arriving: list[tuple[Tensor, Tensor, Copies]] = []
        incoming: list[tuple[int, Tensor]] = []
        for name, part in wanted.items():
            assert part.region is None, "what is gathered is counted in the whole"
            assert self._order, "all that is read was announced"
            assert self._order.popleft() == (name, part.start, part.stop), "in that order"
            for rank, copies in self._sources((name, part.start, part.stop)):
                # One run comes straight to where it belongs; what is strided takes a detour.
                row = part.value[int(copies.target[0]) :][: copies.total]
                if len(copies) > 1:
                    row = torch.empty(copies.total, dtype=row.dtype)
                    arriving.append((part.value, row, copies.packed()[1]))
                if rank == self.rank:
                    row.copy_(self._row(name, copies))
                    self._let_go(copies)
                else:
                    incoming.append((self.ranks.ranks[rank], row))
        post(incoming, [], self._group, TAG).wait()
        for value, row, copies in arriving:
            scaled = copies.scaled(value.itemsize)
            copy_bytes(value.view(torch.uint8), row.view(torch.uint8), scaled)

    def _sources(self, run: Run) -> Iterator[tuple[int, Copies]]:
        """Yields ranks that have elements of a run, and where: copies from their part to it."""
        name, start, stop = run
        entry = self._entries[name]
        for part in entry.parts:
            copies = overlap(part.place(entry.shape), PartPlace(entry.shape, start, stop))
            if len(copies):
                yield int(part.file), copies

    def _row(self, name: str, copies: Copies) -> Tensor:
        """Returns elements that this rank has, without gaps, in host memory, as they travel."""
        if self._flat is None or self._flat[0] != name:
            leaf = self._leaves[name]
            value = (leaf.value if isinstance(leaf, Part) else leaf).detach()
            # Kept for the next run: flattening what is not contiguous copies it.
            self._flat = name, value.resolve_conj().resolve_neg().reshape(-1)
        flat = self._flat[1]
        if len(copies) == 1:
            return self._fitted(name, flat[int(copies.source[0]) :][: copies.total].cpu())
        row = torch.empty(copies.total, dtype=flat.dtype)
        scaled = copies.packed()[0].scaled(row.itemsize)
        copy_bytes(row.view(torch.uint8), flat.cpu().view(torch.uint8), scaled)
        return self._fitted(name, row)

    def _fitted(self, name: str, row: Tensor) -> Tensor:
        return fitted(f"rank {self.rank}", name, row, self._entries[name].dtype)

    def _let_go(self, copies: Copies) -> None:
        """Gives back what was read for a run from a file that is mapped."""
        assert self._flat is not None
        last = int(copies.source[-1] + copies.count[-1])
        used = self._flat[1][int(copies.source[0]) : last]
        self._mapped.let_go(used.data_ptr(), used.nbytes if used.is_cpu else 0)

    def drain(self) -> None:
        """Receives what is still in flight: the others wait for that."""
        if self._order is None:
            self.announce([])
        while self._order:
            name, start, stop = self._order[0]
            scratch = torch.empty(stop - start, dtype=self._entries[name].dtype)
            self.read({name: Part(scratch, self._entries[name].shape, start)})

    def serve(self) -> None:
        """Sends what this rank has of the tensors that the first reads."""
        for run in broadcast_object([], 0, self._group):
            for rank, copies in self._sources(run):
                if rank == self.rank:
                    row = self._row(run[0], copies)
                    post([], [(self.ranks.ranks[0], row)], self._group, TAG).wait()
                    self._let_go(copies)

    def agreed(self, failure: Exception | None) -> str | None:
        """Tells all ranks why the first one failed, None if it did not; every rank calls it."""
        reason = None if failure is None else str(failure) or type(failure).__name__
        return broadcast_object(reason, 0, self._group)

    def close(self) -> None:
        self._flat = None


def _first_of_alike(
    every: list[dict[str, tuple[bool, dict[str, Any]]]],
) -> Iterator[dict[str, dict[str, Any]]]:
    """Leaves of tensors that are alike wherever they are those of the first rank that has them."""
    seen: set[str] = set()
    for found in every:
        yield {
            name: entry if is_part or name not in seen else {**entry, "parts": []}
            for name, (is_part, entry) in found.items()
        }
        seen.update(found)


def _described(leaf: Leaf, rank: int, dtype: torch.dtype | None) -> tuple[bool, dict[str, Any]]:
    """Describes a leaf: whether it is a `Part`, and its manifest entry, with rank for file."""
    place, own = place_of(leaf), leaf.value.dtype if isinstance(leaf, Part) else leaf.dtype
    part = PartEntry(str(rank), place.start, place.stop, place.region)
    dtype = dtype if dtype is not None and own.is_floating_point else own
    # What cannot be held is refused later, where all ranks learn of it.
    code = CODES.get(dtype, str(dtype))
    return isinstance(leaf, Part), {
        "dtype": code,
        "shape": list(place.shape),
        "parts": [part.to_json()],
    }


def on_gathered(
    leaves: Mapping[str, Leaf],
    use: Callable[[GatheredWeights], None],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Lets rank 0 use tensors that lie with all ranks; every rank calls it."""
    failure: Exception | None = None
    with guard(), GatheredWeights(leaves, dtypes) as weights:
        # A rank that cannot send what it has would leave the first waiting: the error is sent.
        with together():
            if weights.rank == 0:
                try:
                    use(weights)
                except Exception as error:
                    failure = error
                weights.drain()
            else:
                weights.serve()
            reason = weights.agreed(failure)
        return_rank_group(weights.ranks)
    if failure is not None:
        raise failure
    if reason is not None:
        raise GulliverError(f"rank 0 failed: {reason}")
