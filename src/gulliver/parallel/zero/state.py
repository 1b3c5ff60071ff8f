"""The sharded state of a rank: chunks of a model, this rank's pieces, parameter groups and state.

`ShardedState` splits parameters into chunks, replaces full parameters in the user's optimizer with
this rank's pieces, and owns the `GradientReducer` and the `Gatherer`. Chunks can be re-partitioned;
see `checkpoint.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakMethod
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from gulliver._compat import (
    can_hook_saving,
    compiled_call,
    is_compiled,
    is_transformed,
    outside_transforms,
    replace_compiled_call,
    replace_recomputed,
    step_without_hooks,
    untransformed,
    without_torch_functions,
)
from gulliver.comm.collectives import Group, broadcast, group_rank, group_size
from gulliver.comm.host import host_team, log_host_team
from gulliver.comm.torus import Torus
from gulliver.errors import GulliverError
from gulliver.memory.buffers import BufferPool, ChunkLayout, ShardPiece
from gulliver.memory.chunk import Chunk
from gulliver.memory.managed_chunk import ManagedBufferPool, ManagedChunk
from gulliver.memory.manager import Manager
from gulliver.memory.pending import (
    ASKS,
    PendingParameter,
    any_read_lock,
    before_write,
    hide_from_compilers,
)
from gulliver.options import Options
from gulliver.parallel.zero.chunks import ShardedChunk, TensorSize, chunk_layouts, shard_dtype
from gulliver.parallel.zero.elementwise import check_trainable
from gulliver.parallel.zero.gate import ZeroWires
from gulliver.parallel.zero.gather import Gatherer, refer
from gulliver.parallel.zero.reduce import GradientReducer
from gulliver.parallel.zero.tiers import (
    OptimizerGroups,
    PieceStates,
    StateByParameter,
    TieredStates,
)
from gulliver.precision.wire.formats import IDENTITY

HOST_CALLS = 4
"""Number of optimizer calls per step if all ranks are on one host."""


@dataclass(frozen=True)
class ShardingOptions(Options):
    """Options for splitting, communicating and updating chunks.

    Attributes:
        chunk_bytes: size of a chunk, in bytes.
        max_norm: global norm that gradients are clipped to in every step; infinity disables it.
        assume_elementwise: assume that an unknown optimizer is element-wise.
        assume_per_parameter: assume that an unknown optimizer updates each parameter independently,
            as Muon does.
        ahead: number of chunks that stage 3 prefetches.
        overlap: False waits for every collective immediately, for comparison.
        step_in_backward: step chunks during backward, once their gradients are complete. `max_norm`
            and fp16 wait for all gradients; see `step.py`.
        order: parameter names in the order of use, which chunks follow.
        uses: names in the order in which a forward reads them, for predictions.
        unequal: memory was planned for steps with unequal work per rank.
        wires: wire formats of chunks.
    """

    chunk_bytes: int = 4 * 2**20
    max_norm: float = math.inf
    assume_elementwise: bool = False
    assume_per_parameter: bool = False
    ahead: int = 2
    overlap: bool = True
    step_in_backward: bool = False
    order: Sequence[str] = ()
    uses: Sequence[str] = ()
    unequal: bool = False
    wires: ZeroWires = field(default_factory=ZeroWires)


# [Note: the pipeline of a step] With stages 1 and 2 chunks are updated one at a time, in the order
# of use: the rank waits for a chunk's reduction, steps it in place, starts its gather, and
# continues with the next. So the link carries the first chunks' parameters while the others are
# updated, and the next forward begins while most are in flight. Only clipping needs all gradients
# first, and one number per rank. With stages 0 and 3 no gather follows an update, and the chunk
# that is used first is reduced last, so a single optimizer call for all chunks is no later, and
# cheaper. With memory tiers chunks are also stepped one at a time, because there is no room for the
# state of all chunks in the fast tier.
#
# [Note: order of updates] Backward completes the last chunk first, so updates in that order could
# begin earlier. But gathers would have the same order, and the parameters that the next forward
# waits for first would be sent last. In the order of use the forward's first chunk is sent first;
# the price is that the first update waits for the reduction that was issued last. For updates
# during backward, see `step.py`.
class ShardedState:
    """Chunks of a model's parameters, sharded over a process group."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        frozen: Mapping[nn.Parameter, str],
        stage: int,
        group: Group,
        options: ShardingOptions,
        manager: Manager | None = None,
        whole: bool = False,
    ) -> None:
        self.inner, self.names, self.frozen_names = inner, dict(names), dict(frozen)
        self.stage, self.group, self.options, self.whole = stage, group, options, whole
        self.manager = manager
        self.rank, self.size = group_rank(group), group_size(group)
        self.parts = self.size if stage else 1
        self.part = self.rank if self.parts > 1 else 0
        self.has_whole = whole or self.parts == 1
        if self.size > 1 and not isinstance(group, Torus):
            log_host_team(group)
        self.groups = OptimizerGroups(inner, group)
        # Frozen parameters that the optimizer was given, which may be unfrozen later.
        self.frozen_trainable = {
            p: self.frozen_names[p] for p in chain(*self.groups.given) if p in frozen
        }
        self.groups.list_members(self.names)
        self._parameter_of: dict[nn.Parameter, nn.Parameter] = {}
        self.pool, self.states = self._memory()
        # All chunks, in the order of use, and those of trained parameters.
        self.all_chunks, self.chunks = list[ShardedChunk](), list[ShardedChunk]()
        # With tiers on a single rank, the manager prefetches, and no other rank waits.
        alone = self.states.tiered and self.size == 1
        self.gatherer = Gatherer(
            stage == 3,
            group,
            0 if alone else options.ahead,
            options.overlap,
            every=not alone,
            tight=self.states.tiered,
        )
        self.reducer = GradientReducer(stage, group, options.overlap, options.wires)
        # Whether the optimizer may be stepped now; users may not step it directly.
        self._updating = False
        setattr(inner, ASKS, self.changed)
        inner.register_step_pre_hook(self._refuse_step)
        self.adopt(
            [self._placed(*found) for found in self.ordered(options.order, options.chunk_bytes)]
        )

    def _memory(self) -> tuple[BufferPool, PieceStates]:
        inner, manager = self.inner, self.manager
        if manager is None:
            inner.state = StateByParameter(self._parameter_of)
            return BufferPool(), PieceStates(inner, self.groups, self.whole)
        # A weak method, because the manager may outlive the optimizer.
        release = WeakMethod(self._release_idle)
        manager.release_with(lambda: (found := release()) and found())
        # Between steps, state is on meta and users cannot read it.
        states = TieredStates(inner, self.groups, self.whole, manager)
        return ManagedBufferPool(manager), states

    # Chunks.

    def _kinds(self) -> Iterator[tuple[bool, dict[nn.Parameter, str]]]:
        """Yields groups of parameters that must not share a chunk, and whether they are trained."""
        yield True, self.names
        yield False, self.frozen_trainable
        yield False, {p: n for p, n in self.frozen_names.items() if p not in self.frozen_trainable}

    def layouts(
        self, names: Mapping[nn.Parameter, str], chunk_bytes: int
    ) -> Iterator[tuple[ChunkLayout, dict[str, nn.Parameter]]]:
        """Splits parameters, in their order, into chunks of one dtype and device."""
        may_step = self.names.keys() | self.frozen_trainable.keys()
        sizes = [
            TensorSize(n, p.numel(), p.dtype, p.device, whole=self.whole and p in may_step)
            for p, n in names.items()
        ]
        parameters = {name: parameter for parameter, name in names.items()}
        for layout, _ in chunk_layouts(sizes, chunk_bytes, self.stage, self.size):
            yield layout, parameters

    def ordered(
        self, order: Sequence[str], chunk_bytes: int
    ) -> list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]]:
        """Returns layout, parameters and trainability of all chunks, in the order of use."""
        # Parameters not in `order` come last.
        self.chunk_bytes = chunk_bytes
        place = {name: number for number, name in enumerate(order)}
        found: list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]] = []
        for trained, names in self._kinds():
            inorder = dict(sorted(names.items(), key=lambda item: place.get(item[1], len(place))))
            found += [(*chunk, trained) for chunk in self.layouts(inorder, chunk_bytes)]
        found.sort(key=lambda chunk: min(place.get(s.name, len(place)) for s in chunk[0].slots))
        return found

    def _placed(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], trained: bool
    ) -> ShardedChunk:
        """Moves parameters into a chunk, with the values of the first rank."""
        chunk = self._new_chunk(layout, parameters)
        broadcast(chunk.data, 0, self.group)
        return self._sharded(chunk, trained)

    def replaced(self, order: Sequence[str], chunk_bytes: int) -> list[ShardedChunk]:
        views = dict[str, Tensor]()

        def read(parameter: Tensor) -> Tensor:
            if self.stage < 3:
                return parameter.detach()
            name = vars(parameter)["_chunk_name"]
            if name not in views:
                views.clear()
                sharded = next(c for c in self.all_chunks if name in c.chunk.parameters)
                views.update(sharded.chunk.named_views(self.gatherer.copied(sharded)))
            return views[name]

        found = self.ordered(order, chunk_bytes)
        return [self._sharded(self._new_chunk(*one[:2], read), one[2]) for one in found]

    def _new_chunk(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        read: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> Chunk:
        if isinstance(self.pool, ManagedBufferPool):
            return ManagedChunk(layout, parameters, self.part, self.pool, read)
        return Chunk(layout, parameters, self.part, self.pool, read)

    def _sharded(self, chunk: Chunk, trained: bool) -> ShardedChunk:
        layout = chunk.layout
        wire = self.options.wires.of_parameters(layout.parts, layout.part_size, chunk.dtype)
        separate = self.stage == 3 or wire is not IDENTITY
        chunk.set_master_shard(shard_dtype(chunk.dtype, trained), separate)
        if wire is not IDENTITY:
            chunk.pack_parameters(wire, self.stage < 3)
        if self.stage == 3:
            chunk.release()
        sharded = ShardedChunk(chunk, [], trained)
        if trained:
            self._cut_pieces(sharded)
        return sharded

    def _cut_pieces(self, sharded: ShardedChunk) -> None:
        chunk = sharded.chunk
        with chunk.opened():
            sharded.own(
                (piece, nn.Parameter(self._cut(chunk, piece)))
                for piece in chunk.layout.pieces(chunk.part)
            )
            self.states.hide(sharded)
            self._parameter_of.update((q, chunk.parameters[p.name]) for p, q in sharded.pieces)

    def _cut(self, chunk: Chunk, piece: ShardPiece) -> Tensor:
        run = chunk.master_shard[piece.start : piece.end]
        # Unsplit parameters keep their shape, which some optimizers read.
        return run.view(chunk.shapes[piece.name]) if self.has_whole else run

    def adopt(self, chunks: Sequence[ShardedChunk]) -> None:
        for old in self.all_chunks:
            old.chunk.discard()
        self.all_chunks = list(chunks)
        # Numbers of different optimizers of a model differ, because they identify collectives.
        first = crc32(chunks[0].chunk.layout.slots[0].name.encode()) if chunks else 0
        for index, sharded in enumerate(chunks):
            sharded.index, sharded.number = index, first + index
        self.gatherer.take(self.all_chunks)
        self._list_trained()

    def train(self, frozen: Sequence[ShardedChunk]) -> None:
        self.groups.check_members()  # the groups are filled again
        for sharded in frozen:
            self.gatherer.release(sharded)
            sharded.chunk.widen_master_shard(shard_dtype(sharded.chunk.dtype, trained=True))
            sharded.trained = True
            self._cut_pieces(sharded)
            for name, parameter in sharded.chunk.parameters.items():
                self.names[parameter] = name
                vars(parameter)["_boosted"] = True
                del self.frozen_trainable[parameter], self.frozen_names[parameter]
        self.groups.list_members(self.names)
        self._list_trained()

    def _list_trained(self) -> None:
        self.chunks = [c for c in self.all_chunks if c.trained]
        mine = {owned for c in self.chunks for _, owned in c.pieces}
        for old in self._parameter_of.keys() - mine:
            del self._parameter_of[old]
        self.groups.list_pieces(self.chunks)
        self.reducer.take(self.chunks)

    def _release_idle(self) -> None:
        self.gatherer.release_idle()
        self.reducer.release_idle()

    def step_groups(self) -> list[list[int]]:
        """Returns groups of chunks, by index, that the optimizer updates in one call."""
        # Chunks are updated one at a time if tiers hold their state, if gathers overlap steps, or
        # if a checkpoint may still copy other chunks. If only gathers overlap and all ranks are on
        # one host, groups are larger, as gathers and optimizer calls compete for its CPU. An
        # unknown optimizer updates all chunks in one call: it may combine parameters or count
        # calls.
        numbers = list(range(len(self.chunks)))
        gathers = self.stage in (1, 2) and self.size > 1
        apart = any_read_lock() or self.states.tiered
        if not self.states.by_chunk or not (gathers or apart):
            return [numbers]
        together = not apart and host_team(self.group) is not None
        length = -(-len(numbers) // HOST_CALLS) if together and numbers else 1
        return [numbers[n : n + length] for n in range(0, len(numbers), length)]

    def _refuse_step(self, *_: Any) -> None:
        """Rejects `step` of the user's optimizer, which would silently do nothing."""
        if not self._updating:
            raise GulliverError("step the optimizer that boost returned, not the original one")

    def begin_updates(self) -> None:
        self._updating = True

    def update(self, numbers: Sequence[int], used: set[str], gather: bool = True) -> None:
        """Updates chunks with complete gradients in one optimizer step."""
        chunks = [self.chunks[number] for number in numbers]
        for sharded in chunks:
            self.reducer.wait_reduction(sharded)
        if self.states.tiered and chunks and chunks[0].gradient_shard is None:
            return  # no need to load it
        # With tiers this is one chunk. A pipeline stage without trained parameters has none, but
        # its optimizer is also stepped.
        with self.states.opened(chunks[0]) if chunks else nullcontext():
            for sharded in chunks:
                sharded.show_gradients(used)
            self.groups.show_pieces(numbers)
            before_write(self.states.written(chunks))
            with self.states.making(chunks[0]) if chunks else nullcontext():
                step_without_hooks(self.inner)
                for sharded in chunks:
                    if not self.states.by_chunk:  # others write in place
                        sharded.take_assigned()
                    self.states.place_new(sharded, used)
        if gather and self.stage < 3:
            for sharded in chunks:
                self.gatherer.start(sharded)

    def end_updates(self) -> None:
        """Puts the model's parameters back into the groups, and hides the gradients."""
        if not self._updating:
            return
        self._updating = False
        self.groups.show_parameters()
        for sharded in self.chunks:
            sharded.hide_gradients()

    def changed(self) -> Iterator[Tensor]:
        """Yields tensors that steps write, for checkpoints; includes user tensors in the groups."""
        if not self.states.tiered:
            yield from self.states.written(self.chunks)
            yield from (c.chunk.data for c in self.chunks if self.stage < 3)

    # Users' writes to parameters.

    def take_writes(self) -> None:
        """Copies values that the user wrote to parameters, equal on all ranks, to the shards."""
        # With stage 3 no chunk stays gathered, because the shards may change next and would differ.
        self.gatherer.release_all()
        for sharded in self.all_chunks:
            if sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()

    def publish_exact(self) -> None:
        if self.stage < 3 and any(c.chunk.wire is not IDENTITY for c in self.all_chunks):
            self.publish()

    def publish_masters(self) -> None:
        """Updates 16-bit parameters from loaded float32 master weights (collective)."""
        if any(c.chunk.has_master for c in self.chunks):
            self.publish()

    def publish(self) -> None:
        for sharded in self.all_chunks:
            if self.stage < 3:
                self.gatherer.start(sharded, exact=True)
                self.gatherer.finish(sharded)
        torch.autograd.graph.increment_version([*self.names, *self.frozen_names])
        self.gatherer.note_versions()


# Parameters unfrozen after boost, whose chunks are trained from then on.


# [Note: frozen trainable chunks] Frozen parameters that the optimizer was given have separate
# chunks with parameters only: no gradient, state, master weights, votes or messages. If one of them
# requires a gradient when a forward or backward begins, its entire chunk is trained from then on. A
# parameter without a gradient is not stepped, so frozen neighbors do not change, and state is
# created in the first step with a gradient, as in torch. Freezing needs no handling, because a
# parameter without a gradient is not stepped.
def train_unfrozen(shards: ShardedState, also: Collection[str] = ()) -> None:
    """Starts training unfrozen parameters, which must be equal on all ranks (collective)."""
    if not shards.frozen_trainable:
        return
    with without_torch_functions():
        unfrozen = {
            p for p, name in shards.frozen_trainable.items() if p.requires_grad or name in also
        }
    if not unfrozen or not shards.gatherer.idle:
        return
    found = [c for c in shards.all_chunks if not unfrozen.isdisjoint(c.chunk.members)]
    for sharded in found:
        check_trainable({p: n for n, p in sharded.chunk.parameters.items()})
    shards.train(found)


# Restores a model: ordinary parameters replace those in chunks.


def give_back(shards: ShardedState, model: nn.Module, hooks: Iterable[RemovableHandle]) -> None:
    # They are new tensors, so that hooks of the run on the old ones have no effect, and a second
    # boost finds the model as if it had never been boosted.
    shards.gatherer.release_all()
    shards.publish_exact()
    members = {p for sharded in shards.all_chunks for p in sharded.chunk.members}
    fresh = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is None or held not in members:
                continue
            if held not in fresh:  # tied ones stay tied
                value = held.detach().clone()
                fresh[held] = nn.Parameter(value, requires_grad=held.requires_grad)
            module._parameters[key] = fresh[held]
    for hook in hooks:
        hook.remove()
    shards.reducer.take(())


# Hooks on the model's own call, and around compiled parts of it.
#
# Waiting for parameters needs no hooks, see `gather.py`. Two cases do: a pass of stage 3 begins and
# ends with the model's call, and a compiled region must have its parameters when it is entered,
# because its reads are not visible from Python. If the model itself is compiled, before boost or
# after, these are all parameters. Other code that is compiled after boost, such as a function, is
# unknown here: it gets graph breaks at reads of pending parameters, which is correct but slow.


class _Calls:
    """Forward hooks of a model, which start and end passes."""

    def __init__(self, shards: ShardedState | None, model: nn.Module | None = None) -> None:
        self._shards = shards
        self._modules = [] if model is None else list(model.modules())
        self._open: list[tuple[Gatherer, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls(None)  # a copy of the model has full parameters

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shards is None or self._shards.stage < 3:
            return _Calls, (None,)
        raise GulliverError(
            "a stage 3 model cannot be pickled, as its parameters are sharded: save it with "
            "booster.save_model(model, path)"
        )

    def enter(self, module: nn.Module, args: Any) -> None:
        # True in traced code, also at runtime, because compiled code reads all parameters together.
        self._enter(torch.compiler.is_compiling())

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._leave()

    def _enter(self, whole: bool) -> None:
        if self._shards is None:
            return
        gatherer = self._shards.gatherer
        if gatherer.sharded:
            self._begin(gatherer)
        if whole:
            gatherer.use_together(gatherer.chunks)
        elif is_transformed():
            self._check_wrapped(gatherer)

    def _check_wrapped(self, gatherer: Gatherer) -> None:
        if not gatherer.sharded:
            gatherer.finish_all()
        for parameter in self._modules[0].parameters():
            inner = untransformed(parameter)
            if inner is not parameter and type(inner) is PendingParameter:
                raise GulliverError(
                    "torch.func got parameters that stage 3 has sharded: pass copies, "
                    "such as {name: p.detach().clone() for name, p in model.named_parameters()}"
                )

    def _begin(self, gatherer: Gatherer) -> None:
        assert self._shards is not None
        if self._shards.frozen_trainable:
            train_unfrozen(self._shards)
        for module in self._modules[1:]:
            _wait_before(module, self._shards)
        with outside_transforms():
            gatherer.enter_forward()
        # Inside of `torch.func`, hooks cannot be set, so used parameters stay until the step.
        hooks = saved_tensors_hooks(gatherer.pack, gatherer.unpack)
        context = hooks if can_hook_saving() else nullcontext()
        # Entered here and left in `leave`, which torch calls for failed forwards, too
        # (`always_call`). Nested calls of the model push one entry each, and pop their own.
        context.__enter__()
        self._open.append((gatherer, context))

    def _leave(self) -> None:
        if not self._open:
            return
        gatherer, context = self._open.pop()
        context.__exit__(None, None, None)
        failed = sys.exc_info()[1]
        try:
            with outside_transforms():
                gatherer.leave_forward()
        except GulliverError as error:
            # The exception of the forward also ends this; torch would warn about it.
            if str(error) != str(failed):
                raise


def watch_calls(model: nn.Module, shards: ShardedState) -> list[RemovableHandle]:
    _hide_from_compilers()
    hooks = list[RemovableHandle]()
    for module in model.modules():
        if is_compiled(module):
            waiting = _waiting(module, shards)
            hook = module.register_forward_pre_hook(lambda *_, wait=waiting: wait(), prepend=True)
            hooks.append(hook)
        # `_Calls.enter` waits for the parameters that the model itself reads.
        if module is not model:
            _wait_before(module, shards)
    calls = _Calls(shards, model)
    hooks.append(model.register_forward_pre_hook(calls.enter, prepend=True))
    if shards.stage == 3:
        replace_recomputed(refer)
        hooks.append(model.register_forward_hook(calls.leave, always_call=True))
    return hooks


def _wait_before(module: nn.Module, shards: ShardedState) -> None:
    """Makes a compiled module wait for its parameters before each call; idempotent."""
    inner = compiled_call(module)
    if inner is not None and not hasattr(inner, "_waits"):
        call = _after(_waiting(module, shards), inner)
        vars(call)["_waits"] = True
        replace_compiled_call(module, call)


@cache
def _hide_from_compilers() -> None:
    """Hides parameter movement from compilers; deferred, because importing them takes seconds."""
    for owner, names in ((_Calls, ("_enter", "_leave")), (Gatherer, ("pack", "unpack"))):
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    hide_from_compilers()


def _waiting(region: nn.Module, shards: ShardedState) -> Callable[[], None]:
    parameters = {id(p) for p in region.parameters()}

    def wait() -> None:
        gatherer = shards.gatherer
        gatherer.use_together(
            [
                sharded
                for sharded in gatherer.chunks
                if any(id(p) in parameters for p in sharded.chunk.parameters.values())
            ]
        )

    return wait


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable(recursive=False)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both
