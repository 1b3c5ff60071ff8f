"""The sharded optimizer: it steps this rank's part of every chunk, and gathers the others' parts.

Read `ZeroOptimizer._step` first: a step is all there. How gradients come to the shards is told in
`_reducer.py`, how state is saved in `_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gulliver.comm import all_gather, all_reduce, broadcast, group_rank, group_size
from gulliver.errors import GulliverError
from gulliver.memory import Chunk, plan_chunks, reduced_gradient
from gulliver.parallel._optimizer import BoostedOptimizer, State
from gulliver.parallel.zero._elementwise import check_elementwise, state_tensors
from gulliver.parallel.zero._reducer import IN_FLIGHT, GradientReducer, ShardedChunk
from gulliver.parallel.zero._state import gather_state, scatter_state

DTYPES = (torch.float32, torch.float64)


class ZeroOptimizer(BoostedOptimizer):
    """Shards the state of an element-wise optimizer, and with stage 2 the gradients.

    After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models".

    Gradients are on the shards when `backward` returns; ``parameter.grad`` then is a stand-in that
    refuses norms and changes, so `torch.nn.utils.clip_grad_norm_` is refused rather than wrong.

    Args:
        inner: the user's optimizer; its groups are changed to hold this rank's pieces.
        names: trainable parameters of the model in its order, with their names.
        stage: 1 keeps whole gradient buffers between steps; 2 frees each when it is reduced, and so
            reduces at every backward, inside `no_sync` too, adding up shards.
        chunk_bytes: size of a chunk.
        max_norm: clips to this global norm in every step.
        group: ranks to shard over; None for all.
        assume_elementwise: take the user's word for an optimizer that is not known.

    Raises:
        GulliverError: the optimizer cannot be sharded; a parameter is neither float32 nor float64.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        stage: int = 1,
        chunk_bytes: int = 4 * 2**20,
        max_norm: float = math.inf,
        group: dist.ProcessGroup | None = None,
        assume_elementwise: bool = False,
    ) -> None:
        super().__init__(inner, names)
        check_elementwise(inner, assume_elementwise)
        for parameter, name in self.names.items():
            if parameter.dtype not in DTYPES:
                raise GulliverError(
                    f"parameter {name!r} is {parameter.dtype}: ZeRO trains float32 and float64, "
                    "keep the model in float32 and let mixed_precision='bf16' compute in bfloat16"
                )
        # Some optimizers have state before their first step; the boost may come later, too.
        state = super().export_state()
        self._members = super().group_names()
        self.stage, self.group, self.max_norm = stage, group, max_norm
        self.rank, self.size = group_rank(group), group_size(group)
        self.grad_norm: Tensor | None = None
        self._deferred = self._stepping = False
        self._used: set[str] | None = None
        self._reduced: dict[nn.Parameter, Tensor] = {}
        self.chunks = [self._sharded(chunk) for chunk in self._place(chunk_bytes)]
        self._reducer = GradientReducer(self.chunks, stage, group)
        self._give_pieces()
        scatter_state(inner, self.chunks, state)
        self._watch_inner()

    def _place(self, chunk_bytes: int) -> Iterator[Chunk]:
        """Moves the parameters, equal on all ranks from here on, into chunks of one dtype each."""
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for parameter, name in self.names.items():
            kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
        for (dtype, _), parameters in kinds.items():
            sizes = [(name, p.numel()) for name, p in parameters.items()]
            for layout in plan_chunks(sizes, max(1, chunk_bytes // dtype.itemsize), self.size):
                chunk = Chunk(layout, parameters, self.rank)
                broadcast(chunk.data, 0, self.group)
                yield chunk

    def _sharded(self, chunk: Chunk) -> ShardedChunk:
        pieces = []
        for piece in chunk.layout.pieces(self.rank):
            owned = nn.Parameter(chunk.shard[piece.start : piece.end])
            owned.grad = self._reduced[owned] = reduced_gradient(owned)
            pieces.append((piece, owned))
        return ShardedChunk(chunk, pieces)

    def _give_pieces(self) -> None:
        """Puts this rank's pieces where the whole parameters were in the optimizer's groups."""
        mine = {piece.name: owned for c in self.chunks for piece, owned in c.pieces}
        for group, members in zip(self.inner.param_groups, self._members, strict=True):
            group["params"] = [mine[name] for name in members if name in mine]

    def _watch_inner(self) -> None:
        """Loops that go on using the optimizer from before boost must not do nothing silently."""

        def refuse(*_: Any) -> None:
            if not self._stepping:
                raise GulliverError(
                    "step the optimizer that boost returned, not the one it was given"
                )

        self.inner.register_step_pre_hook(refuse)
        self.inner.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss; the gradients' means are on the shards when it ends.

        ``loss.backward()`` is right too, but then all communication waits for the step.
        """
        with self._reducer.backward(reduce=not self._deferred):
            loss.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds gradients up without reducing them; stage 2 reduces all the same, to its shards."""
        before, self._deferred = self._deferred, self.stage == 1
        try:
            yield
        finally:
            self._deferred = before

    def _step(self) -> None:
        for sharded in self.chunks:
            sharded.chunk.check_parameters()
        if math.isfinite(self.max_norm):
            self.clip_grad_by_norm(self.max_norm)
        used = self._settle()
        # As with torch, gradients stay until zero_grad; the pieces only borrow them.
        for piece, owned, gradient in self._piece_gradients():
            owned.grad = gradient if piece in used else None
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False
            for sharded in self.chunks:
                for _, owned in sharded.pieces:
                    owned.grad = self._reduced[owned]
        self._used = None
        self._reducer.unsettle()
        self._gather_parameters()

    def _piece_gradients(self) -> Iterator[tuple[str, nn.Parameter, Tensor | None]]:
        for sharded in self.chunks:
            whole = sharded.gradient_shard
            for piece, owned in sharded.pieces:
                part = None if whole is None else whole[piece.start : piece.end]
                yield piece.name, owned, part

    def _gather_parameters(self) -> None:
        handles = [
            all_gather(c.chunk.data, c.chunk.shard, self.group, async_op=True) for c in self.chunks
        ]
        for handle in handles:
            handle.wait()
        # The buffers were written behind autograd's back: a graph from before must not be used.
        increment_version(list(self.names))

    def _settle(self) -> set[str]:
        """Brings all gradients to the shards, once between backward and step."""
        if self._used is None or not self._reducer.settled:
            self._used = self._reducer.settle()
        return self._used

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; with ``set_to_none=False`` those that there are become zeros."""
        self._used = None
        self._reducer.forget(set_to_none)

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        The norm is that of the mean gradient over all ranks and parameters, tied ones counted once;
        one number is exchanged for it. `max_norm` may be infinite, to measure only.

        Returns:
            The norm before, float64; nan or inf show as they are.
        """
        self.check_norm(max_norm)
        self._settle()
        shards = [c.gradient_shard for c in self.chunks if c.gradient_shard is not None]
        device = self.chunks[0].chunk.data.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for shard in shards:
            total += torch.linalg.vector_norm(shard, dtype=torch.float64) ** 2
        all_reduce(total, "sum", self.group)
        self.grad_norm = norm = total.sqrt()
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
        """Whole averaged gradients by name, where there is one; every rank calls it."""
        used = self._settle()
        found: dict[str, Tensor] = {}
        for sharded in self.chunks:
            if sharded.gradient_shard is None:
                continue
            whole = torch.empty_like(sharded.chunk.data)
            all_gather(whole, sharded.gradient_shard, self.group)
            views = sharded.chunk.named_views(whole)
            found |= {name: view for name, view in views.items() if name in used}
        return {name: found[name] for name in self.names.values() if name in found}

    def state_dict(self) -> dict[str, Any]:
        """Refused: what one rank holds is not the whole."""
        raise GulliverError("save a sharded optimizer with booster.save_optimizer(optimizer, path)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: what one rank holds is not the whole."""
        raise GulliverError("load a sharded optimizer with booster.load_optimizer(optimizer, path)")

    def export_state(self, keep: bool = True) -> State:
        """The whole state by parameter name; every rank calls it, those that `keep` get it."""
        return gather_state(self.inner, self.chunks, self.group, keep)

    def _import_state(self, state: State) -> None:
        scatter_state(self.inner, self.chunks, state)

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group."""
        return [list(members) for members in self._members]

    def memory(self) -> dict[str, int]:
        """Bytes that this rank will hold of ``parameters``, ``gradients`` and ``optimizer_state``.

        Gradients at their peak: the shards, with stage 1 the whole buffers, with stage 2 those
        under way and the one being filled.
        """
        sizes = [sharded.chunk.data.nbytes for sharded in self.chunks]
        largest = max(sizes) * (IN_FLIGHT + 1)
        buffers = sum(sizes) if self.stage == 1 else min(sum(sizes), largest)
        state = sum(
            state_tensors(self.inner, group) * sum(owned.nbytes for owned in group["params"])
            for group in self.inner.param_groups
        )
        return {
            "parameters": sum(sizes),
            "gradients": buffers + sum(sizes) // self.size,
            "optimizer_state": state,
        }
