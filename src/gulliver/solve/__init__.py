"""Optimization algorithms on plain numbers, without torch, files or clocks.

Most return a solution, its value and a bound. Tests compare them with brute force.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.solve.activations import Choice as Choice
    from gulliver.solve.activations import choose_activations as choose_activations
    from gulliver.solve.cycle import Event as Event
    from gulliver.solve.joint import Block as Block
    from gulliver.solve.joint import Operator as Operator
    from gulliver.solve.joint import Strategy as Strategy
    from gulliver.solve.joint_search import least_memory as least_memory
    from gulliver.solve.joint_search import solve_joint as solve_joint
    from gulliver.solve.partition import partition_chain as partition_chain
    from gulliver.solve.replacement import Policy as Policy
    from gulliver.solve.rows import HashIndex as HashIndex
    from gulliver.solve.steps import split_batches as split_batches

__getattr__, __dir__ = lazy_exports(__name__)
