"""Adapts one stage to torch's pipeline schedules.

Schedules of `torch.distributed.pipelining` decide what is done when, and call the methods of
`StageRunner`, whose names are torch's. torch's own stage requires one shape for all micro-batches
and finds it with an additional forward and backward. This one learns shapes from the first
micro-batch of each kind (`_messages.py`), so they may differ and change.

Backward is that of autograd for each micro-batch. Schedules that fill the bubble ask for it in two
parts, gradients of the inputs first and those of the weights later (`_split.py` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.parallel.pipeline._batch import MicroBatch
from gulliver.parallel.pipeline._messages import Messages
from gulliver.parallel.pipeline._split import backward_of_inputs
from gulliver.parallel.pipeline._stage import Stage
from gulliver.parallel.pipeline._stage_forward import Carry


@dataclass
class PipelineRun:
    """The batch that the stages of one rank work on."""

    micros: Sequence[MicroBatch]
    kinds: Sequence[str]  # Kind of each micro-batch; those of one kind send tensors of equal shapes
    call: Callable[..., Any]  # Model, or a wrapper of its forward
    keep: bool  # Whether outputs of the last stage are wanted
    # Keyword arguments in addition to those of the batch.
    added: dict[str, Any] = field(default_factory=dict)
    # Function called before each forward with the number of its micro-batch.
    before: Callable[[int], None] | None = None
    # Outputs of the last stage, by micro-batch.
    outputs: dict[int, Any] = field(default_factory=dict)
    weights: list[nn.Parameter] = field(default_factory=list)  # Parameters that want gradients

    def arguments(self, micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's arguments for a micro-batch, whose forward follows."""
        if self.before is not None:
            self.before(micro)
        return self.micros[micro].args, {**self.micros[micro].kwargs, **self.added}


@dataclass
class _KeptTensors:
    """The tensors of a micro-batch that are kept between its forward and its backward."""

    outputs: Carry
    carry: Carry


# [Note: what torch's schedules ask for] Checked with torch 2.13. A schedule does not look at the
# class of a stage of ours: its metadata inference (`_warmup_*`) is for torch's own stages. It reads
# and calls what follows, and a new torch that asks for more fails with an AttributeError in its
# first step.
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
        self.messages = Messages(stage.rank_group, number, places, micro_batches)
        self.run: PipelineRun | None = None
        self._looked: set[str] = set()
        self._received: dict[int, Carry] = {}
        self._kept: dict[int, _KeptTensors] = {}
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._to_send: dict[int, tuple[Tensor | None, ...]] = {}
        self._later: dict[int, Callable[[], None]] = {}
        self.losses: dict[int, Tensor] = {}
        # What schedules read.
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
        """Whether batches begin here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self.stage_index == self.num_stages - 1

    # What a schedule asks before and after.

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[()]:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def clear_runtime_states(self) -> None:
        """Drops everything left from the previous run."""
        for kept in (self._received, self._kept, self._gradients, self._to_send, self._later):
            kept.clear()
        self.losses.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Does nothing: gradients are not scaled, as their losses are weighted."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Does nothing, as `perform_reduce_grad`: what schedules of several stages call."""

    # Forward.

    def get_fwd_recv_ops(self, micro: int) -> list[dist.P2POp]:
        """Returns operations that receive a micro-batch from the stage before."""
        if self.is_first:
            return []
        metas = self.messages.expect(self._run.kinds[micro], micro)
        carry = tuple(meta.empty(self.device) for meta in metas)
        self._received[micro] = carry
        return self.messages.receives(self.stage_index, carry, micro)

    def get_fwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        """Returns operations that send a micro-batch to the next stage."""
        if self.is_last:
            return []
        outputs = tuple(t.detach().contiguous() for t in self._kept[micro].outputs)
        if not self.has_backward:
            del self._kept[micro]
        return self.messages.sends(self.stage_index + 1, outputs, micro)

    def set_local_fwd_input(self, outputs: Any, micro: int) -> None:
        """Takes a micro-batch from the stage before, which lies on this rank."""
        self.messages.hand_over(self._run.kinds[micro], outputs)
        self._received[micro] = tuple(t.detach() for t in outputs)

    def forward_one_chunk(
        self,
        micro: int,
        args: Any = (),
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs a micro-batch through the stage."""
        run, kind = self._run, self._run.kinds[micro]
        self.messages.arrived(self.stage_index, micro)
        carry = self._received.pop(micro, ())
        if self.has_backward and not self.is_first:
            metas = self.messages.metas(self.stage_index, kind)
            assert metas is not None, "what was received was announced"
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
        """Returns operations that receive the gradients of what was sent."""
        if self.is_last or not self.has_backward:
            return []
        metas = self.messages.metas(self.stage_index + 1, self._run.kinds[micro])
        assert metas is not None, "gradients come back for what was sent"
        buffers = tuple(m.empty(self.device) if m.requires_grad else None for m in metas)
        self._gradients[micro] = buffers
        return self.messages.receives(self.stage_index + 1, buffers, micro)

    def get_bwd_send_ops(self, micro: int) -> list[dist.P2POp]:
        """Returns operations that send gradients to the stage before."""
        if self.is_first or not self.has_backward:
            return []
        gradients = self._to_send.pop(micro)
        sent = tuple(None if g is None else g.contiguous() for g in gradients)
        return self.messages.sends(self.stage_index, sent, micro)

    def get_local_bwd_output(self, micro: int) -> tuple[Tensor | None, ...]:
        """Returns gradients for the stage before, which lies on this rank."""
        return self._to_send.pop(micro, ())

    def set_local_bwd_input(self, gradients: tuple[Tensor | None, ...], micro: int) -> None:
        """Takes gradients from the next stage, which lies on this rank."""
        self._gradients[micro] = gradients

    def backward_one_chunk(
        self,
        micro: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward of a micro-batch, of its inputs only if not `full_backward`."""
        if not self.has_backward:
            return
        self.messages.arrived(self.stage_index + 1, micro)
        kept = self._kept.pop(micro)
        own = self.losses.pop(micro, loss)
        roots, gradients, passing = self._roots(kept, own, self._gradients.pop(micro, ()))
        inputs = [t for t in kept.carry if t.requires_grad]
        if full_backward or not inputs or not roots:
            run = _full(roots, gradients)
            if full_backward or inputs:
                run()
            else:
                # The first stage has no gradient to send on: all of it can wait.
                self._later[micro] = run
        else:
            rest = backward_of_inputs(roots, gradients, inputs, self._run.weights)
            self._later[micro] = rest.run
        self._to_send[micro] = tuple(_gradient(t, passing) for t in kept.carry)

    def backward_weight_one_chunk(self, micro: int, last_backward: bool = False) -> None:
        """Runs the part of a micro-batch's backward that `backward_one_chunk` left."""
        if self.has_backward:
            self._later.pop(micro, _nothing)()

    def _roots(
        self, kept: _KeptTensors, loss: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor] | None, dict[Tensor, Tensor]]:
        """Returns the roots of backward, their gradients, and gradients that pass the stage by."""
        # A tensor that the stage hands on as it came, as the encoder's output, is no root: autograd
        # has nothing to do for it.
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
    """Returns the gradient of what was received, None where none is wanted."""
    if not tensor.requires_grad:
        return None
    found, tensor.grad = tensor.grad, None
    if tensor in passing:
        return passing[tensor] if found is None else found + passing[tensor]
    return torch.zeros_like(tensor) if found is None else found


def _nothing() -> None:
    """Does nothing, for a micro-batch whose backward is done."""
