"""Messages between the ranks of a line: to the next one, and from each to each.

[Note: gloo and NCCL] Everything goes through `torch.distributed.batch_isend_irecv`. Over gloo its
messages are posted one after the other, so the receives stand first: a message that finds its
receive posted needs no further round trip. Over NCCL a batch is one grouped call, so that no rank's
send waits for another's. All ranks post in the same order, which is what NCCL goes by; gloo goes by
the tags too. What arrives is waited for before it is read or sent on: NCCL would keep that order by
itself, gloo does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm import Line

BLOCK_TAG, GATHERED_TAG, EXCHANGE_TAG = 100, 200, 300
"""Of the blocks that go round and of what is gathered for them, plus the piece; of exchanges."""


class Flight:
    """Messages under way; `wait` returns what arrives, when it and what was sent are done."""

    def __init__(self, works: Sequence[Any], arriving: Tensor, keep: Any = None) -> None:
        self._works, self._arriving, self._keep = works, arriving, keep

    def wait(self) -> Tensor:
        """What arrived; nothing that was sent is needed any more."""
        for work in self._works:
            work.wait()
        self._works, self._keep = (), None
        return self._arriving


def shift(line: Line, outgoing: Tensor, incoming: Tensor, tag: int) -> Flight:
    """Begins to send to the next of a line, and to receive from the one before.

    Args:
        line: of more than one rank.
        outgoing: flat; not to be written to before it was waited for.
        incoming: flat, as long as what the one before sends.
        tag: all messages with a tag arrive in the order in which they were sent.
    """
    before, after = (line.ranks[(line.place + step) % line.size] for step in (-1, 1))
    works = _post([(before, incoming)], [(after, outgoing)], line.group, tag)
    return Flight(works, incoming, outgoing)


def exchange(line: Line, outgoing: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """An all-to-all of parts of any size, the sizes being known.

    Args:
        line: of ranks.
        outgoing: flat, one for each rank; the own one is returned as it is.
        counts: of elements that come from each rank.
    """
    own = outgoing[line.place]
    order = [(line.place + step) % line.size for step in range(1, line.size)]
    arriving = [own if p == line.place else own.new_empty(n) for p, n in enumerate(counts)]
    # Each begins with its neighbour, so that not all send to one.
    incoming = [(line.ranks[p], arriving[p]) for p in reversed(order)]
    sent = [(line.ranks[p], outgoing[p]) for p in order]
    for work in _post(incoming, sent, line.group, EXCHANGE_TAG):
        work.wait()
    return arriving


def gather_integers(line: Line, values: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's whole numbers; as many from each."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    if line.size == 1:
        return [list(values)]
    return [t.tolist() for t in exchange(line, [own] * line.size, [len(values)] * line.size)]


def _post(
    incoming: Iterable[tuple[int, Tensor]],
    outgoing: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup | None,
    tag: int,
) -> list[Any]:
    # Both sides know the sizes, so a message without content is sent by neither.
    calls = [
        dist.P2POp(call, _bytes(tensor), peer, group, tag)
        for call, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
        for peer, tensor in messages
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(calls) if calls else []


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes: backends do not know every dtype."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous(), "gloo would read the storage from its start"
    return tensor.view(torch.uint8)
