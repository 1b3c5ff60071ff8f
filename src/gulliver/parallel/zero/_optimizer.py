"""The sharded optimizer: it steps this rank's part of every chunk, and gathers the others' parts.

Read `ZeroOptimizer._step` first: a step is all there. How gradients come to the shards is told in
`_reducer.py`, how parameters come back in `_gatherer.py`, how state is saved in `_state.py`, how
the chunks are cut anew in `_relayout.py`.

[Note: the pipeline of a step] Chunks are updated one by one, in the order of use. Each is waited
for, stepped where it lies, and its gather started; then the next. So the link carries the first
chunks' parameters while the others are updated, and the next forward begins while most of them are
still on their way. Only clipping needs all gradients first: one number is exchanged for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from gulliver._compat import step_hooks, step_without_hooks
from gulliver.comm import Group, all_gather, all_reduce, broadcast, group_rank, group_size
from gulliver.errors import GulliverError
from gulliver.hardware import ChunkSize, zero_bytes
from gulliver.memory import (
    ASKS,
    BufferPool,
    Chunk,
    ChunkLayout,
    before_write,
    reduced_gradient,
)
from gulliver.parallel._optimizer import BoostedOptimizer, Leaf, Saved, State
from gulliver.parallel.zero._elementwise import check_optimizer, is_elementwise, state_tensors
from gulliver.parallel.zero._gatherer import Gatherer
from gulliver.parallel.zero._groups import GroupWatch
from gulliver.parallel.zero._reducer import IN_FLIGHT, GradientReducer
from gulliver.parallel.zero._saved import (
    after_model_load,
    before_model_load,
    make_state,
    model_leaves,
    state_leaves,
    take_finished_writes,
)
from gulliver.parallel.zero._scaler import LossScaler
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._sizes import TensorSize, chunk_layouts, shard_dtype
from gulliver.parallel.zero._state import gather_state, scatter_state
from gulliver.parallel.zero._statistics import BufferSync

if TYPE_CHECKING:
    from gulliver.parallel.zero._tuner import BucketTuner

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ZeroOptimizer(BoostedOptimizer):
    """Shards optimizer state, gradients and parameters, as the stage says.

    After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models". Parameters of 16 bits are trained through a float32 copy in the shards.

    Gradients leave the parameters during `backward`; ``parameter.grad`` then is a stand-in that
    refuses norms and changes, so `torch.nn.utils.clip_grad_norm_` is refused rather than wrong.

    Args:
        inner: the user's optimizer; its groups are changed to hold this rank's pieces.
        names: trainable parameters of the model in its order, with their names.
        stage: 0 shards nothing; 1 the optimizer's state, and keeps whole gradient buffers between
            steps; 2 frees each when it is reduced, and so reduces at every backward, inside
            `no_sync` too, adding up shards; 3 parameters as well, gathered ahead of use.
        chunk_bytes: size of a chunk.
        max_norm: clips to this global norm in every step.
        group: ranks to shard over; None for all.
        assume_elementwise: take the user's word for an optimizer that is not known.
        frozen: parameters of the model that are not trained, with their names; stage 3 shards them.
        ahead: chunks that stage 3 gathers ahead of the one in use.
        overlap: False waits for every collective at once; for comparison, with the same results.

    Raises:
        GulliverError: the optimizer cannot be sharded; a parameter is of a dtype that is not
            trained.
    """

    spreads_state = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        stage: int = 1,
        chunk_bytes: int = 4 * 2**20,
        max_norm: float = math.inf,
        group: Group = None,
        assume_elementwise: bool = False,
        frozen: Mapping[nn.Parameter, str] | None = None,
        ahead: int = 2,
        overlap: bool = True,
    ) -> None:
        super().__init__(inner, names)
        check_optimizer(inner, stage, assume_elementwise)
        check_trainable(self.names)
        for parameter in self.names:
            vars(parameter)["_boosted"] = True
        # Some optimizers have state before their first step; the boost may come later, too.
        exported = super().export_state()
        state = {n: {k: v for k, v in e.items() if v is not None} for n, e in exported.items()}
        self._members, self._watched = super().group_names(), GroupWatch(inner, group)
        self.stage, self.group, self.max_norm = stage, group, max_norm
        self.ahead, self.overlap, self.chunk_bytes = ahead, overlap, chunk_bytes
        self.rank, self.size = group_rank(group), group_size(group)
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self.pool = BufferPool()
        self.tuner: BucketTuner | None = None
        self.by_chunk = is_elementwise(inner)
        self.update_s = 0.0
        self._tuned = 0
        self.buffers: BufferSync | None = None
        self._deferred = self._stepping = False
        self._used: set[str] | None = None
        self._reduced: dict[nn.Parameter, Tensor] = {}
        self.frozen_names = dict(frozen or {}) if stage == 3 else {}
        fp16 = any(p.dtype is torch.float16 for p in self.names)
        self.scaler = LossScaler() if fp16 else None
        self.everything: list[ShardedChunk] = []
        self._reducer: GradientReducer = None  # type: ignore[assignment]
        self.gatherer: Gatherer = None  # type: ignore[assignment]
        for trained in (True, False):
            parameters = self.names if trained else self.frozen_names
            for layout, members in self.layouts(parameters, chunk_bytes):
                self.everything.append(self._placed(layout, members, trained))
        self.adopt(self.everything)
        scatter_state(inner, self.chunks, state)
        self._watch_inner()

    @property
    def gives_back(self) -> bool:  # type: ignore[override]
        """With stage 3, which keeps shards only."""
        return self.stage == 3

    @property
    def parts(self) -> int:
        """Shards of a chunk."""
        return self.size if self.stage else 1

    @property
    def part(self) -> int:
        """Of a chunk, that this rank owns."""
        return self.rank if self.parts > 1 else 0

    def home_dtype(self, dtype: torch.dtype, trained: bool) -> torch.dtype:
        """Of the shards of parameters of a dtype."""
        return shard_dtype(dtype, trained)

    def layouts(
        self, names: Mapping[nn.Parameter, str], chunk_bytes: int
    ) -> Iterator[tuple[ChunkLayout, dict[str, nn.Parameter]]]:
        """Cuts parameters in their order into chunks of one dtype and device each."""
        sizes = [TensorSize(n, p.numel(), p.dtype, p.device) for p, n in names.items()]
        parameters = {name: parameter for parameter, name in names.items()}
        for layout, _ in chunk_layouts(sizes, chunk_bytes, self.stage, self.size):
            yield layout, parameters

    def _placed(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], trained: bool
    ) -> ShardedChunk:
        """Moves parameters, equal on all ranks from here on, into a chunk."""
        chunk = Chunk(layout, parameters, self.part, self.pool)
        broadcast(chunk.data, 0, self.group)
        chunk.settle_home(self.home_dtype(chunk.dtype, trained), separate=self.stage == 3)
        if self.stage == 3:
            chunk.release()
        return self.sharded(chunk, trained)

    def sharded(self, chunk: Chunk, trained: bool) -> ShardedChunk:
        """A chunk with this rank's pieces of it, as parameters for the inner optimizer."""
        pieces = []
        for piece in chunk.layout.pieces(chunk.part) if trained else ():
            run = chunk.home[piece.start : piece.end]
            # What is not cut has its own shape: some optimizers look at it.
            whole = chunk.layout.parts == 1
            owned = nn.Parameter(run.view(chunk.shapes[piece.name]) if whole else run)
            owned.grad = self._reduced[owned] = reduced_gradient(owned)
            pieces.append((piece, owned))
        return ShardedChunk(chunk, pieces, trained)

    def adopt(self, chunks: Sequence[ShardedChunk]) -> None:
        """Takes chunks, in the order of use, as those that it trains."""
        if self._reducer is not None:
            self._reducer.close()
        self.everything = list(chunks)
        first = crc32(chunks[0].chunk.layout.slots[0].name.encode()) if chunks else 0
        for number, sharded in enumerate(chunks, first):
            sharded.number = number
        self.chunks = [c for c in chunks if c.trained]
        self._reducer = GradientReducer(self.chunks, self.stage, self.group, self.overlap)
        if self.tuner is not None:
            self._reducer.noted = self.tuner.gradient
        steps, lent = 0, []
        if self.gatherer is not None:
            steps, lent = self.gatherer.step, self.gatherer.lent
        self.gatherer = Gatherer(
            self.everything, self.stage == 3, self.group, self.ahead, self.overlap
        )
        self.gatherer.step, self.gatherer.lent = steps, lent
        self._give_pieces()

    def _give_pieces(self) -> None:
        """Puts this rank's pieces where the whole parameters were in the optimizer's groups."""
        mine = {piece.name: owned for c in self.chunks for piece, owned in c.pieces}
        for group, members in zip(self.inner.param_groups, self._members, strict=True):
            group["params"] = [mine[name] for name in members if name in mine]
        self._watched.remember()
        self._by_chunk = [self._group_pieces(sharded) for sharded in self.chunks]

    def _group_pieces(self, sharded: ShardedChunk) -> list[list[nn.Parameter]]:
        mine = {piece.name: owned for piece, owned in sharded.pieces}
        return [[mine[name] for name in members if name in mine] for members in self._members]

    def _watch_inner(self) -> None:
        """Loops that go on using the optimizer from before boost must not do nothing silently."""

        def refuse(*_: Any) -> None:
            if not self._stepping:
                raise GulliverError(
                    "step the optimizer that boost returned, not the one it was given"
                )

        setattr(self.inner, ASKS, True)
        self.inner.register_step_pre_hook(refuse)
        self.inner.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def watch(self, model: nn.Module) -> None:
        """Notices calls of the model; see `_hooks.py`."""
        from gulliver.parallel.zero._hooks import watch_calls

        super().watch(model)
        watch_calls(model, self)

    def tune(self, tuner: BucketTuner) -> None:
        """Lets a tuner watch the next steps, and cut the chunks anew between them."""
        self.tuner = tuner
        self._reducer.noted = tuner.gradient

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss; the gradients are on their way to the shards when it ends.

        ``loss.backward()`` is right too, but then all communication waits for the step.
        """
        if self.scaler is not None:
            self._reducer.scale = self.scaler.scale
            loss = loss * self.scaler.scale
        self._mark("backward")
        self.gatherer.enter_backward()
        try:
            with self._reducer.backward(reduce=not self._deferred), self._saving():
                loss.backward()
                self._mark("backward ended")
        finally:
            self.gatherer.leave_backward()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Lets autograd keep references to sharded parameters, where a backward runs a forward."""
        if self.stage < 3:
            yield
            return
        with saved_tensors_hooks(self.gatherer.pack, self.gatherer.unpack):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds gradients up without reducing them; from stage 2 on they are reduced to shards."""
        before, self._deferred = self._deferred, self.stage < 2
        try:
            yield
        finally:
            self._deferred = before

    def _mark(self, name: str) -> None:
        if self.tuner is not None:
            self.tuner.mark(name)

    def relayout(self, order: Sequence[str], chunk_bytes: int) -> bool:
        """Cuts the chunks anew; see `gulliver.parallel.zero._relayout.relayout`.

        Raises:
            GulliverError: there are gradients.
        """
        from gulliver.parallel.zero._relayout import relayout

        if any(c.gradient_shard is not None or c.chunk.gradient_begun for c in self.chunks):
            raise GulliverError("chunks are cut between steps: call zero_grad first")
        self._watched.check_members()  # it fills the groups anew
        return relayout(self, order, chunk_bytes)

    def _step(self) -> None:
        for sharded in self.everything:
            sharded.chunk.check_parameters()
        self.gatherer.release_all()
        for sharded in self.chunks:
            if sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()
        used = self._settle()
        self._watched.check_members()  # clipping may have settled before
        if math.isfinite(self.max_norm):
            self.clip_grad_by_norm(self.max_norm)
        if self.scaler is not None and not self._all_finite():
            self.skipped += 1
            self._finish_step()
            return
        self._stepping = True
        try:
            with step_hooks(self.inner):
                self._pipeline(used)
        finally:
            self._stepping = False
            self._give_groups(None)
            for sharded in self.chunks:
                for _, owned in sharded.pieces:
                    owned.grad = self._reduced[owned]
        self._finish_step()

    def _pipeline(self, used: set[str]) -> None:
        """Waits for each chunk's gradients, steps it, and starts its gather."""
        timed = self.tuner is not None and self.tuner.profiling
        if timed:
            self._reducer.land_all()
            self._mark("step")
        self.update_s = 0.0
        for turn in self._turns():
            for number in turn:
                self._lend_gradients(self.chunks[number], used)
            self._give_groups(turn[0] if self.by_chunk else None)
            for number in turn:
                before_write(self._written(self.chunks[number]))
            begun = time.perf_counter()
            step_without_hooks(self.inner)
            self.update_s += time.perf_counter() - begun
            if self.stage < 3:
                for number in turn:
                    self.gatherer.start(self.chunks[number])
        if timed:
            self._mark("stepped")
            self.gatherer.finish_all()

    def _turns(self) -> list[list[int]]:
        """Numbers of the chunks that are stepped together.

        An optimizer that is not known may look at all parameters at once, or count its calls.
        """
        numbers = list(range(len(self.chunks)))
        return [[number] for number in numbers] if self.by_chunk else [numbers]

    def _lend_gradients(self, sharded: ShardedChunk, used: set[str]) -> None:
        """Shows a chunk's gradients to the inner optimizer; they stay until zero_grad."""
        self._reducer.land(sharded)
        for piece, owned in sharded.pieces:
            whole = sharded.gradient_shard if piece.name in used else None
            run = None if whole is None else whole[piece.start : piece.end]
            owned.grad = None if run is None else run.view(owned.shape)

    def _written(self, sharded: ShardedChunk) -> Iterator[Tensor]:
        """What a step of a chunk writes; a checkpoint may be copying it."""
        yield sharded.chunk.home
        for _, owned in sharded.pieces:
            for value in self.inner.state.get(owned, {}).values():
                if isinstance(value, Tensor):
                    yield value

    def _give_groups(self, number: int | None) -> None:
        """Shows the inner optimizer one chunk's pieces, or all."""
        if number is None:
            self._give_pieces()
            return
        for group, pieces in zip(self.inner.param_groups, self._by_chunk[number], strict=True):
            group["params"] = pieces

    def _finish_step(self) -> None:
        self._used = None
        self._reducer.unsettle()
        if self.buffers is not None:
            self.buffers.sync()
        self.gatherer.step += 1
        # The buffers are written behind autograd's back: a graph from before must not be used.
        increment_version(list(self.names))
        self.gatherer.prefetch()

    def _all_finite(self) -> bool:
        """Whether no gradient has overflowed, and the scale of the next losses."""
        assert self.scaler is not None
        norm = self.grad_norm if math.isfinite(self.max_norm) else self.clip_grad_by_norm(math.inf)
        assert norm is not None
        finite = bool(torch.isfinite(norm))
        self.scaler.update(finite)
        return finite

    def _settle(self) -> set[str]:
        """Sends all gradients to the shards, once between backward and step."""
        if self._used is None or not self._reducer.settled:
            groups, buffers = self._watched.votes(), self.buffers

            def take(votes: list[int]) -> None:
                self._watched.check_votes(votes[: len(groups)])
                if buffers is not None:
                    buffers.take_votes(votes[len(groups) :])

            beside = groups + (buffers.votes() if buffers is not None else [])
            self._used = self._reducer.settle(beside, take)
        return self._used

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; with ``set_to_none=False`` those that there are become zeros."""
        self._used = None
        self._reducer.forget(set_to_none)
        if self.tuner is not None and set_to_none and self.gatherer.step > self._tuned:
            self._tuned = self.gatherer.step
            self.tuner.stepped()

    def _gradient_shards(self) -> list[Tensor]:
        self._settle()
        self._reducer.land_all()
        return [c.gradient_shard for c in self.chunks if c.gradient_shard is not None]

    def clip_grad_by_norm(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`.

        The norm is that of the mean gradient over all ranks and parameters, tied ones counted once;
        one number is exchanged for it. `max_norm` may be infinite, to measure only.

        Returns:
            The norm before, float64; nan or inf show as they are.
        """
        self.check_norm(max_norm)
        shards = self._gradient_shards()
        self.grad_norm = norm = self._squared_norm().sqrt()
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for shard in shards:
                shard.mul_(scale.to(shard.dtype))
        return norm

    def _squared_norm(self) -> Tensor:
        """Of the mean gradient, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.chunks[0].chunk.device)
        for shard in self._gradient_shards():
            total += torch.linalg.vector_norm(shard, dtype=torch.float64) ** 2
        if self.parts > 1:
            all_reduce(total, "sum", self.group)
        return total

    def clip_grad_by_value(self, limit: float) -> None:
        """Cuts every element of the mean gradient to [-limit, limit]."""
        for shard in self._gradient_shards():
            shard.clamp_(-limit, limit)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name, where there is one; every rank calls it."""
        used = self._settle()
        self._reducer.land_all()
        found: dict[str, Tensor] = {}
        for sharded in self.chunks:
            shard = sharded.gradient_shard
            if shard is None:
                continue
            whole = shard
            if self.parts > 1:
                whole = torch.empty(
                    sharded.chunk.layout.size, dtype=shard.dtype, device=shard.device
                )
                all_gather(whole, shard, self.group)
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
        self.take_writes()
        return gather_state(self.inner, self.chunks, self.group, keep)

    def _import_state(
        self, state: State, others: Mapping[Any, Any] | None, exact: Collection[str]
    ) -> None:
        self.take_writes()
        scatter_state(self.inner, self.chunks, state)
        self.publish_masters()

    def model_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """The model's state as far as this rank has it; nothing is gathered or waited for."""
        take_finished_writes(self)
        return model_leaves(self, model)

    def load_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """What of the model's state this rank fills when it is loaded: all that it holds."""
        take_finished_writes(self)
        return model_leaves(self, model, saving=False)

    def state_leaves(self) -> Saved:
        """The optimizer's state as far as this rank has it."""
        return state_leaves(self)

    @property
    def has_whole_state(self) -> bool:
        """At stage 0, unless the model itself is cut."""
        return self.parts == 1 and self.has_whole_model

    def make_state(self, entries: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Leaf]:
        """Gives the optimizer state of the kinds that a checkpoint has, to be filled."""
        return make_state(self, entries)

    def before_model_load(self) -> None:
        """Lets nothing be under way while the shards are filled."""
        before_model_load(self)

    def after_model_load(self) -> None:
        """Sends what the shards hold now to all ranks; every rank calls it."""
        after_model_load(self)

    def publish_masters(self) -> None:
        """Rounds parameters from float32 copies that were loaded; every rank calls it."""
        if any(_is_master(c) for c in self.chunks):
            self.after_model_load()

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Of the state that belongs to a parameter."""
        return self.home_dtype(parameter.dtype, trained=True)

    def take_writes(self) -> None:
        """Brings what was written to the parameters, on all ranks alike, to the shards."""
        self.gatherer.finish_all()
        for sharded in self.everything:
            if sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group."""
        return [list(members) for members in self._members]

    def memory(self) -> dict[str, int]:
        """Bytes that this rank will hold of ``parameters``, ``gradients`` and ``optimizer_state``.

        At their peak, as `gulliver.hardware.zero_bytes` predicts.
        """
        chunks = [
            ChunkSize(c.chunk.nbytes, c.chunk.home.nbytes, c.trained, _is_master(c))
            for c in self.everything
        ]
        state = sum(
            state_tensors(self.inner, group) * sum(owned.nbytes for owned in group["params"])
            for group in self.inner.param_groups
        )
        return zero_bytes(chunks, self.stage, self.parts, self.ahead, IN_FLIGHT, state)


def is_boosted(parameter: Tensor) -> bool:
    """Whether a boosted optimizer trains a parameter."""
    return "_boosted" in vars(parameter)


def check_trainable(names: Mapping[nn.Parameter, str]) -> None:
    """Refuses parameters that ZeRO cannot train.

    Raises:
        GulliverError: one is of another dtype, or trained by another boosted optimizer.
    """
    for parameter, name in names.items():
        if parameter.dtype not in DTYPES:
            raise GulliverError(
                f"parameter {name!r} is {parameter.dtype}: ZeRO trains "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
            )
        if is_boosted(parameter):
            raise GulliverError(
                f"parameter {name!r} is trained by another boosted optimizer: give it to one"
            )


def _is_master(sharded: ShardedChunk) -> bool:
    return sharded.chunk.home.dtype != sharded.chunk.dtype
