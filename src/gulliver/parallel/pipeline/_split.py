"""Backward in two parts: the gradients of a stage's inputs now, those of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gulliver._compat import without_torch_functions

Gradients = tuple[Tensor | None, ...]


# [Note: why two parts] The stage before waits for the gradient of the inputs, and nobody waits for
# those of the weights before the optimizer's step. Zero-bubble schedules (Qi et al., 2024, arXiv
# 2401.10241) therefore send the former on as soon as they can, and fill the time in which a stage
# would wait (the bubble) with the latter. One backward does both and cannot be interrupted.
#
# Let C be the nodes of the autograd graph that lie between the inputs and the outputs. The first
# part runs C alone. A weight is attached to C at some nodes, its *ends*; the gradient that comes
# into them is noted as it passes. The second part starts backward at the ends, with what was noted.
# Weights that share ends are done together; as one end may lie behind another, what would come into
# an end from there is replaced by what was noted, which has it already. So each path from the
# outputs to a weight is counted once, whatever the graph is like: shared weights, weights used
# twice, weights in front of an input that comes in later.
#
# The second part accumulates as any backward does, hooks of accumulation included.
@dataclass
class _Group:
    """Weights whose gradients are computed together, and the ends that they are attached to."""

    ends: set[Node]
    weights: list[nn.Parameter]


@dataclass
class Rest:
    """The part of a backward that remains after the gradients of the inputs."""

    groups: list[_Group]
    noted: dict[Node, Gradients] = field(default_factory=dict)

    def run(self) -> None:
        """Adds the gradients of the weights to their ``grad``."""
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
                # Other groups may pass the same nodes; the graph goes when this object does.
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
) -> Rest:
    """Adds the gradients of inputs to their ``grad`` and leaves the weights alone."""
    given = [torch.ones_like(outputs[0])] if gradients is None else list(gradients)
    roots = [get_gradient_edge(output) for output in outputs]
    above = _above([root.node for root in roots])
    between = _climb([get_gradient_edge(t).node for t in inputs], above, set())[0]
    rest = Rest(_groups(weights, above, between))
    ends = set().union(*(group.ends for group in rest.groups))
    for root, gradient in zip(roots, given, strict=True):
        # Of an output that no input leads to, backward of the inputs sees nothing.
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
    """Returns the parents of each node of a graph; roots have none."""
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
    """Returns all ancestors of some nodes up to those in `until`, and the ones of `until` found."""
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
        with without_torch_functions():  # its values may be elsewhere, and are not needed
            node = get_gradient_edge(weight).node
        if node not in above:
            continue
        seen, ends = _climb([node], above, between)
        # Tops that no input leads to: outputs of the weights alone.
        ends |= {top for top in seen if not above[top] and top is not node}
        group = _Group(set(ends), [weight])
        for other in {id(owner[end]): owner[end] for end in ends if end in owner}.values():
            group.ends |= other.ends
            group.weights += other.weights
            groups.remove(other)
        groups.append(group)
        owner.update(dict.fromkeys(group.ends, group))
    return groups


def _note(rest: Rest, end: Node) -> Callable[[tuple[Tensor, ...]], None]:
    def note(gradients: tuple[Tensor, ...]) -> None:
        rest.noted[end] = gradients

    return note


def _always(gradients: Gradients) -> Callable[..., Gradients]:
    return lambda _: gradients
