"""Activations that wait for their backward in host memory, last in, first out.

A backward uses what its forward saved in the reverse order. So nothing has to be learned or
guessed, as a `Manager` does of state that comes in every step: what a block saved leaves while the
blocks after it run, and comes back while those are in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory._host import Copier, HostStore
from gulliver.memory._pages import page_aligned
from gulliver.memory._placed import Placed, Where, typed
from gulliver.memory._stores import whole_pages
from gulliver.options import size_text


# [Note: two blocks] On the device there is what one block has saved, or needs now, and what one
# other has on its way. Copies of a block are given up one by one as the next one that moves saves
# its own: the blocks between have hidden their way, and if not, it is waited for. What the last one
# saved is still there when backward begins. When the first of a block's activations is used, those
# of the block before are sent for.
#
# Copies are queued on streams of their own; see [Note: order of copies] in `_host.py`. What a step
# leaves behind lies in the host's memory until it is discarded.
class HostArena(HostStore):
    """Host memory in one piece, whose pages are locked when it is first used."""
    # Slabs, of which objects share none, would leave up to half of themselves free where objects
    # are as large as activations are.

    def __init__(self, capacity: int, device: torch.device, copier: Copier | None = None) -> None:
        super().__init__(whole_pages(capacity), device, copier)

    def close(self) -> None:
        """Ends what is under way, and unlocks the pages."""
        slabs = list(self._slabs)
        super().close()
        for slab in slabs:
            self._copier.unlock_pages(slab)

    def _add_slab(self, size: int) -> None:
        if self._slabs or size > self.capacity:
            raise GulliverError(
                f"the {size_text(self.capacity)} of host memory for activations are full: "
                f"{size_text(size)} more do not fit"
            )
        slab = page_aligned(self.capacity)
        self._copier.lock_pages(slab)
        self._extents.add(0, self.capacity)
        self._starts.append(0)
        self._slabs.append(slab)
        self.pinned = self.capacity


class ActivationStack:
    """Keeps activations of an `ActivationOffload` in host memory."""

    def __init__(self, store: HostStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self.held = self.most = 0
        self._number = self._block = self._room = 0
        self._blocks: dict[int, list[Placed]] = {}
        self._block_of: dict[int, int] = {}
        self._here: dict[int, Placed] = {}
        self._new, self._used = set[int](), set[int]()
        self._coming = -1

    def begin(self) -> None:
        """Is told that another block is about to save."""
        own = sum(placed.nbytes for placed in self._blocks.get(self._block, ()))
        self._room = max(self._room, own)
        self._block += 1

    def leave(self) -> None:
        """Gives up what is on the device and in no use, such as at the end of a step."""
        for number, placed in list(self._here.items()):
            self._give_up_unused(number, placed)
        self._room = 0
        self._block += 1

    def add(self, name: str, kind: str, numel: int, dtype: torch.dtype) -> Placed:
        """Takes a new object."""
        placed = Placed(name, kind, numel, dtype, number=self._number)
        placed.offset = self.store.allocate(placed.nbytes)
        self._number += 1
        return placed

    def use(self, placed: Placed, write: bool = False, fresh: bool = False) -> Tensor:
        """Brings an object, and keeps it until `done`; a fresh one is new memory to be filled."""
        if fresh:
            self._make_room(placed.nbytes)
            self._hold(placed, Where.HERE)
            self._new.add(placed.number)
            self._blocks.setdefault(self._block, []).append(placed)
            self._block_of[placed.number] = self._block
        else:
            self._used.add(placed.number)
            self._fetch(placed)
            if placed.where is Where.LEAVING:
                placed.enter(Where.HERE)  # its memory may be read while it is copied
            elif placed.where is Where.ARRIVING:
                self._settle(placed)
            self._send_for(self._block_of[placed.number])
        assert placed.tensor is not None
        return placed.tensor

    def done(self, placed: Placed) -> None:
        """Ends a use; what was filled leaves."""
        self._used.discard(placed.number)
        if placed.number in self._new:
            self._new.remove(placed.number)
            assert placed.memory is not None
            assert placed.offset is not None
            placed.transfer = self.store.write(placed.offset, placed.memory)
            placed.enter(Where.LEAVING)

    def discard(self, placed: Placed) -> None:
        """Forgets the content of an object."""
        self._used.discard(placed.number)
        self._give_up(placed)
        number = self._block_of.pop(placed.number, None)
        if number is not None:
            self._blocks[number].remove(placed)
            if not self._blocks[number]:
                del self._blocks[number]

    def remove(self, placed: Placed) -> None:
        """Forgets an object that has no content."""
        assert placed.offset is not None
        self.store.free(placed.offset, placed.nbytes)

    def view(self, placed: Placed) -> Tensor:
        """Shows the content of an object in host memory."""
        assert placed.offset is not None
        return typed(self.store.mapped(placed.offset, placed.nbytes), placed.nbytes, placed.dtype)

    def _make_room(self, size: int) -> None:
        """Gives up the oldest copies, until what a block saves fits; its own stay."""
        for number, placed in list(self._here.items()):
            if self.held + size <= self._room or self._block_of[number] == self._block:
                return
            self._give_up_unused(number, placed)

    def _give_up_unused(self, number: int, placed: Placed) -> None:
        if number not in self._new and number not in self._used:
            self._give_up(placed)

    def _hold(self, placed: Placed, where: Where) -> Tensor:
        """Takes memory of the device for an object."""
        placed.memory = torch.empty(placed.nbytes, dtype=torch.uint8, device=self.device)
        placed.enter(Where.QUEUED)
        placed.enter(where)
        self._here[placed.number] = placed
        self.held += placed.nbytes
        # Most of these so far.
        self.most = max(self.most, self.held)
        return placed.memory

    def _fetch(self, placed: Placed) -> None:
        if placed.where is Where.AWAY:
            assert placed.offset is not None
            placed.transfer = self.store.read(placed.offset, self._hold(placed, Where.ARRIVING))

    def _send_for(self, block: int) -> None:
        """Sends for what is left of a block, and for the one that backward uses next."""
        if block == self._coming:
            return
        self._coming = block
        before = max((number for number in self._blocks if number < block), default=block)
        for number in dict.fromkeys((block, before)):
            for placed in reversed(self._blocks[number]):
                self._fetch(placed)

    def _settle(self, placed: Placed) -> None:
        """Lets what is computed from now on wait for a copy that is under way."""
        if placed.transfer is not None:
            placed.transfer.wait()
            placed.transfer = None
        if placed.where is not Where.HERE:
            placed.enter(Where.HERE)

    def _give_up(self, placed: Placed) -> None:
        """Frees an object's memory on the device."""
        if placed.where is not Where.AWAY:
            self._settle(placed)
            placed.enter(Where.AWAY)
            placed.memory = None
            del self._here[placed.number]
            self.held -= placed.nbytes
