"""Runs a step with fake tensors and adds up its costs.

    analyse(model, {"input_ids": ids, "labels": ids}).peak

The analysis covers neither sharding nor the workspace memory of kernels.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver._compat import fake_mode, needs_data, replace_tensors
from gulliver.errors import GulliverError
from gulliver.hardware.costs import BACKWARD_OF_LINEAR, linear_flops
from gulliver.memory.symbolic import FakeTensors, stand_in_loss, without_traces
from gulliver.plan.analysis.known import Known, kernels_of
from gulliver.plan.analysis.recorder import ModuleCall, Moment, Packed, Recorder
from gulliver.plan.analysis.records import (
    BACKWARD,
    FORWARD,
    OPAQUE,
    RECOMPUTE,
    Analysis,
    Cost,
    ModuleCosts,
    Operator,
    Saved,
    UntracedModule,
)
from gulliver.plan.analysis.repeats import CallOutput, Repeats, Template, calls_through, replay

# Builds an `Analysis` from the record of a step.


# [Note: peaks of replayed calls] A replayed call adds and frees the same bytes as the call that it
# repeats, so it has the same peak relative to its start. For the backward this requires that the
# repeated call's backward is contiguous, without operators of other modules in between. Otherwise
# the step must be traced without replays.
def summed(model: nn.Module, recorder: Recorder, repeats: Repeats | None) -> Analysis | None:
    """Adds up the costs of a step; None if those of replayed calls are unknown."""
    templates = [t for t in repeats.templates if t.forwards] if repeats is not None else []
    operators, moments = recorder.operators, recorder.moments
    for template in templates:
        assert template.call is not None
        _extend(template.call, moments, operators)
        if not _in_one_piece(template, moments, operators):
            return None
        _count(template, moments, operators)
    for index, nbytes in recorder.claims.items():
        if index < len(operators):
            operators[index].saved = nbytes
    peaks = Peaks(moments)
    alike = dict(repeats.alike) if repeats is not None else {}
    refused = repeats.refused if repeats is not None else {}
    total = peaks.most(0, len(moments))
    return Analysis(
        tuple(operators),
        dict(_modules(model, recorder, operators, peaks, [t.path for t in templates])),
        alike,
        _saved(recorder.kept.values()),
        recorder.inputs,
        max(recorder.inputs, total[0]),
        max(recorder.inputs, total[1]),
        recorder.gradients,
        sum(p.nbytes for p in model.parameters()),
        {packed.serial: packed.nbytes for packed in recorder.kept.values() if not packed.name},
        notes=tuple(f"each {kind} is followed: {why}" for kind, why in refused.items()),
    )


class Peaks:
    """Peak bytes between moments; a replayed call adds the peak of the traced call."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments
        self._known: dict[tuple[int, bool], tuple[int, int]] = {}
        self._above = [self._most_of(moment) for moment in moments]

    def most(self, first: int, end: int) -> tuple[int, int]:
        """Peak bytes from one moment until just before another, without and with gradients."""
        part = self._above[first:end]
        return max((p[0] for p in part), default=0), max((p[1] for p in part), default=0)

    def forward(self, call: ModuleCall) -> int:
        return max(0, self.most(call.begun, call.ended)[0] - call.before)

    def backward(self, call: ModuleCall) -> int:
        if not call.span:
            return 0
        first, last = call.span
        return self.most(first, last + 1)[0] - self._moments[first].before

    def _most_of(self, moment: Moment) -> tuple[int, int]:
        alone, both = moment.after, moment.after + moment.gradients
        if moment.replayed is None or moment.replayed[0].call is None:
            return alone, both
        above = self._of_call(*moment.replayed)
        start = moment.before
        return max(alone, start + above[0]), max(both, start + moment.gradients + above[1])

    def _of_call(self, template: Template, backward: bool) -> tuple[int, int]:
        key = id(template), backward
        if key not in self._known:
            call = template.call
            assert call is not None
            first, end = (call.begun, call.ended)
            if backward and call.span:
                first, end = call.span[0], call.span[1] + 1
            inside = [self._most_of(moment) for moment in self._moments[first:end]]
            begun = self._moments[first] if inside else Moment(0, 0, 0)
            start = begun.before if backward else call.before
            self._known[key] = (
                max((p[0] for p in inside), default=start) - start,
                max((p[1] for p in inside), default=start) - start - begun.gradients,
            )
        return self._known[key]


def _extend(call: ModuleCall, moments: Sequence[Moment], operators: Sequence[Operator]) -> None:
    """Extends a call's backward by the gradient accumulations that follow it."""
    while call.span and call.span[1] + 1 < len(moments):
        after = moments[call.span[1] + 1]
        if after.operator < 0 or not _added_up(operators[after.operator]):
            return
        call.span[1] += 1


def _added_up(operator: Operator) -> bool:
    return operator.phase == BACKWARD and operator.forward < 0


def _in_one_piece(
    template: Template, moments: Sequence[Moment], operators: Sequence[Operator]
) -> bool:
    """Whether the operators of a call's backward are contiguous."""
    assert template.call is not None
    if not template.call.span:
        return not template.backwards
    first, last = template.call.span
    for moment in moments[first : last + 1]:
        operator = operators[moment.operator]
        path = moment.replayed[0].path if moment.replayed is not None else operator.path
        own = f"{path}.".startswith(f"{template.path}.")
        if not own and (moment.replayed is not None or not _added_up(operator)):
            return False
    return True


def _count(template: Template, moments: Sequence[Moment], operators: Sequence[Operator]) -> None:
    """Multiplies the operators of a traced call by its number of replays."""
    call = template.call
    assert call is not None
    for operator in operators[slice(*template.operators)]:
        operator.count += template.forwards
    if call.span:
        for moment in moments[call.span[0] : call.span[1] + 1]:
            if moment.operator >= 0:
                operators[moment.operator].count += template.backwards


def _saved(kept: Iterator[Packed] | object) -> Saved:
    sizes = {"": 0, "input": 0, "parameter": 0}
    for one in kept:  # type: ignore[attr-defined]
        sizes[one.name if one.name in sizes else "parameter"] += one.nbytes
    return Saved(sizes[""], sizes["input"], sizes["parameter"])


def _modules(
    model: nn.Module,
    recorder: Recorder,
    operators: Sequence[Operator],
    peaks: Peaks,
    templates: Sequence[str],
) -> Iterator[tuple[str, ModuleCosts]]:
    """Yields the costs of each called module, in order of first call."""
    work = _work(operators, templates)
    calls = dict[str, list[ModuleCall]]()
    for call in recorder.calls:
        if call.phase == FORWARD and call.ended >= 0:
            calls.setdefault(call.path, []).append(call)
    for path, own in calls.items():
        yield (
            path,
            ModuleCosts(
                path,
                type(model.get_submodule(path)).__name__,
                len(own),
                *(work.get((path, phase), Cost()) for phase in (FORWARD, RECOMPUTE, BACKWARD)),
                saved=sum(call.kept for call in own),
                output=max(call.output for call in own),
                handed=max(call.handed for call in own),
                forward_peak=max(peaks.forward(call) for call in own),
                backward_peak=max(peaks.backward(call) for call in own),
            ),
        )


def _work(operators: Sequence[Operator], templates: Sequence[str]) -> dict[tuple[str, str], Cost]:
    """Adds up work by path and phase; a replayed call counts once."""
    found = dict[tuple[str, str], Cost]()
    for operator in operators:
        path = operator.path
        stands = next((t for t in templates if f"{path}.".startswith(f"{t}.")), None)
        parts = path.split(".") if path else []
        for end in range(len(parts) + 1):
            around = ".".join(parts[:end])
            alone = stands is not None and f"{around}.".startswith(f"{stands}.")
            key = around, operator.phase
            found[key] = found.get(key, Cost()).plus(operator, 1 if alone else operator.count)
    return found


# Modules that cannot be traced, and the placeholders that replace them.
#
# A module that reads its data (``.item()``, numpy, a number of rows that depends on values) fails
# with fake tensors. The innermost such module and all others of its class are replaced by
# placeholders, which return their input; costs are estimated from parameters and inputs. If the
# next module cannot use that output, the module around both is replaced.


OURS = Path(__file__).parents[2]


def widened(
    model: nn.Module, known: Mapping[str, UntracedModule], error: Exception, running: str
) -> dict[str, UntracedModule]:
    """Adds the module that failed to the untraced modules."""
    where, line = _where(error), str(error).strip().split("\n")[0]
    if needs_data(error):
        path = running
    elif known:
        # The next module cannot use the placeholder's output.
        path = _around(running, known)
    else:
        name = f"module {running!r}" if running else "the model"
        raise GulliverError(
            f"{name} cannot run on this batch ({where}: {type(error).__name__}: {line}): pass a "
            "batch and a loss that work with the model"
        ) from error
    kind = type(model.get_submodule(path))
    alike = [p for p, m in model.named_modules() if type(m) is kind] if path else [""]
    found = {p: one for p, one in known.items() if not any(_inside(p, a) for a in alike)}
    reason = f"{type(error).__name__}: {line}"
    return found | {p: UntracedModule(p, kind.__name__, where, reason) for p in alike}


def _around(running: str, known: Mapping[str, UntracedModule]) -> str:
    """Returns the innermost module that contains the running module and an untraced one."""
    parts = running.split(".") if running else []
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        if path not in known and any(_inside(p, path) for p in known):
            return path
    return ""


def _inside(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _where(error: Exception) -> str:
    libraries = Path(torch.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if libraries not in Path(f.filename).parents
        and OURS / "plan" not in Path(f.filename).parents
        and OURS / "memory" not in Path(f.filename).parents
    ]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def left_out(
    model: nn.Module, recorder: Recorder, opaque: Mapping[str, UntracedModule]
) -> AbstractContextManager[None]:
    paths = {model.get_submodule(path): path for path in opaque}

    def call(module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        path = paths[module]
        outer, recorder.path = recorder.path, path
        try:
            return _stand_in(recorder, module, path, (args, kwargs))
        finally:
            recorder.path = outer

    return calls_through(call, list(paths))


def _stand_in(recorder: Recorder, module: nn.Module, path: str, given: Any) -> Any:
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    tensors = list({id(t): t for t in leaves}.values())
    first = next((t for t in tensors if t.is_floating_point()), None)
    if first is None:
        # The enclosing module is then replaced.
        raise ValueError(f"the output of {path} is unknown")
    forward, backward = operators_of(module, path, tensors, first)
    forward.inputs = recorder.values(tensors)
    recorder.record_placeholder(forward)
    trained = [p for p in module.parameters() if p.requires_grad]
    grads = torch.is_grad_enabled() and bool(trained or any(t.requires_grad for t in tensors))
    like = replace(CallOutput.of(first, len(recorder.operators) - 1), requires_grad=grads)
    kept = [n for n, t in enumerate(tensors) if t.is_floating_point()] if grads else []
    template = Template(
        path,
        pytree.tree_structure(0),
        [like],
        kept,
        gradients=sum(p.nbytes for p in trained),
        on_backward=lambda: recorder.record_placeholder(backward),
    )
    output = replay(recorder, template, tensors)
    forward.outputs = recorder.values([output])
    backward.forward = len(recorder.operators) - 1
    return output


def operators_of(
    module: nn.Module, path: str, tensors: list[Tensor], first: Tensor
) -> tuple[Operator, Operator]:
    """Estimates forward and backward operators of a module from its parameters and input."""
    parameters = list(module.parameters())
    weights = sum(p.numel() for p in parameters if p.ndim > 1)
    rows = first.numel() // max(1, first.shape[-1] if first.ndim else 1)
    read = sum(t.nbytes for t in (*tensors, *parameters))
    flops = int(linear_flops(weights, rows))
    forward = Operator(OPAQUE, FORWARD, path, (), (), flops=flops, read=read, written=first.nbytes)
    backward = Operator(
        *(OPAQUE, BACKWARD, path, (), ()),
        flops=int(BACKWARD_OF_LINEAR * flops),
        read=read + first.nbytes,
        written=sum(t.nbytes for t in (*tensors, *parameters)),
    )
    return forward, backward


Criterion = Callable[[Any], Tensor]


def analyse(
    model: nn.Module,
    batch: Any,
    criterion: Criterion | None = None,
    *,
    kernels: str = "cpu",
    prepare: Callable[[nn.Module], None] = lambda _: None,
    repeats: bool = True,
) -> Analysis:
    """Analyzes the FLOPs, bytes and memory of a training step, operator by operator.

    Forward and backward run with fake tensors, so nothing as large as the model is allocated; equal
    blocks are traced once. The model is not changed.

    Args:
        model: model in the mode in which it will run, real or on meta.
        batch: a mapping of keyword arguments, a tuple of positional arguments, or a single
            argument; real or on meta.
        criterion: computes the loss from the output; None uses the output's own ``loss``, or the
            cross entropy of its floating-point tensors.
        kernels: device type whose operators are used: "cpu" or "cuda".
        prepare: called with the model before it runs, for example to enable recomputation; its
            changes to modules are undone.
        repeats: whether to trace equal calls of equal modules once.

    Raises:
        GulliverError: the model does not run on this batch.
    """
    step = _Step(model, batch, criterion, kernels, prepare)
    opaque = dict[str, UntracedModule]()
    while True:
        recorder = _Ran()
        try:
            return step.followed(recorder, opaque, repeats)
        except _NotContiguous:
            found = step.followed(_Ran(), opaque, False)
            note = "the backward of blocks is not contiguous: each block was traced"
            return replace(found, notes=(*found.notes, note))
        except GulliverError as error:
            name = f"module {recorder.path!r}" if recorder.path else type(model).__name__
            raise GulliverError(f"{name}: {error}") from error
        except Exception as error:
            opaque = widened(model, opaque, error, recorder.path)
        if "" in opaque:
            return step.whole(opaque[""])


class _NotContiguous(Exception):
    """Raised if the backward of a replayed call is not contiguous."""


class _Ran:
    """Records the module that was running when a step failed."""

    recorder: Recorder | None = None

    @property
    def path(self) -> str:
        running = self.recorder.running if self.recorder is not None else None
        return running.path if running is not None else ""


class _Step:
    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Criterion | None,
        kernels: str,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self.model, self.criterion = model, criterion
        self.kernels, self.prepare = kernels, prepare
        plain = not isinstance(batch, Mapping)
        args = (batch if isinstance(batch, tuple) else (batch,)) if plain else ()
        self.batch: tuple[tuple[Any, ...], dict[str, Any]] = (args, {} if plain else dict(batch))

    def followed(self, ran: _Ran, opaque: Mapping[str, UntracedModule], repeats: bool) -> Analysis:
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
                stack.enter_context(known.readable_values())
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
        if self.kernels != "cuda":
            return ()
        layers = [path for path, m in self.model.named_modules() if isinstance(m, nn.RNNBase)]
        if not layers:
            return ()
        return (
            f"{', '.join(layers)}: traced token by token; cuDNN's workspace is unknown without a "
            "GPU",
        )

    def whole(self, opaque: UntracedModule) -> Analysis:
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
            notes=("saved activations and peak memory are unknown",),
        )

    @staticmethod
    def _recorder(model: nn.Module, args: Any, kwargs: Any, known: Known | None = None) -> Recorder:
        leaves = pytree.tree_leaves((args, kwargs))
        return Recorder(model, [t for t in leaves if isinstance(t, Tensor)], known)

    def _run(
        self, recorder: Recorder, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        with recorder.following():
            output = model(*args, **kwargs)
            loss = (self.criterion or stand_in_loss)(output)
            recorder.backward = True
            if loss.requires_grad:
                # `loss.backward()` would leave the kernel-selecting mode while checkpoints
                # recompute.
                torch.autograd.backward(loss)
            del output, loss
