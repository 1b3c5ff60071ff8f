"""Plans the operators of a model, and compiles plans into programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Cluster
from gulliver.operators.graph import Graph, Node, graph_of
from gulliver.operators.problem import Problem, stored_layout
from gulliver.operators.rules import Layout, gradient_placements, placements
from gulliver.operators.run import PlannedCall
from gulliver.operators.trace import trace_calls
from gulliver.options import byte_size
from gulliver.plan.plan import Plan
from gulliver.plan.reading import join
from gulliver.plan.results import Predicted, Seconds
from gulliver.plan.tree import Mesh, OperatorBlock, OperatorChoice, OperatorPlan
from gulliver.planner.model import blocks_of
from gulliver.solve.joint_search import JointPlan, solve_joint

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """A forward pass compiled from a plan.

    Attributes:
        graph: graph of its operators.
        calls: planned calls.
        parameters: layout in which each parameter is stored, by name.
        runs: index of the recomputed run that contains each call.
        stays: values that are kept even though the call that produces them is recomputed.
    """

    graph: Graph
    calls: tuple[PlannedCall, ...]
    parameters: Mapping[str, Layout]
    runs: Mapping[int, int]
    stays: frozenset[int]


def batch_of(given: Any) -> Batch:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def form_of(batch: Batch) -> dict[str, str]:
    found = dict[str, str]()
    for name, value in [*((str(n), v) for n, v in enumerate(batch[0])), *batch[1].items()]:
        if not isinstance(value, Tensor):
            raise GulliverError(
                f"argument {name} of the batch is a {type(value).__name__}: only tensors are "
                "supported; bind it with functools.partial, or in the model"
            )
        sizes = " x ".join(map(str, value.shape))
        found[name] = f"{str(value.dtype).removeprefix('torch.')} {sizes}".strip()
    return found


def batch_from(plan: Plan) -> Batch:
    """Creates a batch on the meta device with the dtypes and shapes of a plan."""
    assert plan.operators is not None, "the plan is of operators"
    args, kwargs = list[Any](), dict[str, Any]()
    for name, form in plan.operators.batch.items():
        dtype, _, sizes = form.partition(" ")
        try:
            shape = [int(size) for size in sizes.split(" x ")] if sizes else []
            made = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        except (ValueError, AttributeError, TypeError) as error:
            told = plan.describe_field(join("operators.batch", name))
            raise GulliverError(f"{told} needs dtype and sizes, such as int64 8 x 128") from error
        if name.isdigit():
            args.append(made)
        else:
            kwargs[name] = made
    return tuple(args), kwargs


def axes_of(mesh: Mesh) -> dict[str, int]:
    several = {name: size for name, size in mesh.axes.items() if size > 1}
    return several or {"data": 1}


def find_operators(
    model: nn.Module,
    batch: Any,
    cluster: Cluster,
    axes: Mapping[str, int] | None = None,
    memory: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    states: int = 64,
) -> Plan:
    """Searches jointly for the sharding and recomputation of a model's operators.

    Args:
        model: full model, possibly on the meta device.
        batch: global batch of a step, real or on the meta device.
        cluster: machines, with one device per rank.
        axes: names and sizes of the mesh axes, slowest links first; None for one axis.
        memory: bytes per rank for state and activations; None for the device's memory.
        optimizer: optimizer whose state is counted; None for Adam.
        states: maximum partial plans of each kind that the search keeps.

    Raises:
        GulliverError: the forward cannot be sharded exactly, or no plan fits in memory.
    """
    axes = dict(axes or {"data": cluster.size})
    if math.prod(axes.values()) != cluster.size:
        raise GulliverError(
            f"axes {axes} have {math.prod(axes.values())} ranks in total, but the cluster has "
            f"{cluster.size}"
        )
    given = batch_of(batch)
    form = form_of(given)
    budget = cluster.device.memory_bytes if memory is None else byte_size("memory", memory)
    problem = problem_of(model, given, tuple(axes.values()), cluster, moments_of(optimizer))
    found = solve_joint(problem.blocks, budget, states=states, tolerance=0.01)
    device = "cuda" if cluster.device.to_device_rate is not None else "cpu"
    return plan_from(problem, found, Mesh(device, axes), form, budget)


def problem_of(
    model: nn.Module, batch: Batch, sizes: tuple[int, ...], cluster: Cluster, moments: int = 2
) -> Problem:
    graph = graph_of(trace_calls(model, batch), sizes, blocks_of(model))
    return Problem(graph, cluster, moments)


def moments_of(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 2
    options = optimizer.defaults
    if "betas" in options:
        return 3 if options.get("amsgrad") else 2
    return int(bool(options.get("momentum")))


def plan_from(
    problem: Problem, found: JointPlan, mesh: Mesh, form: dict[str, str], budget: int
) -> Plan:
    graph, names = problem.graph, tuple(axes_of(mesh))
    blocks: dict[str, tuple[tuple[OperatorChoice, ...], list[str]]] = {}
    for label, numbers, picks in zip(labels(graph), graph.blocks, found.picks, strict=True):
        chosen = tuple(
            OperatorChoice(
                _relative(graph.nodes[node]),
                dict(zip(names, problem.shardings[node][pick.strategy].words, strict=True)),
                pick.choice,
            )
            for node, pick in zip(numbers, picks, strict=True)
        )
        blocks.setdefault(repr(chosen), (chosen, []))[1].append(label)
    operators = OperatorPlan(
        form,
        budget,
        tuple(OperatorBlock(tuple(paths), chosen) for chosen, paths in blocks.values()),
        found.cost.peak,
    )
    strategies = [pick.strategy for picks in found.picks for pick in picks]
    held = problem.held(strategies, found.cost.peak - found.cost.state)
    seconds = Seconds(step=found.cost.seconds)
    predicted = Predicted(problem.cluster.name, seconds, bytes=held)
    gap = f"no better answer is more than {found.gap:.1%} faster" if not found.exact else "exact"
    return Plan(
        plugin="operators",
        mesh=mesh,
        operators=operators,
        predicted=predicted,
        reasons={"operators": f"joint search of {len(graph.nodes)} operators, {gap}"},
    )


def labels(graph: Graph) -> list[str]:
    found = list[str]()
    for numbers in graph.blocks:
        node = graph.nodes[numbers[0]]
        label = node.block or node.name
        same = sum(1 for other in found if other == label or other.startswith(f"{label} #"))
        found.append(f"{label} #{same + 1}" if same else label)
    return found


def _relative(node: Node) -> str:
    return node.name.removeprefix(f"{node.block}.") if node.block else node.name


def program_of(plan: Plan, model: nn.Module) -> Program:
    assert plan.operators is not None, "the plan is of operators"
    names = tuple(axes_of(plan.mesh))
    sizes = tuple(axes_of(plan.mesh).values())
    graph = graph_of(trace_calls(model, batch_from(plan)), sizes, blocks_of(model))
    return _Compiler(plan, graph, names).program()


class _Compiler:
    def __init__(self, plan: Plan, graph: Graph, names: tuple[str, ...]) -> None:
        self.plan, self.graph, self.names = plan, graph, names
        assert plan.operators is not None
        self.places: dict[int, str] = {}
        self.chosen: dict[int, OperatorChoice] = {}
        self._place()

    def _place(self) -> None:
        assert self.plan.operators is not None
        known = dict(zip(labels(self.graph), self.graph.blocks, strict=True))
        seen: dict[str, str] = {}
        for number, row in enumerate(self.plan.operators.blocks):
            where = f"operators.blocks[{number}]"
            for index, label in enumerate(row.blocks):
                place = f"{where}.blocks[{index}]"
                if label in seen:
                    both = f"{self._line(seen[label], label)} and {self._line(place, label)}"
                    raise GulliverError(f"{both} name the same block: remove one of them")
                if label not in known:
                    told = self._line(place, label)
                    raise GulliverError(
                        f"{told} is not a block of the model: {nearest(label, known)}"
                    )
                seen[label] = place
                self._place_block(f"{where}.operators", row, known[label])
        missing = [label for label in known if label not in seen]
        if missing:
            raise GulliverError(f"operators.blocks does not name {missing[0]!r}: plan again")

    def _place_block(self, where: str, row: OperatorBlock, numbers: range) -> None:
        wanted = [_relative(self.graph.nodes[n]) for n in numbers]
        given = [choice.operator for choice in row.operators]
        if given != wanted:
            pairs = enumerate(zip_longest(given, wanted, fillvalue="the end"))
            index, (here, there) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
            told = self._line(f"{where}[{index}].operator", repr(here))
            raise GulliverError(f"{told}, but the model computes {there!r} there; plan again")
        for index, (node, choice) in enumerate(zip(numbers, row.operators, strict=True)):
            self.chosen[node], self.places[node] = choice, f"{where}[{index}]"

    def _line(self, place: str, value: str) -> str:
        return f"{place}: {value}{self.plan.line_text(place)}"

    def program(self) -> Program:
        layouts = [self._layouts(node) for node in range(len(self.graph.nodes))]
        runs, stays = self._fates()
        calls, parameters = list[PlannedCall](), dict[str, Layout]()
        values = self.graph.trace.values
        home: dict[int, Layout] = {}
        for node, known in enumerate(layouts):
            for value, layout in known.items():
                if values[value].parameter:
                    home.setdefault(value, stored_layout(layout))
                elif self.graph.maker(value) == node:
                    home[value] = layout
        whole = ("R",) * len(self.names)
        for number, call in enumerate(self.graph.trace.calls):
            node = self.graph.node_of[number]
            takes = tuple(layouts[node][v] for v in call.takes)
            gives = tuple(layouts[node][v] for v in call.gives)
            homes = (
                placements(home[v])
                if values[v].parameter
                else gradient_placements(home.get(v, whole))
                for v in call.takes
            )
            choice = self.chosen[node].saved
            calls.append(PlannedCall(call, number, takes, gives, tuple(homes), choice))
        parameters = {
            values[v].parameter: layout for v, layout in home.items() if values[v].parameter
        }
        return Program(self.graph, tuple(calls), parameters, runs, stays)

    def _layouts(self, node: int) -> Mapping[int, Layout]:
        choice, where = self.chosen[node], self.places[node]
        if tuple(choice.along) != self.names:
            told = self._line(f"{where}.along", ", ".join(choice.along))
            raise GulliverError(f"{told}, but operators are sharded along {', '.join(self.names)}")
        words = tuple(choice.along.values())
        shardings = {way.words: way.layouts for way in self.graph.shardings(node)}
        if words in shardings:
            return shardings[words]
        lines = " and ".join(
            self._line(f"{where}.along.{name}", word)
            for name, word in zip(self.names, words, strict=True)
        )
        some = "; ".join(", ".join(way) for way in list(shardings)[:6])
        raise GulliverError(
            f"{choice.operator} does not support this layout: {lines}; supported are {some}"
        )

    def _fates(self) -> tuple[dict[int, int], frozenset[int]]:
        runs, stays, number = dict[int, int](), set[int](), 0
        for block in self.graph.blocks:
            stays |= set(self.graph.gives(block[-1]))
            until = -1
            for node in block:
                number += until < node
                if self.chosen[node].saved == "recompute":
                    self._check_again(node)
                    runs.update(dict.fromkeys(self.graph.nodes[node].calls, number))
                    until = max(until, self._used_until(node, block))
        return runs, frozenset(stays)

    def _used_until(self, node: int, block: range) -> int:
        users = [
            u for v in self.graph.gives(node) for u in self.graph.users.get(v, []) if u in block
        ]
        return max([node, *users]) if node != block[-1] else node

    def _check_again(self, node: int) -> None:
        values = self.graph.trace.values
        if not self.graph.trains(node):
            told = self._line(f"{self.places[node]}.saved", "recompute")
            raise GulliverError(
                f"{told}, but {self.chosen[node].operator} saves no activations; use keep"
            )
        for value in self.graph.takes(node):
            if not values[value].flows or value in self.graph.saved:
                continue
            maker = self.graph.maker(value)
            if self.chosen[maker].saved != "recompute":
                raise GulliverError(
                    f"{self._line(f'{self.places[node]}.saved', 'recompute')} and "
                    f"{self._line(f'{self.places[maker]}.saved', self.chosen[maker].saved)} "
                    "conflict: recompute both, or keep the first"
                )
