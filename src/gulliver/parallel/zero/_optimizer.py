"""ZeRO stages 1 and 2: parameters and gradients in chunks, optimizer state sharded.

[Note: a step of ZeRO]
Parameters are views of flat chunks, cut into one shard per rank. In backward each parameter's
gradient is added in place into the chunk's gradient buffer. When all parameters of a chunk have
theirs, the buffer is reduce-scattered while backward goes on: this rank gets the mean of its shard.
The step updates the shard in place through the user's own optimizer, whose groups hold views of this
rank's pieces, and gathers the shards of all ranks back into the chunks.

[Note: order of collectives]
Ranks must reduce their chunks in one order, but a parameter may be used on some ranks only, so a
chunk may be complete here and not there. Therefore chunks are reduced in one fixed order, from the
last to the first, each only after those before it; what is left when backward ends follows then.

[Note: who was used]
torch's optimizers skip a parameter without a gradient: no decay, no step counted. A gradient of
zeros is another thing. So ranks exchange which parameters had a gradient anywhere, and pieces of the
others are left without one.

Read `ZeroOptimizer.backward`, `_gradient_ready`, `_step` in this order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.comm import (
    Handle,
    all_gather,
    all_reduce,
    broadcast,
    gather_objects,
    group_rank,
    group_size,
    reduce_scatter,
)
from gulliver.errors import GulliverError
from gulliver.memory import Chunk, Piece, plan_chunks
from gulliver.parallel._optimizer import BoostedOptimizer, State
from gulliver.parallel.zero._elementwise import check_elementwise, is_counter


class Gradients(Enum):
    """Where a chunk's gradients are within one backward."""

    COLLECTING = auto()
    """Being added up in the chunk's buffer, or not begun."""
    REDUCING = auto()
    """On their way to the shards."""


@dataclass(eq=False)
class ShardedChunk:
    """A chunk with this rank's gradient shard and what is known of its backward."""

    chunk: Chunk
    pieces: list[tuple[Piece, nn.Parameter]]
    phase: Gradients = Gradients.COLLECTING
    waiting: set[str] = field(default_factory=set)
    gradient_shard: Tensor | None = None
    incoming: Tensor | None = None
    handle: Handle | None = None


class ZeroOptimizer(BoostedOptimizer):
    """Shards the state of an element-wise optimizer, and with stage 2 the gradients.

    Args:
        inner: the user's optimizer, not stepped yet; its groups are changed to hold this rank's
            pieces.
        names: trainable parameters of the model in its order, with their names.
        stage: 1 keeps whole gradient buffers between steps; 2 frees each when it is reduced, and so
            reduces at every backward, inside `no_sync` too, adding up shards.
        chunk_bytes: size of a chunk.
        group: ranks to shard over; None for all.
        assume_elementwise: take the optimizer's word where it is not known.

    Raises:
        GulliverError: the optimizer cannot be sharded, or was stepped already.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        stage: int = 1,
        chunk_bytes: int = 16 * 2**20,
        group: dist.ProcessGroup | None = None,
        assume_elementwise: bool = False,
    ) -> None:
        super().__init__(inner, names)
        check_elementwise(inner, assume_elementwise)
        if inner.state:
            raise GulliverError(
                "the optimizer was stepped before boost: boost first, then load its state with "
                "booster.load_optimizer"
            )
        self.stage, self.group = stage, group
        self.rank, self.size = group_rank(group), group_size(group)
        self._deferred = False
        self._used: set[str] = set()
        self._groups = [[names[p] for p in g["params"] if p in names] for g in inner.param_groups]
        self.chunks = [self._sharded(chunk) for chunk in self._place(chunk_bytes)]
        self._home = {name: c for c in self.chunks for name in c.chunk.parameters}
        self._next = len(self.chunks) - 1
        self._give_pieces()
        for parameter, name in self.names.items():
            parameter.grad = None  # one from before lies outside the chunks
            parameter.register_hook(self._before_gradient(name))
            parameter.register_post_accumulate_grad_hook(self._after_gradient(name))

    def _place(self, chunk_bytes: int) -> Iterator[Chunk]:
        """Moves the parameters, equal on all ranks from here on, into chunks of one dtype each."""
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for parameter, name in self.names.items():
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
        for (dtype, _), parameters in kinds.items():
            if not dtype.is_floating_point:
                raise GulliverError(f"parameters of {dtype} cannot be trained with ZeRO")
            sizes = [(name, p.numel()) for name, p in parameters.items()]
            for layout in plan_chunks(sizes, max(1, chunk_bytes // dtype.itemsize), self.size):
                chunk = Chunk(layout, parameters, self.rank)
                broadcast(chunk.data, 0, self.group)
                yield chunk

    def _sharded(self, chunk: Chunk) -> ShardedChunk:
        shard = chunk.shard
        pieces = [
            (piece, nn.Parameter(shard[piece.start : piece.start + piece.numel]))
            for piece in chunk.layout.pieces(self.rank)
        ]
        return ShardedChunk(chunk, pieces, waiting=set(chunk.parameters))

    def _give_pieces(self) -> None:
        """Puts this rank's pieces where the whole parameters were in the optimizer's groups."""
        mine = {piece.name: owned for c in self.chunks for piece, owned in c.pieces}
        for group, members in zip(self.inner.param_groups, self._groups, strict=True):
            group["params"] = [mine[name] for name in members if name in mine]

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss; the gradients' means are on their way to the shards when it ends."""
        loss.backward()
        self._reduce_rest()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds gradients up without reducing them; stage 2 reduces all the same, to its shards."""
        before, self._deferred = self._deferred, self.stage == 1
        try:
            yield
        finally:
            self._deferred = before

    def _before_gradient(self, name: str):
        def hook(gradient: Tensor) -> None:
            if self._home[name].chunk.parameters[name].grad is None:
                self._home[name].chunk.attach_gradient()

        return hook

    def _after_gradient(self, name: str):
        def hook(parameter: Tensor) -> None:
            self._gradient_ready(name)

        return hook

    def _gradient_ready(self, name: str) -> None:
        """Notes a gradient, and reduces the chunks that are complete and in turn."""
        self._used.add(name)
        self._home[name].waiting.discard(name)
        if self._deferred:
            return
        while self._next >= 0 and not self.chunks[self._next].waiting:
            self._reduce(self.chunks[self._next])
            self._next -= 1

    def _reduce(self, sharded: ShardedChunk) -> None:
        """Starts the way of a chunk's gradients to the shards."""
        assert sharded.phase is Gradients.COLLECTING
        self._land(sharded)
        chunk = sharded.chunk
        if chunk.gradient is None:
            chunk.attach_gradient()
        assert chunk.gradient is not None
        sharded.incoming = torch.empty_like(chunk.shard)
        sharded.handle = reduce_scatter(
            sharded.incoming, chunk.gradient, "mean", self.group, async_op=True
        )
        sharded.phase = Gradients.REDUCING

    def _land(self, sharded: ShardedChunk) -> None:
        """Waits for a reduction under way and adds its result to the shard's gradient."""
        if sharded.handle is None:
            return
        sharded.handle.wait()
        if sharded.gradient_shard is None:
            sharded.gradient_shard = sharded.incoming
        else:
            assert sharded.incoming is not None
            sharded.gradient_shard += sharded.incoming
        sharded.handle = sharded.incoming = None
        sharded.chunk.detach_gradient(keep=self.stage == 1)

    def _reduce_rest(self) -> None:
        """Ends a backward: chunks with unused parameters follow, and all wait for the next."""
        if self._deferred:
            for sharded in self.chunks:
                sharded.waiting = set(sharded.chunk.parameters)
            return
        while self._next >= 0:
            self._reduce(self.chunks[self._next])
            self._next -= 1
        for sharded in self.chunks:
            # The reduced gradients must be out of the parameters before anything is added to them.
            self._land(sharded)
            sharded.phase = Gradients.COLLECTING
            sharded.waiting = set(sharded.chunk.parameters)
        self._next = len(self.chunks) - 1

    def _unreduced(self) -> bool:
        """Whether gradients lie in the chunks that no rank has seen (backward called directly)."""
        return any(c.chunk.gradient is not None and self._has_views(c) for c in self.chunks)

    def _has_views(self, sharded: ShardedChunk) -> bool:
        return any(p.grad is not None for p in sharded.chunk.parameters.values())

    def _settle(self) -> None:
        """Brings every gradient to its shard, however backward was called."""
        deferred, self._deferred = self._deferred, False
        if self._unreduced() or self._next != len(self.chunks) - 1:
            self._reduce_rest()
        self._deferred = deferred

    def _step(self) -> None:
        for sharded in self.chunks:
            sharded.chunk.check_attached()
        self._settle()
        used = self._used_anywhere()
        for sharded in self.chunks:
            for piece, owned in sharded.pieces:
                owned.grad = None
                if piece.name in used and sharded.gradient_shard is not None:
                    end = piece.start + piece.numel
                    owned.grad = sharded.gradient_shard[piece.start : end]
        self.inner.step()
        handles = [
            all_gather(c.chunk.data, c.chunk.shard, self.group, async_op=True) for c in self.chunks
        ]
        for handle in handles:
            handle.wait()

    def _used_anywhere(self) -> set[str]:
        """Parameters with a gradient on any rank since the gradients were last forgotten."""
        if self.size == 1:
            return set(self._used)
        names = list(self._home)
        device = self.chunks[0].chunk.data.device
        votes = torch.tensor(
            [name in self._used for name in names], dtype=torch.uint8, device=device
        )
        all_reduce(votes, "max", self.group)
        return {name for name, vote in zip(names, votes.tolist(), strict=True) if vote}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, those on their way too."""
        self._settle()
        self._used.clear()
        for sharded in self.chunks:
            sharded.gradient_shard = None
            for _, owned in sharded.pieces:
                owned.grad = None

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        The norm of the mean gradient over all ranks and parameters, one scalar exchanged.
        `torch.nn.utils.clip_grad_norm_` cannot be used instead: reduced gradients have left the
        parameters.

        Returns:
            The norm before; nan or inf show as they are.
        """
        self._settle()
        shards = [c.gradient_shard for c in self.chunks if c.gradient_shard is not None]
        device = self.chunks[0].chunk.data.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for shard in shards:
            total += torch.linalg.vector_norm(shard).double() ** 2
        all_reduce(total, "sum", self.group)
        norm = total.sqrt()
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for shard in shards:
                shard.mul_(scale.to(shard.dtype))
        return norm

    def clip_grad_by_value(self, limit: float) -> None:
        """Cuts every element of the mean gradient to [-limit, limit]."""
        self._settle()
        for sharded in self.chunks:
            if sharded.gradient_shard is not None:
                sharded.gradient_shard.clamp_(-limit, limit)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name; every rank calls it."""
        self._settle()
        used = self._used_anywhere()
        found: dict[str, Tensor] = {}
        for sharded in self.chunks:
            if sharded.gradient_shard is not None:
                views = sharded.chunk.named_views(self._gathered(sharded, sharded.gradient_shard))
                found |= {name: view for name, view in views.items() if name in used}
        return found

    def export_state(self) -> State:
        """The whole optimizer state by parameter name; every rank calls it, all get it."""
        scalars: State = {}
        kinds: set[str] = set()
        for sharded in self.chunks:
            for piece, owned in sharded.pieces:
                for key, value in self.inner.state.get(owned, {}).items():
                    if not isinstance(value, Tensor):
                        continue
                    if is_counter(key, value):
                        scalars.setdefault(piece.name, {})[key] = value.cpu()
                    else:
                        kinds.add(key)
        parts = gather_objects((scalars, kinds), self.group)
        # Pieces of one parameter step together, so any rank's counters are the parameter's.
        state = {name: dict(values) for part, _ in parts for name, values in part.items()}
        for key in sorted(set().union(*(kinds for _, kinds in parts))):
            for sharded in self.chunks:
                self._export_kind(sharded, key, state)
        return state

    def _export_kind(self, sharded: ShardedChunk, key: str, state: State) -> None:
        shard = torch.zeros_like(sharded.chunk.shard)
        present = set()
        for piece, owned in sharded.pieces:
            value = self.inner.state.get(owned, {}).get(key)
            if isinstance(value, Tensor):
                shard[piece.start : piece.start + piece.numel] = value
                present.add(piece.name)
        everywhere = set().union(*gather_objects(present, self.group))
        for name, view in sharded.chunk.named_views(self._gathered(sharded, shard)).items():
            if name in everywhere:
                state.setdefault(name, {})[key] = view.clone()

    def import_state(self, state: State) -> None:
        """Takes over what `export_state` gave, at any world size and chunk size."""
        self.inner.state.clear()
        for sharded in self.chunks:
            for piece, owned in sharded.pieces:
                if piece.name not in state:
                    continue
                end = piece.offset + piece.numel
                self.inner.state[owned] = {
                    key: value.clone()
                    if is_counter(key, value)
                    else value.reshape(-1)[piece.offset : end].to(owned.device).clone()
                    for key, value in state[piece.name].items()
                }

    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return self._groups

    def _gathered(self, sharded: ShardedChunk, shard: Tensor) -> Tensor:
        whole = torch.empty_like(sharded.chunk.data)
        all_gather(whole, shard.contiguous(), self.group)
        return whole
