"""Bytes of model state by kind: what is held now, and at most.

The buffers of chunks are counted where they are made and given back. A
prediction counts with the same class what it only imagines.
"""

from __future__ import annotations

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer_state")
PARAMETERS, GRADIENTS, OPTIMIZER_STATE = KINDS
ACTIVATIONS = "activations"
"""What forward saves for backward, where a manager holds it: no model state, so none of `KINDS`."""


class ByteCounter:
    """Counts bytes by kind."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self._total = 0
        self.restart()

    @property
    def total(self) -> int:
        """Bytes held now, of all kinds."""
        return self._total

    def restart(self) -> None:
        """Forgets the peaks: what is held now is the most from here on."""
        self.peak, self.fullest, self._most = dict(self.live), dict(self.live), self._total

    def add(self, kind: str, nbytes: int) -> None:
        """Counts bytes that were made, or with a minus given back."""
        held = self.live[kind] = self.live.get(kind, 0) + nbytes
        self._total += nbytes
        if held > self.peak.get(kind, 0):
            self.peak[kind] = held
        if self._total > self._most:
            self._most, self.fullest = self._total, dict(self.live)
