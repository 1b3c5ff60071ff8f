"""Groups the calls of a forward pass into operators, which are sharded and recomputed as units.

An operator is a matrix product, an attention, or a few memory-bound calls, with the views of its
outputs. Products that read the same value share a *fork*, an operator that only changes the layout,
so that the conversion is executed and counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod

from gulliver.errors import GulliverError
from gulliver.operators.rules import FORK, HARD, SUMMED, CallSharding, Layout, divides, shardings
from gulliver.operators.trace import OperatorCall, Ref, Trace

PRODUCTS = HARD - {FORK, "embedding", "cross_entropy"}


# [Note: what joins] A call joins the operator before it if both are in one module without products,
# such as a norm; or if all its inputs come from one operator and its backward reads none of them,
# such as a rotation of queries. Those inputs do not exist in backward, so the call could not be
# recomputed alone.
@dataclass
class Node:
    """An operator."""

    # Numbers of its calls.
    calls: list[int]
    # Path and name of its first call.
    name: str
    # Path of its block.
    block: str = ""


@dataclass(frozen=True)
class OperatorSharding:
    """A sharding of an operator along all mesh axes."""

    # Word of each axis.
    words: tuple[str, ...]
    # Layout of each of its inputs and outputs.
    layouts: dict[int, Layout] = field(hash=False)


@dataclass
class Graph:
    """Operators of a forward pass and the values between them."""

    # All calls, including forks.
    trace: Trace
    # Operators in their order.
    nodes: list[Node]
    # Sizes of the axes of the mesh.
    sizes: tuple[int, ...]

    @cached_property
    def node_of(self) -> dict[int, int]:
        return {call: n for n, node in enumerate(self.nodes) for call in node.calls}

    @cached_property
    def users(self) -> dict[int, list[int]]:
        found: dict[int, set[int]] = {}
        for number, call in enumerate(self.trace.calls):
            for value in call.takes:
                found.setdefault(value, set()).add(self.node_of[number])
        return {value: sorted(nodes - {self.maker(value)}) for value, nodes in found.items()}

    @cached_property
    def saved(self) -> frozenset[int]:
        """Values that any backward reads, directly or through views."""
        found = {v for call in self.trace.calls for v in call.saves}
        for call in reversed(self.trace.calls):
            if call.view and found.intersection(call.gives):
                found.add(call.takes[0])
        for call in self.trace.calls:
            if call.view and call.takes[0] in found:
                found.update(call.gives)
        return frozenset(found)

    def maker(self, value: int) -> int:
        """Operator that produces a value; -1 for inputs and parameters."""
        made = self.trace.values[value].maker
        return self.node_of[made] if made >= 0 else -1

    def takes(self, node: int) -> list[int]:
        calls = (self.trace.calls[n] for n in self.nodes[node].calls)
        found = dict.fromkeys(v for call in calls for v in call.takes)
        return [v for v in found if self.maker(v) != node]

    def gives(self, node: int) -> list[int]:
        calls = (self.trace.calls[n] for n in self.nodes[node].calls)
        every = (v for call in calls for v in call.gives)
        return [v for v in every if self.users.get(v) or v in self.trace.outputs]

    def trains(self, node: int) -> bool:
        return any(self.trace.values[v].trains for v in self.gives(node))

    @cached_property
    def blocks(self) -> list[range]:
        starts = [0]
        for number in range(1, len(self.nodes)):
            before, here = self.nodes[number - 1], self.nodes[number]
            if before.block != here.block and self._crosses(number):
                starts.append(number)
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.nodes)], strict=True)]

    def _crosses(self, number: int) -> bool:
        """Whether the only live value at a position is the previous operator's output."""
        past = [
            value
            for value, nodes in self.users.items()
            if self.trace.values[value].flows
            and self.maker(value) < number <= max(nodes, default=-1)
        ]
        return len(past) == 1 and self.maker(past[0]) == number - 1

    def shardings(self, node: int) -> list[OperatorSharding]:
        if not self.trains(node):
            along = [self._along(node)[:1] for _ in self.sizes]
        else:
            along = [self._along(node)] * len(self.sizes)
        found = list[tuple[int, OperatorSharding]]()
        several = sum(size > 1 for size in self.sizes)
        for chosen in product(*along):
            words = tuple(word for word, _ in chosen)
            idle = sum(w == "whole" for w, s in zip(words, self.sizes, strict=True) if s > 1)
            values = chosen[0][1]
            layouts = {v: tuple(one[v] for _, one in chosen) for v in values}
            shapes = self.trace.values
            if all(divides(shapes[v].shape, layout, self.sizes) for v, layout in layouts.items()):
                found.append((idle, OperatorSharding(words, layouts)))
        # Replicating over some axes only repeats work; take that only if nothing else is possible.
        full = [way for idle, way in found if idle in (0, several)]
        full = full if len(full) > 1 else [way for _, way in found]
        multiplies = any(self.trace.calls[n].name in PRODUCTS for n in self.nodes[node].calls)
        shared = [way for way in full if set(way.words) != {"whole"}]
        return shared if multiplies and shared else full

    def _along(self, node: int) -> list[tuple[str, dict[int, str]]]:
        """Shardings along one axis: a name, and the layout of each value."""
        calls = [self.trace.calls[n] for n in self.nodes[node].calls]
        first = next((c for c in calls if not c.view), calls[0])
        found: dict[str, dict[int, str]] = {}

        def grown(rest: Sequence[OperatorCall], known: dict[int, str], word: str) -> None:
            if not rest:
                found.setdefault(word, known)
                return
            call = rest[0]
            for way in shardings(call):
                more = self._fitting(call, way, known, node)
                if more is not None:
                    grown(rest[1:], more, way.word if call is first else word)

        grown(calls, {}, "")
        return list(found.items())

    def _fitting(
        self, call: OperatorCall, way: CallSharding, known: dict[int, str], node: int
    ) -> dict[int, str] | None:
        """Extends layouts by one more call; None if they contradict each other."""
        more = dict(known)
        for value, layout in zip(call.takes, way.takes, strict=True):
            if not self.trace.values[value].trains and layout == SUMMED:
                layout = "R"
            inside = self.maker(value) == node or value in more
            if inside and more.get(value, layout) != layout:
                return None
            more[value] = layout
        for value, layout in zip(call.gives, way.gives, strict=True):
            more[value] = layout
        return more


def graph_of(trace: Trace, sizes: tuple[int, ...], blocks: Sequence[str]) -> Graph:
    trace = with_forks(trace)
    nodes = list(_nodes(trace, blocks))
    if not any(v.flows for v in trace.values):
        raise GulliverError("nothing in the forward requires gradients; unfreeze some parameters")
    return Graph(trace, nodes, sizes)


def with_forks(trace: Trace) -> Trace:
    """Adds a fork in front of products that read the same value."""
    wanted = dict[int, list[int]]()
    for number, value in enumerate(trace.values):
        users = [n for n in trace.users(number) if trace.calls[n].name in PRODUCTS]
        if value.flows and len(users) > 1:
            wanted.setdefault(value.maker, []).append(number)
    made, renamed = Trace(outputs=trace.outputs, values=list(trace.values)), dict[int, int]()
    moved = dict[int, int]()
    for number, call in enumerate(trace.calls):
        moved[number] = len(made.calls)
        takes = tuple(renamed.get(v, v) if call.name in PRODUCTS else v for v in call.takes)
        back = dict(zip(call.takes, takes, strict=True))
        saves = frozenset(back[v] for v in call.saves)
        made.calls.append(replace(call, takes=takes, saves=saves))
        for value in wanted.get(number, ()):
            own = trace.values[value]
            renamed[value] = len(made.values)
            made.values.append(replace(own, maker=len(made.calls)))
            shapes = (own.shape,)
            made.calls.append(
                OperatorCall(
                    FORK,
                    call.path,
                    _same,
                    (Ref(0),),
                    {},
                    (value,),
                    (renamed[value],),
                    shapes,
                    shapes,
                    view=True,
                )
            )
    made.values = [
        replace(v, maker=moved[v.maker]) if n < len(trace.values) and v.maker >= 0 else v
        for n, v in enumerate(made.values)
    ]
    made.dies = {v: moved.get(n, len(made.calls)) for v, n in trace.dies.items()}
    return made


def _same(tensor: object) -> object:
    return tensor


def _nodes(trace: Trace, blocks: Sequence[str]) -> Iterator[Node]:
    found, node_of = list[Node](), dict[int, int]()
    leaves = _leaves(trace)
    for number, call in enumerate(trace.calls):
        block = next((b for b in blocks if f"{call.path}.".startswith(f"{b}.")), "")
        at = _joined_to(trace, call, found, node_of, leaves)
        if at is None or found[at].block != block:
            at = len(found)
            path = f"{call.path} " if call.path else ""
            found.append(Node([], f"{path}{call.name}", block))
        found[at].calls.append(number)
        node_of[number] = at
    yield from found


def _leaves(trace: Trace) -> frozenset[str]:
    hard = {c.path for c in trace.calls if c.name in HARD - {FORK}}
    every = {c.path for c in trace.calls} - hard
    return frozenset(p for p in every if p and not any(h.startswith(f"{p}.") for h in hard))


def _joined_to(
    trace: Trace,
    call: OperatorCall,
    found: list[Node],
    node_of: dict[int, int],
    leaves: frozenset[str],
) -> int | None:
    """Index of the operator that a call may join; None if it starts a new one."""
    values = [trace.values[v] for v in call.takes]
    trained = any(v.trains for v in values)
    makers = {node_of[v.maker] for v in values if v.maker >= 0 and v.trains is trained}
    if call.name == FORK or not makers:
        return None
    source = trace.values[call.takes[0]].maker
    if call.name in PRODUCTS and source >= 0 and trace.calls[source].name == FORK:
        return node_of[source]  # all readers of a fork use the same layout
    last = len(found) - 1
    if call.path in leaves and last in makers and call.name not in HARD:
        return None if trace.calls[found[last].calls[0]].path != call.path else last
    if len(makers) > 1 or (call.name in HARD and not call.view):
        return None
    (maker,) = makers
    beside = (v for v in values if v.maker < 0 or node_of[v.maker] != maker)
    if any(prod(v.shape) >= prod(call.shapes_given[0]) for v in beside):
        return None  # a sum with a skip connection, such as the model's input
    if not call.view and any(trace.values[v].flows for v in call.saves):
        return None
    first = trace.calls[found[maker].calls[0]].name
    return maker if trained or first not in HARD else None
