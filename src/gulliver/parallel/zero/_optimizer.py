"""The sharded optimizer: it steps this rank's part of every chunk, and gathers the others' parts.

Read `ZeroOptimizer._step` first: a step is all there. What a rank has is kept by `ShardedState`
(`_shards.py`). Gradients come to the shards in `_reducer.py`, parameters come back in
`_gatherer.py`, state is gathered in `_state.py` and saved in `_saved.py`, chunks are cut anew in
`_relayout.py`, and stepped in `_updates.py` and, during backward, in `_in_backward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gulliver._compat import step_hooks
from gulliver.comm import Group, Op, all_gather, all_reduce, current_world
from gulliver.errors import GulliverError
from gulliver.memory import ByteCounter, Manager, before_write
from gulliver.parallel._optimizer import BoostedOptimizer, Leaf, Saved, State
from gulliver.parallel.zero import _saved
from gulliver.parallel.zero._elementwise import (
    check_by_chunk,
    check_optimizer,
    check_trainable,
    needs_whole,
)
from gulliver.parallel.zero._gatherer import Gatherer
from gulliver.parallel.zero._giving_back import give_back
from gulliver.parallel.zero._hooks import watch_calls
from gulliver.parallel.zero._in_backward import InBackward
from gulliver.parallel.zero._memory import predicted
from gulliver.parallel.zero._reducer import GradientReducer
from gulliver.parallel.zero._relayout import relayout
from gulliver.parallel.zero._scaler import LossScaler
from gulliver.parallel.zero._sending import ZeroWires
from gulliver.parallel.zero._sharded import ShardedChunk, Squared, squared_norm
from gulliver.parallel.zero._shards import ShardedState
from gulliver.parallel.zero._state import gather_state, scatter_state
from gulliver.parallel.zero._statistics import BufferSync
from gulliver.parallel.zero._tuner import BucketTuner
from gulliver.parallel.zero._unfreezing import wake
from gulliver.parallel.zero._updates import Updates


class ZeroOptimizer(BoostedOptimizer):
    """Shards optimizer state, gradients and parameters, as the stage says."""
    # After Rajbhandari et al., ZeRO, 2020. Parameters of 16 bits are trained through float32
    # copies.
    #
    # Gradients leave the parameters during `backward`; ``parameter.grad`` then is a stand-in that
    # refuses norms and changes, so `torch.nn.utils.clip_grad_norm_` is refused rather than wrong.

    spreads_state = True
    adds_micro_batches = False

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
        manager: Manager | None = None,
        step_in_backward: bool = False,
        assume_per_parameter: bool = False,
        order: Sequence[str] = (),
        wires: ZeroWires | None = None,
    ) -> None:
        super().__init__(inner, names)
        check_optimizer(inner, stage, assume_elementwise, assume_per_parameter)
        check_by_chunk(inner, stage, manager is not None, step_in_backward)
        check_trainable(self.names)
        for parameter in self.names:
            vars(parameter)["_boosted"] = True
        # Some optimizers have state before their first step; the boost may come later, too.
        exported = super().export_state()
        state = {n: {k: v for k, v in e.items() if v is not None} for n, e in exported.items()}
        sharded = dict(frozen or {}) if stage == 3 else {}
        options = ahead, overlap, manager, needs_whole(inner, assume_elementwise), order, wires
        self.shards = ShardedState(inner, self.names, sharded, stage, chunk_bytes, group, *options)
        self.names = self.shards.names  # which grow when parameters are unfrozen
        self._frozen = [p for p in self._frozen if p not in self.shards.sleeping]
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self._squared: Squared = squared_norm
        self.tuner: BucketTuner | None = None
        self.buffers: BufferSync | None = None
        self._tuned = 0
        self._deferred = self._accumulating = False
        self._used: set[str] | None = None
        self.step_in_backward = step_in_backward
        self._updates = Updates(self.shards)
        self._begun = InBackward(self.shards, self._updates)
        fp16 = any(p.dtype is torch.float16 for p in self.names)
        self.scaler = LossScaler() if fp16 else None
        scatter_state(self.shards, state)
        inner.zero_grad = self.zero_grad  # type: ignore[method-assign]
        # Of the optimizer that boost was given, too, only the wrapper's way is right.
        inner.register_state_dict_pre_hook(_refuse_state)
        inner.register_load_state_dict_pre_hook(_refuse_state)

    # What the state knows.

    @property
    def stage(self) -> int:
        """Stage of ZeRO, 0 to 3."""
        return self.shards.stage

    @property
    def group(self) -> Group:
        """Ranks that it is sharded over."""
        return self.shards.group

    @property
    def rank(self) -> int:
        """Rank of this process among them."""
        return self.shards.rank

    @property
    def size(self) -> int:
        """Number of ranks that it is sharded over."""
        return self.shards.size

    @property
    def gives_back(self) -> bool:  # type: ignore[override]
        """Whether parameters are given back after use: with stage 3, which keeps shards only."""
        return self.stage == 3

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk, in bytes."""
        return self.shards.chunk_bytes

    @property
    def everything(self) -> list[ShardedChunk]:
        """All chunks, in the order of use."""
        return self.shards.everything

    @property
    def chunks(self) -> list[ShardedChunk]:
        """Chunks of trained parameters, in the order of use."""
        return self.shards.chunks

    @property
    def gatherer(self) -> Gatherer:
        """Moves parameters from the shards to the ranks."""
        return self.shards.gatherer

    @property
    def _reducer(self) -> GradientReducer:
        return self.shards.reducer

    def watch(self, model: nn.Module) -> None:
        """Notices calls of the model; see `_hooks.py`."""
        super().watch(model)
        self._watches = watch_calls(model, self.shards)

    def release(self, model: nn.Module) -> None:
        """Gives the model whole parameters of its own again; every rank calls it."""
        give_back(self.shards, model, self._watches)

    def tune(self, tuner: BucketTuner) -> None:
        """Lets a tuner watch the next steps, and cut the chunks anew between them."""
        self.tuner = tuner
        self.shards.notify(tuner.gradient)

    @contextmanager
    def backward_pass(self) -> Iterator[float]:
        """Wraps a backward; the gradients are on their way to the shards when it ends."""
        # ``loss.backward()`` without it is right too, but then all communication waits for the
        # step.
        self._reducer.scale = scale = 1.0 if self.scaler is None else self.scaler.scale
        self._mark("backward")
        wake(self.shards)
        self.gatherer.enter_backward()
        try:
            with self._stepping(), self._reducer.backward(not self._deferred), self.saving():
                yield scale
                self._mark("backward ended")
        finally:
            self.gatherer.leave_backward()

    @property
    def steps_in_backward(self) -> bool:
        """Whether chunks are stepped during backward: nothing needs all gradients before."""
        waits = math.isfinite(self.max_norm) or self.scaler is not None
        return self.step_in_backward and not waits

    def _stepping(self) -> AbstractContextManager[None]:
        """Lets chunks be stepped in a backward, where nothing needs all gradients before."""
        self._begun.check_whole()
        self._begun.refuse("backward was called")
        profiling = self.tuner is not None and self.tuner.profiling
        if not self.steps_in_backward or self._accumulating or profiling:
            return nullcontext()
        return self._begun.backward()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Lets autograd keep references to sharded parameters, where a backward runs a forward."""
        if self.stage < 3:
            yield
            return
        with saved_tensors_hooks(self.gatherer.pack, self.gatherer.unpack):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds gradients up without reducing them; from stage 2 on they are reduced to shards."""
        before = self._deferred, self._accumulating
        self._deferred, self._accumulating = self.stage < 2, True
        try:
            yield
        finally:
            self._deferred, self._accumulating = before

    def _mark(self, name: str) -> None:
        if self.tuner is not None:
            self.tuner.mark(name)

    def relayout(self, order: Sequence[str], chunk_bytes: int) -> bool:
        """Cuts the chunks anew; see `gulliver.parallel.zero._relayout.relayout`, for errors too."""
        return relayout(self.shards, order, chunk_bytes)

    def _step(self) -> None:
        self._begun.check_whole()
        if self._begun.begun:
            self._begun.finish(self._settle(), self._finish_step)
            return
        for sharded in self.everything:
            sharded.chunk.check_parameters()
        self.gatherer.release_all()
        used = self._settle()
        self.shards.watched.check_members()  # clipping may have settled before
        if math.isfinite(self.max_norm):
            self.clip_grad_by_norm(self.max_norm)
        if self.scaler is not None and not self._all_finite():
            self.skipped += 1
            self._finish_step()
            return
        self._updates.allowed = True
        try:
            with step_hooks(self.inner):
                self.shards.take_writes()  # of hooks before the step, too
                self._pipeline(used)
                self._updates.end()
                self._finish_step()  # hooks after it read and write what was stepped
        finally:
            self._updates.end()

    def _pipeline(self, used: set[str]) -> None:
        """Waits for each chunk's gradients, steps it, and starts its gather."""
        timed = self.tuner is not None and self.tuner.profiling
        if timed:
            self._reducer.land_all()
            self._mark("step")
        self._updates.seconds = 0.0
        for turn in self.shards.turns():
            self._updates.step(turn, used)
        if timed:
            self._mark("stepped")
            assert self.tuner is not None
            self.tuner.updated(self._updates.seconds)
            self.gatherer.finish_all()

    def _finish_step(self) -> None:
        self._used = None
        self._reducer.unsettle()
        if self.buffers is not None:
            self.buffers.sync()
        self.gatherer.end_step()
        if self.shards.manager is not None:
            self.shards.manager.end_step()
        self.shards.end_record()

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
            groups, buffers = self.shards.watched.votes(), self.buffers

            def take(votes: list[int]) -> None:
                self.shards.watched.check_votes(votes[: len(groups)])
                if buffers is not None:
                    buffers.take_votes(votes[len(groups) :])

            beside = groups + (buffers.votes() if buffers is not None else [])
            self._used = self._reducer.settle(beside, take)
        return self._used

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; with ``set_to_none=False`` those that there are become zeros."""
        self._begun.refuse("zero_grad was called")
        self._used, self.unfinished = None, ""
        self._reducer.forget(set_to_none)
        if self.tuner is not None and set_to_none and self.gatherer.step > self._tuned:
            self._tuned = self.gatherer.step
            self.tuner.stepped()

    def _landed(self) -> list[ShardedChunk]:
        """Returns the chunks, whose gradients are in the shards."""
        self._begun.refuse("gradients were clipped or read")
        self._settle()
        self._reducer.land_all()
        return self.chunks

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`."""
        # The norm is that of the mean gradient over all ranks and parameters, tied ones counted
        # once; one number is exchanged for it. `max_norm` may be infinite, to measure only;
        # `norm_type` is 2, or infinite for the largest element.
        self.check_norm(max_norm, norm_type)
        self.grad_norm = norm = self._norm(norm_type)
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for sharded in self.chunks:
                sharded.clip(scale, later=self.shards.tiers is not None)
        return norm

    def _norm(self, kind: float) -> Tensor:
        """The norm of the mean gradient: a float64 scalar, the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=current_world().device)
        for sharded in self._landed():
            if kind == 2:
                total += sharded.squared_norm(self._squared)
                continue
            for gradient in sharded.gradients():
                total = torch.maximum(total, torch.linalg.vector_norm(gradient, kind).double())
        if self.shards.tiers is not None and kind == 2:
            # From now on it is taken while gradients are here: to bring them again takes time.
            self._reducer.squared = self._squared
        total = self._over_ranks(total, "sum" if kind == 2 else "max")
        return total.sqrt() if kind == 2 else total

    def _over_ranks(self, total: Tensor, operation: Op) -> Tensor:
        """Reduces a number over the ranks that have shards of the gradient."""
        if self.shards.parts > 1:
            all_reduce(total, operation, self.group)
        return total

    def clip_grad_by_value(self, limit: float) -> None:
        """Cuts every element of the mean gradient to [-limit, limit]."""
        for sharded in self._landed():
            for shard in sharded.gradients(write=True):
                shard.clamp_(-limit, limit)
                del shard  # who looks at memory in tiers keeps it from going

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole averaged gradients by name, where there is one; every rank calls it."""
        self._begun.refuse("gradients were read")
        used = self._settle()
        self._reducer.land_all()
        found: dict[str, Tensor] = {}
        for sharded in self.chunks:
            for shard in sharded.gradients():
                whole = shard if self.shards.tiers is None else shard.clone()
                if self.shards.parts > 1:
                    whole = shard.new_empty(sharded.chunk.layout.size)
                    all_gather(whole, shard, self.group)
                views = sharded.chunk.named_views(whole)
                found |= {name: view for name, view in views.items() if name in used}
        return {name: found[name] for name in self.names.values() if name in found}

    def state_dict(self) -> dict[str, Any]:
        """Refused: state lies in chunks, of which one rank may hold a part."""
        _refuse_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: state lies in chunks, of which one rank may hold a part."""
        _refuse_state()

    def export_state(self, keep: bool = True) -> State:
        """The whole state by parameter name; every rank calls it, those that `keep` get it."""
        self.shards.take_writes()
        return gather_state(self.shards, keep)

    @property
    def writer(self) -> _saved.Writes:
        """Says which names this rank saves, where no rank has the whole model; else None."""
        return None if self.has_whole_model else self.writes

    @property
    def copy_limit(self) -> int | None:  # type: ignore[override]
        """Bytes of host memory that saving may take, under a memory limit."""
        manager = self.shards.manager
        return None if manager is None else min(max(manager.budget // 8, 2**23), 2**26)

    def model_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """The model's state as far as this rank has it; nothing is gathered or waited for."""
        return _saved.model_leaves(self.shards, model, self.writer)

    def load_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """What of the model's state this rank fills when it is loaded: all that it holds."""
        return _saved.model_leaves(self.shards, model, None, fill=True)

    def state_leaves(self) -> Saved:
        """The optimizer's state as far as this rank has it."""
        return _saved.state_leaves(self.shards, self.writer)

    @property
    def has_whole_state(self) -> bool:
        """Whether a rank has all state of a parameter or none, of whatever shape that is."""
        return self.shards.whole or (self.shards.parts == 1 and self.has_whole_model)

    def make_state(self, entries: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Leaf]:
        """Gives the optimizer state of the kinds that a checkpoint has, to be filled."""
        return _saved.make_state(self.shards, entries, self.has_whole_state)

    def before_model_load(self) -> None:
        """Lets nothing be under way while the shards are filled."""
        self.gatherer.release_all()
        before_write(sharded.chunk.home for sharded in self.everything)
        self._begun.mend()

    def after_model_load(self) -> None:
        """Sends what the shards hold now to all ranks; every rank calls it."""
        self.shards.publish()

    def publish_masters(self) -> None:
        """Rounds parameters from float32 copies that were loaded; every rank calls it."""
        self.shards.publish_masters()

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        """Dtype of the state that belongs to a parameter."""
        return self.shards.home_dtype(parameter.dtype, trained=True)

    @property
    def trainable(self) -> Mapping[nn.Parameter, str]:
        return {**self.names, **self.shards.sleeping}

    def take_up(self, names: Collection[str]) -> set[str]:
        wake(self.shards, names)
        return set(names) - set(self.names.values())

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group, what was unfrozen since included."""
        wake(self.shards)
        return self.shards.group_names()

    def gradient_bytes(self) -> int:
        """Bytes of gradients that this rank holds now: shards and whole buffers."""
        held = [t for c in self.chunks for t in (c.chunk.gradient, c.gradient_shard)]
        return sum(t.nbytes for t in held if t is not None and not t.is_meta)

    def memory(self) -> dict[str, int]:
        """Bytes by kind that this rank will hold; see `gulliver.parallel.zero._memory`."""
        return predicted(self.shards, self.adds_micro_batches)

    @property
    def held_bytes(self) -> ByteCounter:
        """Counts the bytes that this rank holds of them now, and has held at most."""
        return self.shards.pool.counter


def _refuse_state(*_: Any) -> NoReturn:
    raise GulliverError(
        "the state lies in chunks: use booster.save_optimizer(optimizer, path) and "
        "booster.load_optimizer(optimizer, path) with the optimizer that boost returned"
    )
