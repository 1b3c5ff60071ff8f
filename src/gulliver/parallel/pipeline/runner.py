"""Adapts stages to torch's schedules: messages, forward, and a backward in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gulliver._compat import without_torch_functions
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import Messages, PackedTensors, operations, post
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.batches import MicroBatch
from gulliver.parallel.pipeline.stage import Stage
from gulliver.parallel.pipeline.stage_forward import Carry
from gulliver.precision.wire.formats import IDENTITY

Gradients = tuple[Tensor | None, ...]


# [Note: why two parts] The previous stage waits for the gradients of the inputs, but those of the
# weights are only needed by the optimizer's step. So zero-bubble schedules (Qi et al., 2024, arXiv
# 2401.10241) send the former as early as possible, and compute the latter while a stage would wait
# (the bubble). An ordinary backward computes both and cannot be interrupted.
#
# Let C be the nodes of the autograd graph between the inputs and the outputs. The first part only
# runs C. A weight is attached to C at some nodes, its *ends*; the gradient that enters an end is
# recorded as it passes. The second part starts backward at the ends, with the recorded gradients.
#
# Weights that share ends are computed together. As one end may be upstream of another, the gradient
# that would reach it from there is replaced by the recorded one, which already includes it. So each
# path from the outputs to a weight counts once, also for shared weights, weights that are used
# twice, and weights upstream of an input.
#
# The second part accumulates like any backward, including accumulation hooks.
@dataclass
class _Group:
    """Weights whose gradients are computed together, and the graph nodes to start from."""

    ends: set[Node]
    weights: list[nn.Parameter]


@dataclass
class WeightBackward:
    """The second part of backward: gradients of the weights."""

    groups: list[_Group]
    noted: dict[Node, Gradients] = field(default_factory=dict)

    def run(self) -> None:
        for group in self.groups:
            edges, values = [], []
            for end in group.ends:
                for number, gradient in enumerate(self.noted.get(end, ())):
                    if gradient is not None:
                        edges.append(GradientEdge(end, number))
                        values.append(gradient)
            if not edges:
                continue
            several = len(group.ends) > 1
            handles = [
                end.register_prehook(_always(self.noted[end]))
                for end in group.ends
                if several and end in self.noted
            ]
            try:
                # Other groups may pass the same nodes; the graph is freed with this object.
                torch.autograd.backward(edges, values, retain_graph=True, inputs=group.weights)
            finally:
                for handle in handles:
                    handle.remove()
        self.groups, self.noted = [], {}


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> WeightBackward:
    """Runs the first part of backward: accumulates gradients of the inputs only."""
    given = [torch.ones_like(outputs[0])] if gradients is None else list(gradients)
    roots = [get_gradient_edge(output) for output in outputs]
    above = _above([root.node for root in roots])
    between = _climb([get_gradient_edge(t).node for t in inputs], above, set())[0]
    rest = WeightBackward(_groups(weights, above, between))
    ends = set().union(*(group.ends for group in rest.groups))
    for root, gradient in zip(roots, given, strict=True):
        # The backward of the inputs does not reach an output that depends on no input.
        if root.node in ends and root.node not in between:
            known = dict(enumerate(rest.noted.get(root.node, ())))
            known[root.output_nr] = gradient
            rest.noted[root.node] = tuple(known.get(n) for n in range(max(known) + 1))
    handles = [end.register_prehook(_note(rest, end)) for end in ends & between]
    try:
        torch.autograd.backward(list(outputs), given, retain_graph=True, inputs=list(inputs))
    finally:
        for handle in handles:
            handle.remove()
    return rest


def _above(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    above: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(above)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below] = []
                waiting.append(below)
            above[below].append(node)
    return above


def _climb(
    starts: Sequence[Node], above: dict[Node, list[Node]], until: set[Node]
) -> tuple[set[Node], set[Node]]:
    seen, met = {node for node in starts if node in above}, set()
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        for upper in above[node]:
            if upper in until:
                met.add(upper)
            elif upper not in seen:
                seen.add(upper)
                waiting.append(upper)
    return seen, met


def _groups(
    weights: Sequence[nn.Parameter], above: dict[Node, list[Node]], between: set[Node]
) -> list[_Group]:
    groups: list[_Group] = []
    owner: dict[Node, _Group] = {}
    for weight in weights:
        with without_torch_functions():  # its values may be elsewhere and are not needed
            node = get_gradient_edge(weight).node
        if node not in above:
            continue
        seen, ends = _climb([node], above, between)
        # Outputs that depend on no input, only on weights.
        ends |= {top for top in seen if not above[top] and top is not node}
        group = _Group(set(ends), [weight])
        for other in {id(owner[end]): owner[end] for end in ends if end in owner}.values():
            group.ends |= other.ends
            group.weights += other.weights
            groups.remove(other)
        groups.append(group)
        owner.update(dict.fromkeys(group.ends, group))
    return groups


def _note(rest: WeightBackward, end: Node) -> Callable[[tuple[Tensor, ...]], None]:
    def note(gradients: tuple[Tensor, ...]) -> None:
        rest.noted[end] = gradients

    return note


def _always(gradients: Gradients) -> Callable[..., Gradients]:
    return lambda _: gradients


# Messages between neighbouring stages: tensors of any shape, dtype and number.


HEADER = 64
DIMS = 12
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


# [Note: headers] A receiver must know the form of incoming tensors. Stages exchange tensors of the
# same form in each step for micro-batches with the same shapes in the same state, so the form is
# sent once: the first message of each kind is preceded by a header on the CPU with shapes, dtypes
# and requires_grad. Both stages remember it. Later messages of this kind have no header, which
# would cost a latency each, and a tensor that does not match the header is rejected instead of
# sent. Gradients have the shapes of the received tensors.
#
# On the CPU each message has its own tag, so the order of calls does not matter; on GPUs it is the
# order of torch's schedules, which is the same on both stages.
@dataclass(frozen=True)
class Meta:
    """Shape, dtype and requires_grad of a message's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _encode(metas: Sequence[Meta]) -> Tensor:
    numbers = [len(metas)]
    for meta in metas:
        if len(meta.shape) > DIMS or meta.dtype not in _DTYPES:
            raise GulliverError(
                f"a tensor of {meta.dtype} with {len(meta.shape)} dims cannot cross stages; use at "
                f"most {DIMS} dims, and one of "
                f"{', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        numbers += [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape)]
        numbers += meta.shape
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def _decode(header: Tensor) -> tuple[Meta, ...]:
    numbers = header.tolist()
    count, at, metas = numbers[0], 1, []
    for _ in range(count):
        dtype, wants, dims = numbers[at : at + 3]
        metas.append(Meta(tuple(numbers[at + 3 : at + 3 + dims]), _DTYPES[dtype], bool(wants)))
        at += 3 + dims
    return tuple(metas)


class StageMessages:
    """Messages between a stage and its neighbors."""

    def __init__(
        self, rank_group: RankGroup, stage: int, places: Sequence[int], micro_batches: int
    ) -> None:
        self.rank_group, self.stage, self.places = rank_group, stage, places
        self.micro_batches = micro_batches
        self._known: dict[tuple[int, str], tuple[Meta, ...]] = {}
        self._headers: list[Messages] = []
        self._packed: dict[tuple[int, int], PackedTensors] = {}

    def metas(self, cut: int, kind: str) -> tuple[Meta, ...] | None:
        return self._known.get((cut, kind))

    def know(self, kind: str, tensors: Sequence[Tensor], micro: int) -> tuple[Meta, ...]:
        """Returns the metadata of outgoing tensors; the first time, sends it to the next stage."""
        found = tuple(Meta.of(t) for t in tensors)
        known = self.metas(self.stage + 1, kind)
        if known is None:
            self._known[self.stage + 1, kind] = found
            if self._peer(self.stage + 1) is not None:
                self._announce(found, micro)
        elif known != found:
            raise GulliverError(
                f"stage {self.stage} returned {found}, but {known} for an equal micro-batch: "
                "shapes between stages may depend on the shapes of the batch, not on its values"
            )
        return found

    def expect(self, kind: str, micro: int) -> tuple[Meta, ...]:
        """Returns the metadata of incoming tensors; the first time, receives it as a header."""
        known = self.metas(self.stage, kind)
        if known is None:
            peer = self._peer(self.stage - 1)
            assert peer is not None, "stages of one rank use `hand_over_local`"
            header = torch.empty(HEADER, dtype=torch.int64)
            post(
                [(peer, header)],
                [],
                self.rank_group.process_group,
                self._tag(self.stage, 2, micro, 0),
            ).wait()
            known = self._known[self.stage, kind] = _decode(header)
        return known

    def hand_over_local(self, kind: str, tensors: Sequence[Tensor]) -> None:
        self._known[self.stage, kind] = tuple(Meta.of(t) for t in tensors)

    def _announce(self, metas: Sequence[Meta], micro: int) -> None:
        peer = self._peer(self.stage + 1)
        tag = self._tag(self.stage + 1, 2, micro, 0)
        assert peer is not None
        self._headers.append(post([], [(peer, _encode(metas))], self.rank_group.process_group, tag))

    def finish(self) -> None:
        while self._headers:
            self._headers.pop().wait()

    def sends(self, cut: int, tensors: Sequence[Tensor | None], micro: int) -> list[dist.P2POp]:
        return self._operations(True, cut, tensors, micro)

    def receives(self, cut: int, tensors: Sequence[Tensor | None], micro: int) -> list[dist.P2POp]:
        return self._operations(False, cut, tensors, micro)

    def _operations(
        self, sends: bool, cut: int, tensors: Sequence[Tensor | None], micro: int
    ) -> list[dist.P2POp]:
        wire = self.rank_group.wire
        packed, identity = PackedTensors(wire), wire is IDENTITY
        forward = sends == (cut == self.stage + 1)
        peer = self._peer(cut if cut == self.stage + 1 else cut - 1)
        if peer is None:
            return []
        found = []
        for entry, tensor in enumerate(tensors):
            tag = self._tag(cut, int(not forward), micro, entry)
            if tensor is not None and not identity:
                tensor = packed.sending(tensor) if sends else packed.receiving(tensor)
                tag = packed.tag(tag)
            messages = [] if tensor is None else [(peer, tensor)]
            ways = ([], messages) if sends else (messages, [])
            found += operations(*ways, self.rank_group.process_group, tag)
        if not sends:
            self._packed[cut, micro] = packed
        return found

    def arrived(self, cut: int, micro: int) -> None:
        packed = self._packed.pop((cut, micro), None)
        if packed is not None:
            packed.unpack()

    def _peer(self, stage: int) -> int | None:
        place = self.places[stage]
        return None if place == self.rank_group.rank else self.rank_group.ranks[place]

    def _tag(self, cut: int, way: int, micro: int, entry: int) -> int:
        return 1 + ((cut * 3 + way) * self.micro_batches + micro) * 4 + entry


# Adapts one stage to torch's pipeline schedules.
#
# Schedules of `torch.distributed.pipelining` define the order of computations, and call the methods
# of `StageRunner` by torch's names. torch's own stage requires one shape for all micro-batches and
# infers it with an additional forward and backward. This one learns shapes from the first
# micro-batch of each kind (`StageMessages`), so they may differ and change.
#
# Each micro-batch has an ordinary autograd backward. Zero-bubble schedules split it into two parts,
# gradients of the inputs first and those of the weights later; see [Note: why two parts].


@dataclass
class PipelineRun:
    """The run of one batch through the pipeline."""

    micros: Sequence[MicroBatch]
    kinds: Sequence[str]  # Kind of each micro-batch; those of one kind send tensors of equal shapes
    call: Callable[..., Any]  # Model, or a wrapper of its forward
    keep: bool  # Whether to keep outputs of the last stage
    # Keyword arguments in addition to those of the batch.
    added: dict[str, Any] = field(default_factory=dict)
    # Function called before each forward with the number of its micro-batch.
    before: Callable[[int], None] | None = None
    # Outputs of the last stage, by micro-batch.
    outputs: dict[int, Any] = field(default_factory=dict)
    weights: list[nn.Parameter] = field(default_factory=list)  # Parameters that require gradients

    def arguments(self, micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.before is not None:
            self.before(micro)
        return self.micros[micro].args, {**self.micros[micro].kwargs, **self.added}


@dataclass
class _KeptTensors:
    outputs: Carry
    carry: Carry


# [Note: what torch's schedules need] Checked with torch 2.13. A schedule does not check the class
# of a stage; its metadata inference (`_warmup_*`) is for torch's own stages. It uses the following
# attributes; if a new torch uses more, the first step fails with an AttributeError.
#
# - All schedules: `submod`, `device`, `stage_index`, `num_stages`, `group_rank`, `group_size`,
#   `is_first`, `is_last`, `output_chunks`, `_prepare_forward_infra`, `_prepare_backward_infra`,
#   `clear_runtime_states`, `forward_one_chunk`, `backward_one_chunk`, and the `get_*_ops` for
#   messages in both directions. They write `has_backward`, False in `eval`.
# - GPipe and 1F1B, one stage on a rank: `perform_reduce_grad` at the end.
# - Several stages on a rank: `scale_grads` at the end, `stage_index_to_group_rank` (written),
#   `args_recv_info` and `act_send_info`, in which they look for skip connections, and between
#   stages of one rank `set_local_fwd_input`, `get_local_bwd_output` and `set_local_bwd_input`.
# - Split backwards (zero bubble, ZBV, DualPipeV): `backward_one_chunk(full_backward=False)`, and
#   later `backward_weight_one_chunk`.
class StageRunner:
    """Adapts one stage to torch's schedules."""

    def __init__(
        self,
        stage: Stage,
        number: int,
        places: Sequence[int],
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self.stage = stage
        self.messages = StageMessages(stage.rank_group, number, places, micro_batches)
        self.run: PipelineRun | None = None
        self._looked: set[str] = set()
        self._received: dict[int, Carry] = {}
        self._kept: dict[int, _KeptTensors] = {}
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._to_send: dict[int, tuple[Tensor | None, ...]] = {}
        self._later: dict[int, Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}
        # Attributes that schedules read.
        self.submod, self.device = stage.model, device
        self.stage_index, self.num_stages = number, stage.cut.stages
        self.group, self.group_rank = stage.rank_group.process_group, stage.rank_group.rank
        self.group_size = stage.rank_group.size
        self.stage_index_to_group_rank = dict(enumerate(places))
        self.has_backward = True
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self.output_chunks: list[Any] = []

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    # Methods called before and after a schedule.

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[()]:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def clear_runtime_states(self) -> None:
        for kept in (self._received, self._kept, self._gradients, self._to_send, self._later):
            kept.clear()
        self.losses.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Does nothing: the losses are already weighted."""

    def scale_grads(self, grad_scale_factor: int) -> None: ...

    # Forward.

    def get_fwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        metas = self.messages.expect(self._run.kinds[micro], micro)
        carry = tuple(meta.empty(self.device) for meta in metas)
        self._received[micro] = carry
        return self.messages.receives(self.stage_index, carry, micro)

    def get_fwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs = tuple(t.detach().contiguous() for t in self._kept[micro].outputs)
        if not self.has_backward:
            del self._kept[micro]
        return self.messages.sends(self.stage_index + 1, outputs, micro)

    def set_local_fwd_input(self, outputs: Any, micro: int) -> None:
        self.messages.hand_over_local(self._run.kinds[micro], outputs)
        self._received[micro] = tuple(t.detach() for t in outputs)

    def forward_one_chunk(
        self,
        micro: int,
        args: Any = (),
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        run, kind = self._run, self._run.kinds[micro]
        self.messages.arrived(self.stage_index, micro)
        carry = self._received.pop(micro, ())
        if self.has_backward and not self.is_first:
            metas = self.messages.metas(self.stage_index, kind)
            assert metas is not None, "received tensors were announced"
            carry = tuple(
                t.requires_grad_(m.requires_grad) for t, m in zip(carry, metas, strict=True)
            )
        look = kind not in self._looked
        self._looked.add(kind)
        output = self.stage.stage_forward.forward(
            run.call, self.stage_index, carry, *run.arguments(micro), look
        )
        if self.is_last:
            if run.keep:
                run.outputs[micro] = output
            if self.has_backward:
                self._kept[micro] = _KeptTensors((), carry)
            return output
        self.messages.know(kind, output, micro)
        self._kept[micro] = _KeptTensors(output, carry)
        return output

    # Backward.

    def get_bwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        metas = self.messages.metas(self.stage_index + 1, self._run.kinds[micro])
        assert metas is not None, "gradients return for sent tensors"
        buffers = tuple(m.empty(self.device) if m.requires_grad else None for m in metas)
        self._gradients[micro] = buffers
        return self.messages.receives(self.stage_index + 1, buffers, micro)

    def get_bwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        gradients = self._to_send.pop(micro)
        sent = tuple(None if g is None else g.contiguous() for g in gradients)
        return self.messages.sends(self.stage_index, sent, micro)

    def get_local_bwd_output(self, micro: int) -> tuple[Tensor | None, ...]:
        return self._to_send.pop(micro, ())

    def set_local_bwd_input(self, gradients: tuple[Tensor | None, ...], micro: int) -> None:
        self._gradients[micro] = gradients

    def backward_one_chunk(
        self,
        micro: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs a micro-batch's backward; without `full_backward`, only for its inputs."""
        if not self.has_backward:
            return
        self.messages.arrived(self.stage_index + 1, micro)
        kept = self._kept.pop(micro)
        own = self.losses.pop(micro, loss)
        roots, gradients, passing = self._roots(kept, own, self._gradients.pop(micro, ()))
        inputs = [t for t in kept.carry if t.requires_grad]
        # Every call of autograd would recompute the blocks again and keep their activations.
        whole = full_backward or bool(self.stage.stage_forward.recomputed)
        if whole or not inputs or not roots:
            run = _full(roots, gradients)
            if whole or inputs:
                run()
            else:
                # The first stage sends no gradient, so the entire backward can wait.
                self._later[micro] = run
        else:
            rest = backward_of_inputs(roots, gradients, inputs, self._run.weights)
            self._later[micro] = rest.run
        self._to_send[micro] = tuple(_gradient(t, passing) for t in kept.carry)

    def backward_weight_one_chunk(self, micro: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self._later.pop(micro, _nothing)()

    def _roots(
        self, kept: _KeptTensors, loss: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor] | None, dict[Tensor, Tensor]]:
        """Returns backward's roots with gradients, and gradients of inputs passed on unchanged."""
        # An input that the stage passes on unchanged, such as the encoder's output, is not a root,
        # because autograd has no work for it.
        if self.is_last:
            assert loss is not None, "the last stage has losses"
            return [loss], None, {}
        roots, used, passing = [], [], {}
        for output, gradient in zip(kept.outputs, gradients, strict=True):
            if gradient is None:
                continue
            if any(output is t for t in kept.carry):
                passing[output] = gradient
            else:
                roots.append(output)
                used.append(gradient)
        return roots, used, passing

    @property
    def _run(self) -> PipelineRun:
        assert self.run is not None, "a schedule runs inside Pipeline.run"
        return self.run


def _full(roots: list[Tensor], gradients: list[Tensor] | None) -> Callable[[], None]:
    def run() -> None:
        if roots:
            torch.autograd.backward(roots, gradients)

    return run


def _gradient(tensor: Tensor, passing: dict[Tensor, Tensor]) -> Tensor | None:
    if not tensor.requires_grad:
        return None
    found, tensor.grad = tensor.grad, None
    if tensor in passing:
        return passing[tensor] if found is None else found + passing[tensor]
    return torch.zeros_like(tensor) if found is None else found


def _nothing() -> None: ...
