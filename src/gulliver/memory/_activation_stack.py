"""Activations that wait for their backward in host memory, last in, first out.

A backward uses what its forward saved in the reverse order. So nothing has to be learned or
guessed, as a `Manager` does of state that comes in every step: what a block saved leaves while the
blocks after it run, and comes back while those are in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory._host import HostStore
from gulliver.memory._pages import page_aligned
from gulliver.memory._placed import ManagedTensor, Residency, typed
from gulliver.memory._stores import whole_pages
from gulliver.memory._streams import Copier
from gulliver.options import size_text


# [Note: two blocks] On the device there is what one block has saved, or needs now, and what one
# other has on its way. Copies of a block are given up one by one as the next one that moves saves
# its own: the blocks between have hidden their way, and if not, it is waited for. What the last one
# saved is still there when backward begins. When the first of a block's activations is used, those
# of the block before are sent for.
#
# Copies are queued on streams of their own; see [Note: order of copies] in `streams.py`. What a
# step leaves behind lies in the host's memory until it is discarded.
class HostArena(HostStore):
    """Host memory in one piece, whose pages are locked when it is first used."""

    # Slabs, of which objects share none, would leave up to half of themselves free where objects
    # are as large as activations are.

    def __init__(self, capacity: int, device: torch.device, copier: Copier | None = None) -> None:
        super().__init__(whole_pages(capacity), device, copier)

    def close(self) -> None:
        """Waits for transfers in flight, and unlocks the pages."""
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
        self._blocks: dict[int, list[ManagedTensor]] = {}
        self._block_of: dict[int, int] = {}
        self._here: dict[int, ManagedTensor] = {}
        self._new, self._used = set[int](), set[int]()
        self._coming = -1

    def begin(self) -> None:
        """Another block is about to save."""
        own = sum(managed.nbytes for managed in self._blocks.get(self._block, ()))
        self._room = max(self._room, own)
        self._block += 1

    def leave(self) -> None:
        """Gives up what is on the device and in no use, such as at the end of a step."""
        for number, managed in list(self._here.items()):
            self._give_up_unused(number, managed)
        self._room = 0
        self._block += 1

    def add(self, name: str, kind: str, numel: int, dtype: torch.dtype) -> ManagedTensor:
        """Takes a new object."""
        managed = ManagedTensor(name, kind, numel, dtype, number=self._number)
        managed.offset = self.store.allocate(managed.nbytes)
        self._number += 1
        return managed

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor:
        """Brings an object, and keeps it until `done`; a fresh one is new memory to be filled."""
        if fresh:
            self._make_room(managed.nbytes)
            self._hold(managed, Residency.HERE)
            self._new.add(managed.number)
            self._blocks.setdefault(self._block, []).append(managed)
            self._block_of[managed.number] = self._block
        else:
            self._used.add(managed.number)
            self._fetch(managed)
            if managed.residency is Residency.LEAVING:
                managed.enter(Residency.HERE)  # its memory may be read while it is copied
            elif managed.residency is Residency.ARRIVING:
                self._settle(managed)
            self._send_for(self._block_of[managed.number])
        assert managed.tensor is not None
        return managed.tensor

    def done(self, managed: ManagedTensor) -> None:
        """Ends a use; what was filled leaves."""
        self._used.discard(managed.number)
        if managed.number in self._new:
            self._new.remove(managed.number)
            assert managed.memory is not None
            assert managed.offset is not None
            managed.transfer = self.store.write(managed.offset, managed.memory)
            managed.enter(Residency.LEAVING)

    def discard(self, managed: ManagedTensor) -> None:
        """Forgets the content of an object."""
        self._used.discard(managed.number)
        self._give_up(managed)
        number = self._block_of.pop(managed.number, None)
        if number is not None:
            self._blocks[number].remove(managed)
            if not self._blocks[number]:
                del self._blocks[number]

    def remove(self, managed: ManagedTensor) -> None:
        """Forgets an object that has no content."""
        assert managed.offset is not None
        self.store.free(managed.offset, managed.nbytes)

    def view(self, managed: ManagedTensor) -> Tensor:
        """Shows the content of an object in host memory."""
        assert managed.offset is not None
        return typed(
            self.store.mapped(managed.offset, managed.nbytes), managed.nbytes, managed.dtype
        )

    def _make_room(self, size: int) -> None:
        """Gives up the oldest copies, until what a block saves fits; its own stay."""
        for number, managed in list(self._here.items()):
            if self.held + size <= self._room or self._block_of[number] == self._block:
                return
            self._give_up_unused(number, managed)

    def _give_up_unused(self, number: int, managed: ManagedTensor) -> None:
        if number not in self._new and number not in self._used:
            self._give_up(managed)

    def _hold(self, managed: ManagedTensor, residency: Residency) -> Tensor:
        """Takes memory of the device for an object."""
        managed.memory = torch.empty(managed.nbytes, dtype=torch.uint8, device=self.device)
        managed.enter(Residency.QUEUED)
        managed.enter(residency)
        self._here[managed.number] = managed
        self.held += managed.nbytes
        self.most = max(self.most, self.held)
        return managed.memory

    def _fetch(self, managed: ManagedTensor) -> None:
        if managed.residency is Residency.AWAY:
            assert managed.offset is not None
            managed.transfer = self.store.read(
                managed.offset, self._hold(managed, Residency.ARRIVING)
            )

    def _send_for(self, block: int) -> None:
        """Sends for what is left of a block, and for the one that backward uses next."""
        if block == self._coming:
            return
        self._coming = block
        before = max((number for number in self._blocks if number < block), default=block)
        for number in dict.fromkeys((block, before)):
            for managed in reversed(self._blocks[number]):
                self._fetch(managed)

    def _settle(self, managed: ManagedTensor) -> None:
        """Makes all later work of the device wait for a copy in flight."""
        if managed.transfer is not None:
            managed.transfer.wait()
            managed.transfer = None
        if managed.residency is not Residency.HERE:
            managed.enter(Residency.HERE)

    def _give_up(self, managed: ManagedTensor) -> None:
        """Frees an object's memory on the device."""
        if managed.residency is not Residency.AWAY:
            self._settle(managed)
            managed.enter(Residency.AWAY)
            managed.memory = None
            del self._here[managed.number]
            self.held -= managed.nbytes
