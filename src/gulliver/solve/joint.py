"""Cost model of the joint search over shardings and recomputation of operators.

A network is a sequence of *blocks*, each a small graph of *operators* in forward order; the output
of the last operator is the block's output. For each operator, a plan picks one of its *strategies*
(shardings, with their seconds and bytes on a device), and whether to keep or recompute its saved
tensors.

Seconds. Forward and backward of an operator include compute, communication, and the conversion of
its inputs from the producers' layouts. Recomputation repeats all of the forward.

Memory. State (parameters, gradients, optimizer state) is always resident. In addition, forward and
backward of operator t need

    bytes left by earlier operators + run + saved_t + output_t + working_t

An operator leaves `output` and, if kept, `saved`. [Note: runs] explains `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gulliver.errors import GulliverError
from gulliver.solve.activations import Choice

ENTRY = -1  # index of a block's input, which is the output of the previous block


# [Note: runs] Recomputation happens in runs, as with activation checkpointing: a run begins at a
# recomputed operator and continues while one of its values is still needed later, by a backward or,
# if its output does not stay, by any operator. The whole run is recomputed when the backward first
# needs any of it, and each value is freed with the backward of its own operator. So operator t sees
# the bytes of the whole open run below it, and may need the transient bytes of any forward in it.
# Runs end with their block: a block's output is kept.
@dataclass(frozen=True)
class Strategy:
    """A sharding of an operator, with its costs on one device.

    Attributes:
        name: name in reports.
        forward_s: compute seconds in forward.
        backward_s: compute seconds in backward.
        forward_comm_s: communication seconds in forward.
        backward_comm_s: communication seconds in backward that compute does not hide.
        state: bytes of parameters, gradients and optimizer state.
        saved: bytes saved between forward and backward, including the output if a backward reads
            it.
        output: bytes that stay even if `saved` is recomputed.
        forward_bytes: workspace in forward.
        backward_bytes: workspace in backward, including gradients.
    """

    name: str = ""
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    state: int = 0
    saved: int = 0
    output: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True)
class EdgeSeconds:
    """Conversion costs of an input, by strategy of its producer (rows) and consumer (columns)."""

    # Seconds of its conversion in forward.
    forward_s: tuple[tuple[float, ...], ...]
    # Seconds of the conversion of its gradient.
    backward_s: tuple[tuple[float, ...], ...]
    # Bytes of the converted copy, which the consumer saves; None for none.
    saved: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Operator:
    """A node of a block.

    Attributes:
        name: name in reports.
        strategies: possible shardings.
        inputs: indices, in its block, of the operators that it reads; `ENTRY` is the block's input.
        conversions: conversion costs of each input; free if empty.
        last_use: index of the last operator whose backward reads this one's saved tensors; None if
            only its own does.
        recomputable: whether its forward may run twice.
    """

    name: str
    strategies: tuple[Strategy, ...]
    inputs: tuple[int, ...] = (ENTRY,)
    conversions: tuple[EdgeSeconds | None, ...] = ()
    last_use: int | None = None
    recomputable: bool = True


@dataclass(frozen=True)
class Block:
    """Operators in forward order; the output of the last one is the output of the block."""

    operators: tuple[Operator, ...]

    def used_until(self, number: int, strategy: int) -> int:
        """Last user of `number`'s saved tensors; `len(operators)` if it is in a later block."""
        operator = self.operators[number]
        last = max(number, operator.last_use or 0)
        if operator.strategies[strategy].output:
            return last
        if number == len(self.operators) - 1:
            return len(self.operators)
        return max([last, *(n for n, o in enumerate(self.operators) if number in o.inputs)])


class Pick(NamedTuple):
    """The strategy of an operator, and the choice for its saved tensors."""

    strategy: int
    choice: Choice


@dataclass(frozen=True)
class JointCost:
    """Predicted time and memory of picks."""

    # Seconds of forward and backward.
    seconds: float
    # Peak bytes.
    peak: int
    # Block and operator whose passes need the peak.
    at: tuple[int, int]
    # Bytes of state in the peak.
    state: int
    # Bytes left by operators below in the peak.
    below: int


class _Pass(NamedTuple):
    forward: float
    backward: float
    saved: int


def joint_cost(blocks: Sequence[Block], picks: Sequence[Sequence[Pick]]) -> JointCost:
    needs = list[tuple[int, int, tuple[int, int]]]()
    below = state = 0
    seconds = 0.0
    entry: int | None = None
    for number, (block, chosen) in enumerate(zip(blocks, picks, strict=True)):
        walk = _Walk(block, chosen, entry, below)
        needs += [(need, under, (number, place)) for place, (need, under) in enumerate(walk.needs)]
        seconds += walk.forward + walk.backward
        below, state = below + walk.left, state + walk.state
        entry = chosen[-1].strategy
    need, under, at = max(needs, key=lambda n: n[0])
    return JointCost(seconds, state + need, at, state, under)


class _Walk:
    def __init__(self, block: Block, picks: Sequence[Pick], entry: int | None, below: int) -> None:
        self.forward = self.backward = 0.0
        self.state = self.left = 0
        self.needs: list[tuple[int, int]] = []
        run = replayed = 0
        until = -1
        for number, (operator, pick) in enumerate(zip(block.operators, picks, strict=True)):
            if until < number:
                run = replayed = 0
            taken = operator.strategies[pick.strategy]
            spent = _passes(operator, picks, number, entry)
            under = below + self.left + run
            working = max(taken.forward_bytes, taken.backward_bytes, replayed)
            self.needs.append((under + spent.saved + taken.output + working, under))
            self.forward += spent.forward
            self.backward += spent.backward
            self.state += taken.state
            self.left += taken.output
            if pick.choice == "recompute":
                run, replayed = run + spent.saved, max(replayed, taken.forward_bytes)
                until = max(until, block.used_until(number, pick.strategy))
                self.backward += spent.forward
            else:
                self.left += spent.saved
        if until >= len(block.operators):
            raise GulliverError("the output of a block cannot be recomputed; keep it")


def _passes(operator: Operator, picks: Sequence[Pick], number: int, entry: int | None) -> _Pass:
    mine = picks[number].strategy
    taken = operator.strategies[mine]
    forward = taken.forward_s + taken.forward_comm_s
    backward = taken.backward_s + taken.backward_comm_s
    saved = taken.saved
    for source, conversion in zip(operator.inputs, operator.conversions, strict=False):
        theirs = entry if source == ENTRY else picks[source].strategy
        if conversion is None or theirs is None:
            continue
        forward += conversion.forward_s[theirs][mine]
        backward += conversion.backward_s[theirs][mine]
        saved += conversion.saved[theirs][mine] if conversion.saved else 0
    return _Pass(forward, backward, saved)
