"""Optimization algorithms on plain numbers, without torch, files or clocks.

Most return a solution, its value and a bound. Tests compare them with brute force.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.solve.activations import Choice, choose_activations
    from gulliver.solve.cycle import Event
    from gulliver.solve.joint import Block, Operator, Strategy
    from gulliver.solve.joint_search import least_memory, solve_joint
    from gulliver.solve.partition import partition_chain
    from gulliver.solve.replacement import Policy
    from gulliver.solve.rows import HashIndex
    from gulliver.solve.steps import split_batches

__all__ = [
    "Block",
    "Choice",
    "Event",
    "HashIndex",
    "Operator",
    "Policy",
    "Strategy",
    "choose_activations",
    "least_memory",
    "partition_chain",
    "solve_joint",
    "split_batches",
]

__getattr__, __dir__ = lazy_exports(__name__)
