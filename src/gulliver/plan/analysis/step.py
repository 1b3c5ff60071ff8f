"""Follows a step with fake tensors and sums up its costs.

    analyse(model, {"input_ids": ids, "labels": ids}).peak

It does not know how a model will be sharded, nor what kernels allocate and free inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver._compat import fake_mode, replace_tensors
from gulliver.errors import GulliverError
from gulliver.memory.symbolic import FakeTensors, stand_in_loss, without_traces
from gulliver.plan.analysis.known import Known, kernels_of
from gulliver.plan.analysis.opaque import left_out, operators_of, widened
from gulliver.plan.analysis.recorder import Recorder
from gulliver.plan.analysis.records import Analysis, Opaque
from gulliver.plan.analysis.repeats import Repeats
from gulliver.plan.analysis.sums import summed

Criterion = Callable[[Any], Tensor]


def analyse(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    *,
    autocast: torch.dtype | None = None,
    kernels: str = "cpu",
    prepare: Callable[[nn.Module], None] = lambda _: None,
    repeats: bool = True,
) -> Analysis:
    """Finds the FLOPs, bytes and memory of a training step, operator by operator.

    Forward and backward are followed with shapes alone, so that nothing of the model's size is
    allocated; equal blocks are followed once. The model is afterwards as it was.

    Args:
        model: model in the mode in which it will run, real or on meta.
        batch: keyword arguments, a tuple of arguments, or one; real or on meta.
        criterion: loss of the output; None takes the output's own ``loss``, or the cross entropy of
            its floating-point tensors.
        autocast: dtype of autocast.
        kernels: kind of device whose operators are taken: "cpu" or "cuda".
        prepare: called with the model before it runs, such as to have blocks computed again; what
            it changes of modules is put back.
        repeats: whether equal calls of equal modules are followed once.

    Raises:
        GulliverError: the model does not run on this batch.
    """
    step = _Step(model, batch, criterion, autocast, kernels, prepare)
    opaque = dict[str, Opaque]()
    while True:
        recorder = _Ran()
        try:
            return step.followed(recorder, opaque, repeats)
        except _NotContiguous:
            found = step.followed(_Ran(), opaque, False)
            note = "blocks are not left in one piece in backward: each was followed"
            return replace(found, notes=(*found.notes, note))
        except GulliverError as error:
            name = f"module {recorder.path!r}" if recorder.path else type(model).__name__
            raise GulliverError(f"{name}: {error}") from error
        except Exception as error:
            opaque = widened(model, opaque, error, recorder.path)
        if "" in opaque:
            return step.whole(opaque[""])


class _NotContiguous(Exception):
    """The backward of a replayed call is not contiguous."""


class _Ran:
    """Finds the module that ran when a step failed."""

    recorder: Recorder | None = None

    @property
    def path(self) -> str:
        """Path of the module."""
        running = self.recorder.running if self.recorder is not None else None
        return running.path if running is not None else ""


class _Step:
    """A step to analyse; arguments as of `analyse`."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Criterion | None,
        autocast: torch.dtype | None,
        kernels: str,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self.model, self.criterion, self.autocast = model, criterion, autocast
        self.kernels, self.prepare = kernels, prepare
        plain = not isinstance(batch, Mapping)
        args = (batch if isinstance(batch, tuple) else (batch,)) if plain else ()
        self.batch: tuple[tuple[Any, ...], dict[str, Any]] = (args, {} if plain else dict(batch))

    def followed(self, ran: _Ran, opaque: Mapping[str, Opaque], repeats: bool) -> Analysis:
        """Follows the step with fake tensors."""
        with without_traces(self.model, hooks=False), fake_mode(), kernels_of(self.kernels):
            fakes = FakeTensors("cpu")
            for module in self.model.modules():
                replace_tensors(module, fakes.of)
            self.prepare(self.model)
            known = Known()

            def fake(tensor: Tensor) -> Tensor:
                made = fakes.of(tensor)
                known.learn(made, tensor)
                return made

            args, kwargs = pytree.tree_map_only(Tensor, fake, self.batch)
            equal = Repeats(self.model) if repeats else None
            recorder = self._recorder(self.model, args, kwargs, known)
            ran.recorder = recorder
            with ExitStack() as stack:
                stack.enter_context(known.answering())
                if equal is not None:
                    stack.enter_context(equal.replaying(recorder))
                stack.enter_context(left_out(self.model, recorder, opaque))
                self._run(recorder, self.model, args, kwargs)
            found = summed(self.model, recorder, equal)
        if found is None:
            raise _NotContiguous
        notes = (*found.notes, *self._recurrent())
        return replace(found, opaque=tuple(opaque.values()), notes=notes)

    def _recurrent(self) -> Sequence[str]:
        """Notes about recurrent layers."""
        if self.kernels != "cuda":
            return ()
        layers = [path for path, m in self.model.named_modules() if isinstance(m, nn.RNNBase)]
        if not layers:
            return ()
        return (
            f"{', '.join(layers)}: followed token by token; what cuDNN reserves in place of that "
            "is known on a GPU alone",
        )

    def whole(self, opaque: Opaque) -> Analysis:
        """Costs of a model of which only parameters and batch are known."""
        tensors = [t for t in pytree.tree_leaves(self.batch) if isinstance(t, Tensor)]
        first = max(tensors, key=Tensor.numel)
        operators = operators_of(self.model, "", tensors, first)
        trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        return Analysis(
            operators,
            {},
            inputs=sum(t.nbytes for t in tensors),
            gradients=trained,
            parameters=sum(p.nbytes for p in self.model.parameters()),
            opaque=(opaque,),
            notes=("what the model saves and its peak are not known",),
        )

    @staticmethod
    def _recorder(model: nn.Module, args: Any, kwargs: Any, known: Known | None = None) -> Recorder:
        leaves = pytree.tree_leaves((args, kwargs))
        return Recorder(model, [t for t in leaves if isinstance(t, Tensor)], known)

    def _run(
        self, recorder: Recorder, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Runs forward and backward."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        context = torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()
        with recorder.following():
            with context:
                output = model(*args, **kwargs)
                loss = (self.criterion or stand_in_loss)(output)
            recorder.backward = True
            if loss.requires_grad:
                # `loss.backward()` would leave the kernel-selecting mode while checkpoints
                # recompute.
                torch.autograd.backward(loss)
            del output, loss
