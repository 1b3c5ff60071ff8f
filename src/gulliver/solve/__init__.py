"""Pure algorithms on plain numbers: no torch, no files, no clocks.

Each file is an answer to one question: what becomes of activations (`_activations.py`), where to
cut a pipeline (`partition.py`), how a tensor gets another layout (`conversion.py`), who gets which
of several things (`partition.py`), where a block of memory goes (`extents.py`), what goes
together into bins of one size (`_packing.py`), what a fast tier of memory keeps
(`replacement.py`; the plan for it: `_residency.py`), and one between two others (`transit.py`),
how long a step of ZeRO takes (`timeline.py`), which sizes to try (`partition.py`), how operators
are sharded, recomputed and moved jointly (`joint.py`, then `joint_search.py`), which ranks share
which samples in a step (`_steps.py`, over `packing.py` and `steps.py`; which samples
make one:
`arrange.py`; what runs between two halves of one: `timeline.py`; micro-batches for ranks that are
stages: `steps.py`), which rows of a table a cache holds (`rows.py`, with
`rows.py` and `rows.py`), how tables share ranks
(`tables.py`) and memory (`tables.py`), how many slots of a cluster each job has
(`allocation.py`), and when all jobs could be done at best (`allocation.py`).
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.solve.activations import Choice, choose_activations
    from gulliver.solve.cycle import Event
    from gulliver.solve.joint import Block, Operator, Strategy
    from gulliver.solve.joint_search import least_memory, solve_in_stages, solve_joint
    from gulliver.solve.partition import partition_chain
    from gulliver.solve.replacement import Moved, Policy, simulate
    from gulliver.solve.rows import HashIndex
    from gulliver.solve.steps import split_batches
    from gulliver.solve.timeline import step_seconds

__all__ = [
    "Block",
    "Choice",
    "Event",
    "HashIndex",
    "Moved",
    "Operator",
    "Policy",
    "Strategy",
    "choose_activations",
    "least_memory",
    "partition_chain",
    "simulate",
    "solve_in_stages",
    "solve_joint",
    "split_batches",
    "step_seconds",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.solve.activations": ["Choice", "choose_activations"],
        "gulliver.solve.cycle": ["Event"],
        "gulliver.solve.joint": ["Block", "Operator", "Strategy"],
        "gulliver.solve.joint_search": ["least_memory", "solve_in_stages", "solve_joint"],
        "gulliver.solve.partition": ["partition_chain"],
        "gulliver.solve.replacement": ["Moved", "Policy", "simulate"],
        "gulliver.solve.rows": ["HashIndex"],
        "gulliver.solve.steps": ["split_batches"],
        "gulliver.solve.timeline": ["step_seconds"],
    },
)
