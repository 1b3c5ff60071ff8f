"""Gathers tensors of which ranks hold parts, as whole ones on rank 0: one after the other.

`on_gathered` is all that others call. The first rank reads `GatheredWeights` as it would read
files, in an order that it announces; the others go through the same order, and send what they have
of each tensor. No rank ever has more than one tensor whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.checkpoint._image import CODES, DTYPES
from gulliver.checkpoint._manifest import PartEntry, TensorEntry, tensor_from_json
from gulliver.checkpoint._regions import Place, copy_bytes, overlap, place_of
from gulliver.checkpoint._tree import Leaf
from gulliver.checkpoint._weights import TensorInfo, Weights
from gulliver.comm import broadcast_object, gather_objects, group_rank, group_size
from gulliver.errors import GulliverError
from gulliver.memory import Part


class GatheredWeights(Weights):
    """Tensors that lie with all ranks; every rank makes one.

    The first rank calls `read`, after `announce`, and `drain` in the end, whatever happened. The
    others call `serve`.

    Args:
        leaves: tensors and parts that this rank has, by name. What is no `Part` is taken from the
            first rank that has it; parts of all ranks make up the others.
        dtypes: dtypes that floating-point tensors of this rank are converted to, by name.

    Raises:
        GulliverError: parts are missing or there twice; on every rank.
    """

    def __init__(
        self, leaves: Mapping[str, Leaf], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self.path, self.files = Path(), []
        self.rank = group_rank()
        self._group: Any = None
        self._own_group = False
        if group_size() > 1 and dist.get_backend() != "gloo":
            # What goes round is in host memory.
            self._group, self._own_group = dist.new_group(backend="gloo"), True
        self._leaves = dict(leaves)
        dtypes = dtypes or {}
        found = {n: _described(leaf, self.rank, dtypes.get(n)) for n, leaf in leaves.items()}
        self._entries = _merged(gather_objects(found, self._group))
        self.infos = {name: TensorInfo(e.dtype, e.shape) for name, e in self._entries.items()}
        self._order: deque[str] | None = None
        self._now: tuple[str, Tensor] | None = None

    def announce(self, names: Iterable[str]) -> None:
        """Tells the others what will be read, and in which order; once."""
        assert self._order is None, "the order is announced once"
        self._order = deque(broadcast_object(list(names), 0, self._group))

    def read(self, wanted: Mapping[str, Part]) -> None:
        for name, part in wanted.items():
            assert part.region is None, "what is gathered is read whole"
            while self._now is None or self._now[0] != name:
                self._receive()
            part.value.copy_(self._now[1][part.start : part.stop])

    def _receive(self) -> None:
        """Receives the next tensor of the order, as a row of elements in host memory."""
        assert self._order, f"{self._now and self._now[0]} is the last tensor that was announced"
        name = self._order.popleft()
        entry = self._entries[name]
        self._now = None
        whole = torch.empty(entry.numel, dtype=entry.dtype)
        for part in entry.parts:
            place = part.place(entry.shape)
            if not place.numel:
                continue
            if int(part.file) == self.rank:
                row = self._row(name)
            else:
                row = torch.empty(place.numel, dtype=entry.dtype).view(torch.uint8)
                dist.recv(row, group=self._group, group_src=int(part.file))
            copies = overlap(place, Place(entry.shape, 0, entry.numel))
            copy_bytes(whole.view(torch.uint8), row, copies.scaled(entry.dtype.itemsize))
        self._now = name, whole

    def _row(self, name: str) -> Tensor:
        """Returns what this rank has of a tensor, as bytes (uint8) in host memory."""
        leaf = self._leaves[name]
        value = (leaf.value if isinstance(leaf, Part) else leaf).detach()
        value = value.to("cpu", self._entries[name].dtype).resolve_conj().resolve_neg()
        return value.contiguous().reshape(-1).view(torch.uint8)

    def drain(self) -> None:
        """Receives what is still under way: the others wait for that."""
        if self._order is None:
            self.announce([])
        while self._order:
            self._receive()
        self._now = None

    def serve(self) -> None:
        """Sends what this rank has of the tensors that the first reads."""
        for name in broadcast_object([], 0, self._group):
            for part in self._entries[name].parts:
                if int(part.file) == self.rank and part.stop > part.start:
                    dist.send(self._row(name), group=self._group, group_dst=0)

    def agreed(self, failure: Exception | None) -> str | None:
        """Tells all ranks why the first one failed, None if it did not; every rank calls it."""
        reason = None if failure is None else str(failure) or type(failure).__name__
        return broadcast_object(reason, 0, self._group)

    def close(self) -> None:
        self._now = None
        if self._own_group:
            dist.destroy_process_group(self._group)
            self._own_group = False


def _described(leaf: Leaf, rank: int, dtype: torch.dtype | None) -> tuple[bool, dict[str, Any]]:
    """Describes a leaf: whether it is a `Part`, and its manifest entry, with rank for file."""
    place, own = place_of(leaf), leaf.value.dtype if isinstance(leaf, Part) else leaf.dtype
    part = PartEntry(str(rank), place.start, place.stop, place.region)
    dtype = dtype if dtype is not None and own.is_floating_point else own
    # What cannot be is told where all ranks learn of it.
    code = CODES.get(dtype, str(dtype))
    return isinstance(leaf, Part), {
        "dtype": code,
        "shape": list(place.shape),
        "parts": [part.to_json()],
    }


def _merged(every: list[dict[str, tuple[bool, dict[str, Any]]]]) -> dict[str, TensorEntry]:
    """Merges what all ranks have into one entry a tensor, in the order in which ranks name them."""
    merged: dict[str, dict[str, Any]] = {}
    for found in every:
        for name, (is_part, entry) in found.items():
            known = merged.setdefault(name, {**entry, "parts": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise GulliverError(f"{name} has another shape or dtype on each rank")
            if is_part or not known["parts"]:
                known["parts"] = known["parts"] + entry["parts"]
    entries = {}
    for name, entry in merged.items():
        if entry["dtype"] not in DTYPES:
            raise GulliverError(f"{name} is {entry['dtype']}: safetensors cannot hold it")
        try:
            entries[name] = tensor_from_json(entry)
        except ValueError as error:
            raise GulliverError(f"{name} {error}: do all ranks save the same model?") from error
    return entries


def on_gathered(
    leaves: Mapping[str, Leaf],
    use: Callable[[GatheredWeights], None],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Lets rank 0 use tensors that lie with all ranks; every rank calls it.

    Args:
        leaves: tensors and parts that this rank has; see `GatheredWeights`.
        use: function called on rank 0, with weights that read one tensor after the other.
        dtypes: dtypes that floating-point tensors of this rank are converted to, by name.

    Raises:
        Exception: `use` raised it, on rank 0.
        GulliverError: rank 0 failed, on the other ranks.
    """
    failure: Exception | None = None
    with GatheredWeights(leaves, dtypes) as weights:
        if weights.rank == 0:
            try:
                use(weights)
            except Exception as error:
                failure = error
            weights.drain()
        else:
            weights.serve()
        reason = weights.agreed(failure)
    if failure is not None:
        raise failure
    if reason is not None:
        raise GulliverError(f"rank 0 failed: {reason}")
