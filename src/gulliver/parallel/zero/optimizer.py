"""The ZeRO optimizer, with dynamic loss scaling for float16 (Micikevicius et al., 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gulliver._compat import step_hooks
from gulliver.comm.collectives import Group, Op, all_gather, all_reduce, broadcast, group_rank
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError
from gulliver.memory.buffers import ByteCounter
from gulliver.memory.manager import Manager
from gulliver.memory.pending import before_write
from gulliver.parallel.optimizer import BoostedOptimizer, State
from gulliver.parallel.zero.checkpoint import ZeroCheckpoint, gather_state, scatter_state
from gulliver.parallel.zero.chunks import ShardedChunk, Squared, squared_norm
from gulliver.parallel.zero.elementwise import (
    check_by_chunk,
    check_optimizer,
    check_trainable,
    needs_whole,
)
from gulliver.parallel.zero.memory import predicted
from gulliver.parallel.zero.state import (
    ShardedState,
    ShardingOptions,
    give_back,
    train_unfrozen,
    watch_calls,
)
from gulliver.parallel.zero.step import InBackward
from gulliver.parallel.zero.tuner import BucketTuner


@dataclass
class LossScaler:
    """Dynamic loss scale, which keeps small float16 gradients from underflowing."""

    scale: float = 2.0**16
    # Factor of the scale after `interval` steps without overflow.
    growth: float = 2.0
    # Factor of the scale after an overflow, whose step is skipped.
    backoff: float = 0.5
    # Number of steps without overflow after which the scale grows.
    interval: int = 1000
    smallest: float = 1.0
    largest: float = 2.0**32
    # Number of steps since the last overflow or growth.
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.smallest, self.scale * self.backoff)
        elif self.good_steps >= self.interval:
            self.scale, self.good_steps = min(self.largest, self.scale * self.growth), 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, found: Mapping[str, float]) -> None:
        self.scale, self.good_steps = float(found["scale"]), int(found["good_steps"])


# Buffers, such as running statistics: after every step all ranks have rank 0's values.
#
# Like torch's DDP, which sends them in the first forward after a step. Here they are sent in the
# step itself, which all ranks run anyway, so that one rank may then evaluate or save alone; before
# the gathers start, because the step would otherwise wait for these. All buffers are sent: writes
# through ``.data`` and fused kernels do not increment version counters, so changed ones cannot be
# detected without reading them.


MESSAGE_BYTES = 1 << 25
"""Maximum bytes per buffer broadcast, which bounds its temporary memory."""


class BufferSync:
    """Broadcasts rank 0's buffers to all ranks."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._group = group
        self._places = [
            (module, key, buffer.shape)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._own: Sequence[int] = [1] * len(self._places)

    def votes(self) -> list[int]:
        """Returns this rank's input to a max all-reduce: 1 for each buffer that stays local."""
        # Local are buffers that the model has resized, such as caches, and expanded ones, whose
        # elements share memory and cannot be written.
        now = [(module._buffers.get(key), shape) for module, key, shape in self._places]
        return [
            int(b is None or b.shape != shape or (0 in b.stride() and b.numel() > 1))
            for b, shape in now
        ]

    def take_votes(self, votes: Sequence[int]) -> None:
        """Excludes buffers that any rank votes to keep local."""
        self._own = votes

    def sync(self) -> None:
        for buffers in self._messages():
            # As bytes: backends do not know every dtype.
            runs = [b.contiguous().view(-1).view(torch.uint8) for b in buffers]
            flat = torch.cat(runs)
            broadcast(flat, 0, self._group)
            if group_rank(self._group) == 0:
                continue
            before_write(buffers)
            pieces = flat.split([run.numel() for run in runs])
            for buffer, piece in zip(buffers, pieces, strict=True):
                # A clone starts at an address that every dtype can be read from.
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

    def _messages(self) -> Iterator[list[Tensor]]:
        """Yields groups of buffers to send together, of one device and up to `MESSAGE_BYTES`."""
        pending: dict[torch.device, list[Tensor]] = {}
        for (module, key, _), own in zip(self._places, self._own, strict=True):
            buffer = module._buffers.get(key)
            if own or buffer is None or not buffer.numel():
                continue
            buffers = pending.setdefault(buffer.device, [])
            if buffers and sum(b.nbytes for b in buffers) + buffer.nbytes > MESSAGE_BYTES:
                yield pending.pop(buffer.device)
                buffers = pending.setdefault(buffer.device, [])
            buffers.append(buffer.detach())
        yield from pending.values()


# The sharded optimizer: steps this rank's part of every chunk, and gathers the other ranks' parts.
#
# Read `ZeroOptimizer._step` first, which contains an entire step. `ShardedState` (`state.py`) holds
# a rank's state. Gradients are reduced to the shards in `reduce.py`, chunks are stepped in
# `step.py`, and parameters are gathered in `gather.py`; `checkpoint.py` saves everything and
# re-partitions chunks.


class ZeroOptimizer(BoostedOptimizer):
    """Shards optimizer state, gradients and parameters, depending on the ZeRO stage.

    After Rajbhandari et al., ZeRO, 2020. 16-bit parameters are trained with float32 master weights.

    `backward` moves gradients to the shards; ``parameter.grad`` is then a placeholder that rejects
    norms and changes, so `torch.nn.utils.clip_grad_norm_` raises instead of returning a wrong norm.

    Args:
        inner: the user's optimizer; its groups are modified.
        names: trainable parameters with their names, in the model's order.
        stage: 0 shards nothing. 1 shards optimizer state and gradients, which are full only inside
            `no_sync`. 2 reduces gradients in each backward, even inside `no_sync`. 3 also shards
            parameters and prefetches them.
        group: process group to shard over; None for all ranks.
        frozen: frozen parameters, with their names; stage 3 shards them.
        manager: memory manager that offloads state (stage 3); None keeps it on the device.
        options: fields of `ShardingOptions`, by name.

    Raises:
        GulliverError: the optimizer, or the dtype of a parameter, is not supported.
    """

    spreads_state = True
    adds_micro_batches = False
    checkpoint: ZeroCheckpoint

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        stage: int = 1,
        *,
        group: Group = None,
        frozen: Mapping[nn.Parameter, str] | None = None,
        manager: Manager | None = None,
        **options: Any,
    ) -> None:
        self.options = chosen = ShardingOptions(**options)
        super().__init__(inner, names)
        check_optimizer(inner, stage, chosen.assume_elementwise, chosen.assume_per_parameter)
        check_by_chunk(inner, stage, manager is not None, chosen.step_in_backward)
        check_trainable(self.names)
        for parameter in self.names:
            vars(parameter)["_boosted"] = True
        # Some optimizers have state before their first step; boost may also happen later.
        exported = super().export_state()
        state = {n: {k: v for k, v in e.items() if v is not None} for n, e in exported.items()}
        sharded = dict(frozen or {}) if stage == 3 else {}
        whole = needs_whole(inner, chosen.assume_elementwise)
        self.shards = ShardedState(inner, self.names, sharded, stage, group, chosen, manager, whole)
        self.stage, self.group = stage, group
        self.rank, self.size = self.shards.rank, self.shards.size
        self.gatherer, self._reducer = self.shards.gatherer, self.shards.reducer
        self.names = self.shards.names  # which grow when parameters are unfrozen
        self._frozen = [p for p in self._frozen if p not in self.shards.frozen_trainable]
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self._squared: Squared = squared_norm
        self.tuner: BucketTuner | None = None
        self._buffers: BufferSync | None = None
        self._tuned = 0
        self._deferred = self._accumulating = False
        self._used: set[str] | None = None
        self._early = InBackward(self.shards) if chosen.step_in_backward else None
        self._suspended = ""
        mend = None if self._early is None else self._early.mend
        self.checkpoint = ZeroCheckpoint(self, on_load=mend)  # type: ignore[override]
        self.gives_back = stage == 3
        fp16 = any(p.dtype is torch.float16 for p in self.names)
        self.scaler = LossScaler() if fp16 else None
        scatter_state(self.shards, state)
        inner.zero_grad = self.zero_grad  # type: ignore[method-assign]
        # The original optimizer's methods would also be wrong; use the wrapper's.
        inner.register_state_dict_pre_hook(_refuse_state)
        inner.register_load_state_dict_pre_hook(_refuse_state)

    @property
    def all_chunks(self) -> list[ShardedChunk]:
        return self.shards.all_chunks

    @property
    def chunks(self) -> list[ShardedChunk]:
        return self.shards.chunks

    def watch(self, model: nn.Module) -> None:
        super().watch(model)
        self._watches = watch_calls(model, self.shards)

    def release(self, model: nn.Module) -> None:
        give_back(self.shards, model, self._watches)

    def tune(self, tuner: BucketTuner) -> None:
        self.tuner = tuner

    def sync_buffers(self, buffers: BufferSync) -> None:
        self._buffers = buffers

    @contextmanager
    def backward_pass(self) -> Iterator[float]:
        """Context for a backward pass; when it ends, all reductions have started."""
        # ``loss.backward()`` without it is also correct, but then all communication waits for the
        # step.
        scale = 1.0 if self.scaler is None else self.scaler.scale
        train_unfrozen(self.shards)
        self.gatherer.enter_backward()
        try:
            stepping, on_sent = self._stepping()
            reducing = self._reducer.backward(not self._deferred, scale, on_sent)
            with stepping, reducing, self.saving():
                yield scale
        finally:
            self.gatherer.leave_backward()

    @property
    def steps_in_backward(self) -> bool:
        """Whether the chunks are updated during backward in this step."""
        waits = math.isfinite(self.options.max_norm) or self.scaler is not None
        return self.options.step_in_backward and not waits

    def _stepping(
        self,
    ) -> tuple[AbstractContextManager[None], Callable[[ShardedChunk], None] | None]:
        """Returns the context that updates chunks in backward, and its callback."""
        if self._early is not None:
            self._early.check_whole()
        self._refuse("backward was called")
        if self._early is None or not self.steps_in_backward or self._accumulating:
            return nullcontext(), None
        return self._early.backward(), self._early.reduced

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which autograd saves references to parameters, for recomputation."""
        if self.stage < 3:
            yield
            return
        with saved_tensors_hooks(self.gatherer.pack, self.gatherer.unpack):
            yield

    def full_parameters(self) -> AbstractContextManager[None]:
        return self.gatherer.full_parameters()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients locally; stages 2 and 3 still reduce them."""
        before = self._deferred, self._accumulating
        self._deferred, self._accumulating = self.stage < 2, True
        try:
            yield
        finally:
            self._deferred, self._accumulating = before

    def _step(self) -> None:
        if self._early is not None:
            self._early.check_whole()
            if self._early.begun:
                used = self._vote_and_flush()
                self._send_buffers()
                self._early.finish(used, self._finish_step)
                return
        for sharded in self.all_chunks:
            sharded.chunk.check_parameters()
        self.gatherer.release_all()
        used = self._vote_and_flush()
        self._send_buffers()
        self.shards.groups.check_members()  # clipping may have voted before
        if math.isfinite(self.options.max_norm):
            self.clip_grad_by_norm(self.options.max_norm)
        if self.scaler is not None and not self._all_finite():
            self.skipped += 1
            self._finish_step()
            return
        self.shards.begin_updates()
        try:
            with step_hooks(self.inner):
                self.shards.take_writes()  # also writes by hooks before the step
                # Waits for each chunk's gradients, steps it, and starts its gather.
                for turn in self.shards.step_groups():
                    self.shards.update(turn, used)
                self.shards.end_updates()
                self._finish_step()  # hooks after the step read and write the stepped values
        finally:
            self.shards.end_updates()

    def _send_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.sync()

    def _finish_step(self) -> None:
        self._used = None
        self._reducer.end_step()
        self.gatherer.end_step()
        if self.shards.manager is not None:
            self.shards.manager.end_step()

    def _all_finite(self) -> bool:
        assert self.scaler is not None
        clipped = math.isfinite(self.options.max_norm)
        norm = self.grad_norm if clipped else self.clip_grad_by_norm(math.inf)
        assert norm is not None
        finite = bool(torch.isfinite(norm))
        self.scaler.update(finite)
        return finite

    def _vote_and_flush(self) -> set[str]:
        """Reduces all gradients to the shards, if not done since the last backward."""
        if self._used is None or not self._reducer.voted:
            groups, buffers = self.shards.groups.votes(), self._buffers

            def take(votes: list[int]) -> None:
                self.shards.groups.check_votes(votes[: len(groups)])
                if buffers is not None:
                    buffers.take_votes(votes[len(groups) :])

            extra = groups + (buffers.votes() if buffers is not None else [])
            self._used = self._reducer.vote_and_flush(extra, take)
        return self._used

    @contextmanager
    def suspended(self, why: str, left: str) -> Iterator[None]:
        """Rejects `step`, clipping and `zero_grad`; after an exception, also the next `step`."""
        self.unfinished = self._suspended = why
        try:
            yield
        except BaseException:  # leaving a loop closes its generator, which is not an Exception
            self.unfinished = left
            raise
        else:
            self.unfinished = ""
        finally:
            self._suspended = ""

    def _refuse(self, what: str) -> None:
        if self._suspended:
            raise GulliverError(self._suspended)
        if self._early is not None:
            self._early.refuse(what)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; with ``set_to_none=False``, zeroes existing ones."""
        self._refuse("zero_grad was called")
        self._used, self.unfinished = None, ""
        self._reducer.forget(set_to_none)
        if self.tuner is not None and set_to_none and self.gatherer.step > self._tuned:
            self._tuned = self.gatherer.step
            self.tuner.stepped()

    def _landed(self) -> list[ShardedChunk]:
        self._refuse("gradients were clipped or read")
        self._vote_and_flush()
        self._reducer.wait_all_reductions()
        return self.chunks

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`."""
        # The norm is that of the mean gradient over all ranks and parameters, counting tied ones
        # once, and needs one number per rank. With an infinite `max_norm` it is only measured;
        # `norm_type` is 2, or infinite for the largest element.
        self.check_norm(max_norm, norm_type)
        self.grad_norm = norm = self._norm(norm_type)
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for sharded in self.chunks:
                sharded.clip(scale, later=self.shards.states.tiered)
        return norm

    def _norm(self, kind: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=current_world().device)
        for sharded in self._landed():
            if kind == 2:
                total += sharded.squared_norm(self._squared)
                continue
            for gradient in sharded.gradients():
                total = torch.maximum(total, torch.linalg.vector_norm(gradient, kind).double())
        if self.shards.states.tiered and kind == 2:
            self._reducer.measure(self._squared)
        total = self._over_ranks(total, "sum" if kind == 2 else "max")
        return total.sqrt() if kind == 2 else total

    def _over_ranks(self, total: Tensor, operation: Op) -> Tensor:
        if self.shards.parts > 1:
            all_reduce(total, operation, self.group)
        return total

    def clip_grad_by_value(self, limit: float) -> None:
        """Clamps every element of the mean gradient to [-limit, limit]."""
        for sharded in self._landed():
            for shard in sharded.gradients(write=True):
                shard.clamp_(-limit, limit)
                del shard  # a view would prevent the eviction of memory in tiers

    def full_gradients(self) -> dict[str, Tensor]:
        """Returns the existing mean gradients by name, unsharded (collective)."""
        self._refuse("gradients were read")
        used = self._vote_and_flush()
        self._reducer.wait_all_reductions()
        found: dict[str, Tensor] = {}
        for sharded in self.chunks:
            for shard in sharded.gradients():
                whole = shard if not self.shards.states.tiered else shard.clone()
                if self.shards.parts > 1:
                    whole = shard.new_empty(sharded.chunk.layout.size)
                    all_gather(whole, shard, self.group)
                views = sharded.chunk.named_views(whole)
                found |= {name: view for name, view in views.items() if name in used}
        return {name: found[name] for name in self.names.values() if name in found}

    def export_state(self, keep: bool = True) -> State:
        self.shards.take_writes()
        return gather_state(self.shards, keep)

    def gradient_bytes(self) -> int:
        """Returns the bytes of gradients on this rank: shards and full buffers."""
        held = [t for c in self.chunks for t in (*c.chunk.gradients.collected, c.gradient_shard)]
        return sum(t.nbytes for t in held if t is not None and not t.is_meta)

    def memory(self) -> dict[str, int]:
        return predicted(self.shards, self.adds_micro_batches)

    @property
    def held_bytes(self) -> ByteCounter:
        return self.shards.pool.counter


def _refuse_state(*_: Any) -> NoReturn:
    raise GulliverError(
        "the state is sharded: use booster.save_optimizer(optimizer, path) and "
        "booster.load_optimizer(optimizer, path) with the optimizer that boost returned"
    )
