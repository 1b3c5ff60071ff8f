"""Builds an `Analysis` from the record of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from gulliver.plan.analysis.recorder import ModuleCall, Moment, Packed, Recorder
from gulliver.plan.analysis.records import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Analysis,
    Cost,
    ModuleCosts,
    Operator,
    Saved,
)
from gulliver.plan.analysis.repeats import Repeats, Template


# [Note: peaks of replayed calls] A replayed call has the same bytes before and after as the call
# that it repeats, so its peak is as far above the bytes at its start. For the backward this
# requires that the repeated call's backward is contiguous, with no operator of another module in
# between. If it is not, the step must be followed without replays.
def summed(model: nn.Module, recorder: Recorder, repeats: Repeats | None) -> Analysis | None:
    """Sums up a step; None if what was replayed cannot be known."""
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
    """Peak bytes between moments; a replayed call adds the peak of the call that it repeats."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments
        self._known: dict[tuple[int, bool], tuple[int, int]] = {}
        self._above = [self._most_of(moment) for moment in moments]

    def most(self, first: int, end: int) -> tuple[int, int]:
        """Most bytes from one moment to before another, without and with gradients."""
        part = self._above[first:end]
        return max((p[0] for p in part), default=0), max((p[1] for p in part), default=0)

    def forward(self, call: ModuleCall) -> int:
        """Most bytes of the forward of a call above what was there as it began."""
        return max(0, self.most(call.begun, call.ended)[0] - call.before)

    def backward(self, call: ModuleCall) -> int:
        """Most bytes of the backward of a call above what was there as it began."""
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
    """Extends a call's backward by the accumulations that follow it."""
    while call.span and call.span[1] + 1 < len(moments):
        after = moments[call.span[1] + 1]
        if after.operator < 0 or not _added_up(operators[after.operator]):
            return
        call.span[1] += 1


def _added_up(operator: Operator) -> bool:
    """Whether an operator was run by the autograd engine itself."""
    return operator.phase == BACKWARD and operator.forward < 0


def _in_one_piece(
    template: Template, moments: Sequence[Moment], operators: Sequence[Operator]
) -> bool:
    """Whether the backward of a call is contiguous."""
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
    """Counts the operators of a call as often as it was replayed."""
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
    """Yields the costs of the modules that were called, in the order of their first call."""
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
    """Work by path and phase; inside a replayed call, that of one call."""
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
