"""One clip on several ranks: guidance x sequence.

Classifier-free guidance asks the model twice for each step, with the caption and without it. With
two *guidance* ranks each asks once, and they exchange what they found. The ranks of a *sequence*
share the tokens of the clip (`gulliver.booster.hybrid`). Both together: rank
``branch * sequence + rank in the sequence``, so that those of a sequence, which send most, are
neighbours. Noise,
conditions and Euler steps are computed on every rank, and are the same on all. Clips are decoded by
all ranks together (`share_coding`).

Read `split_ranks`, `share`, `SharedModel`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gulliver.booster.hybrid import wire_stdit
from gulliver.comm import (
    ALONE,
    RankGroup,
    all_gather,
    gather_objects,
    make_axes,
    shared_rank_group,
)
from gulliver.errors import GulliverError
from gulliver.hardware import current_cluster
from gulliver.parallel.convolution import SharedNetworks, has_networks, share_autoencoder
from gulliver.parallel.sequence import SequencePlan, make_groups

THREE_BRANCHES = (
    "it asks the model three times in a step, for which there is no even share; use 1 guidance "
    "rank, and let the others share the sequence"
)


def split_ranks(
    world: int,
    sequence: int = 0,
    guidance_ranks: int = 0,
    guided: bool = True,
    image_guided: bool = False,
) -> tuple[int, int]:
    """Chooses how many ranks share a clip's tokens, and how many the branches of guidance."""
    if guidance_ranks not in (0, 1, 2) or sequence < 0:
        raise GulliverError(
            f"--sequence {sequence} x --guidance-ranks {guidance_ranks} cannot be: guidance has 2 "
            "branches, so it takes 1 or 2 ranks, and a sequence at least 1"
        )
    if guidance_ranks == 2 and image_guided:
        raise GulliverError(f"--guidance-ranks 2 with image guidance: {THREE_BRANCHES}")
    if guidance_ranks == 2 and not guided:
        raise GulliverError(
            "--guidance-ranks 2 with --guidance 1: guidance is off, so there is one branch only; "
            "leave --guidance-ranks out"
        )
    if guidance_ranks == 0:
        both = guided and not image_guided and world % 2 == 0 and sequence in (0, world // 2)
        guidance_ranks = 2 if both else 1
    if sequence == 0:
        sequence = max(1, world // guidance_ranks)
    if sequence * guidance_ranks != world:
        raise GulliverError(
            f"--sequence {sequence} x --guidance-ranks {guidance_ranks} = "
            f"{sequence * guidance_ranks} ranks, but there are {world}: start as many, or leave "
            "one of the two out"
        )
    return sequence, guidance_ranks


@dataclass(frozen=True)
class SharedModel:
    """The ranks that make clips together."""

    # Function called as the model is, with both branches of guidance in one batch.
    model: Callable[..., Tensor]
    ranks: int = 1
    rank: int = 0
    # Rank group that shares the branches of guidance.
    branches: RankGroup = ALONE

    def agree(self, requests: Any) -> None:
        """Refuses requests that differ between the ranks."""
        if self.ranks == 1:
            return
        found = gather_objects(hashlib.sha256(repr(requests).encode()).hexdigest())
        for rank, digest in enumerate(found):
            if digest != found[0]:
                raise GulliverError(
                    f"rank {rank} was asked for other clips than rank 0, and they make them "
                    "together: give all ranks the same requests"
                )

    def check_guidance(self, guided: bool, image_guided: bool = False) -> None:
        """Refuses ranks that the branches of guidance cannot be dealt to."""
        if self.branches.size > 1 and image_guided:
            raise GulliverError(f"image guidance on 2 guidance ranks: {THREE_BRANCHES}")
        if self.branches.size > 1 and not guided:
            raise GulliverError(
                "guidance 1 has one branch only, and the ranks are shared between two: share the "
                "model with guidance_ranks=1"
            )

    def whole(self, sums: Tensor) -> Tensor:
        """Adds up sums [rows, 2] over a sequence; of both branches: rows of all, alike on all."""
        if self.ranks == 1:
            return sums
        parts = sums.new_empty(self.ranks, *sums.shape)
        all_gather(parts.view(-1), sums.contiguous().view(-1))
        return parts.unflatten(0, (self.branches.size, -1)).sum(dim=1).flatten(0, 1)


def share_coding(
    autoencoder: Any,
    rank_group: RankGroup,
    dim: str,
    show: Callable[[str], None] | None = None,
) -> SharedNetworks | None:
    """Makes ranks that need the same clips encode and decode them together; all of them call it."""
    if dim == "off" or rank_group.size == 1 or not has_networks(autoencoder):
        return None
    cluster = current_cluster(dist.get_world_size())
    told = show if rank_group.rank == 0 else None
    return share_autoencoder(autoencoder, rank_group, dim, cluster, told)


def ranks_alike(place: Any) -> RankGroup:
    """Returns the ranks of the world that name the same place; every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    rows: dict[Any, list[int]] = {}
    for rank, other in enumerate(gather_objects(place)):
        rows.setdefault(other, []).append(rank)
    return shared_rank_group(list(rows.values()), "autoencoder")


def share(
    model: Any,
    sequence: int,
    guidance_ranks: int,
    *,
    call: Callable[..., Tensor] | None = None,
    scheme: str | None = None,
    show: Callable[[str], None] | None = None,
) -> SharedModel:
    """Makes all ranks of the world make each clip together; every rank calls it, once."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    split_ranks(world, sequence, guidance_ranks)
    own: Callable[..., Tensor] = model if call is None else call
    if world == 1:
        return SharedModel(own)
    axes = make_axes({"branch": guidance_ranks, "sequence": sequence})
    branches = axes.rank_group("branch") if guidance_ranks > 1 else ALONE
    if sequence > 1:
        starts = range(0, world, sequence)
        groups = make_groups(
            _plan(sequence, model.num_heads), [list(range(s, s + sequence)) for s in starts]
        )
        told = show if dist.get_rank() == 0 else None
        wire_stdit(model, groups, "all_to_all", scheme=scheme, show=told)
    called = OneBranch(own, branches) if branches.size > 1 else own
    return SharedModel(called, world, dist.get_rank(), branches)


class OneBranch:
    """Calls a model with this rank's branch of a batch that holds two, and gives both answers."""

    def __init__(self, model: Callable[..., Tensor], rank_group: RankGroup) -> None:
        assert rank_group.size == 2, "guidance has two branches"
        self._model, self._rank_group = model, rank_group

    def __call__(self, x: Tensor, timestep: Tensor, **inputs: Tensor | None) -> Tensor:
        of_branch = {n: None if v is None else self._own(v) for n, v in inputs.items()}
        own = self._model(self._own(x), self._own(timestep), **of_branch).contiguous()
        both = own.new_empty(2, *own.shape)
        all_gather(both.view(-1), own.view(-1), self._rank_group.process_group)
        # A process group numbers its ranks in ascending order, as this rank group does.
        return both.flatten(0, 1)

    def _own(self, both: Tensor) -> Tensor:
        return both.chunk(2)[self._rank_group.rank]


def _plan(sequence: int, heads: int) -> SequencePlan:
    """Plans to exchange heads between as many ranks as heads allow, in a ring of such groups."""
    ulysses = max(n for n in range(1, sequence + 1) if sequence % n == 0 and n <= heads)
    return SequencePlan(ulysses=ulysses, inner=sequence // ulysses)
