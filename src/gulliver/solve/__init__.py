"""Pure algorithms on plain numbers: no torch, no files, no clocks.

Each file is an answer to one question: what becomes of activations (`_activations.py`), where to
cut a pipeline (`_chain.py`), how a tensor gets another layout (`_conversion.py`), who gets which
of several things (`_balance.py`), where a block of memory goes (`_extents.py`), what goes
together into bins of one size (`_packing.py`), what a fast tier of memory keeps
(`_replacement.py`; the plan for it: `_residency.py`), and one between two others (`_transit.py`),
how long a step of ZeRO takes (`_timeline.py`), which sizes to try (`_unimodal.py`), how operators
are sharded, recomputed and moved jointly (`_joint.py`, then `_joint_search.py`), which ranks share
which samples in a step (`_steps.py`, over `_step_tables.py` and `_accumulation.py`; which samples
make one:
`_arrange.py`; what runs between two halves of one: `_halves.py`; micro-batches for ranks that are
stages: `_step_stages.py`), which rows of a table a cache holds (`_row_replacement.py`, with
`_row_index.py` and `_sketch.py`), how tables share ranks
(`_table_placement.py`) and memory (`_miss_ratio.py`), how many slots of a cluster each job has
(`_allocation.py`), and when all jobs could be done at best (`_fluid.py`).
"""

from gulliver.solve._accumulation import accumulated, covering, split_batches
from gulliver.solve._activations import (
    ActivationChoice,
    BlockActivations,
    Choice,
    PassCosts,
    activations_peak,
    choose_activations,
    least_room,
)
from gulliver.solve._allocation import allocate, concave_hull, relaxed_value
from gulliver.solve._arrange import StepArranger
from gulliver.solve._balance import balanced_parts
from gulliver.solve._chain import ChainPartition, chain_times, partition_chain
from gulliver.solve._conversion import (
    Conversion,
    ConversionStep,
    Sharding,
    box_elements,
    convert_least,
    extent,
    moves_from,
)
from gulliver.solve._cycle import Cycle, Event
from gulliver.solve._extents import PAGE, Extents, size_class
from gulliver.solve._fluid import fluid_bound, fluid_bound_by_lp
from gulliver.solve._halves import halves
from gulliver.solve._joint import (
    ENTRY,
    Block,
    EdgeSeconds,
    JointCost,
    OffloadLink,
    Operator,
    Pick,
    Strategy,
    joint_cost,
)
from gulliver.solve._joint_search import JointPlan, least_memory
from gulliver.solve._joint_solve import solve_in_stages, solve_joint
from gulliver.solve._miss_ratio import MissCurve, SharedCache, lru_misses, share_cache
from gulliver.solve._moves import Action, Move, NoRoom
from gulliver.solve._packing import Packing, pack
from gulliver.solve._replacement import Policy, Replacement
from gulliver.solve._residency import STATES, Gap, Residency, plan_residency
from gulliver.solve._row_index import HashIndex, RowIndex, index_bytes, make_index
from gulliver.solve._row_replacement import (
    RowCounts,
    RowPlan,
    RowPolicy,
    RowReplacement,
    RowRequest,
    TooSmall,
    one_row_each,
)
from gulliver.solve._schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Prediction,
    schedule_seconds,
)
from gulliver.solve._simulation import Moved, count_moves, replay, simulate
from gulliver.solve._sketch import DecayedCounts
from gulliver.solve._step_stages import fill_stages
from gulliver.solve._steps import BalancedStep, GroupWork, StepSolver, WorkPiece
from gulliver.solve._table_placement import TableOption, TablesPlaced, place_tables
from gulliver.solve._timeline import UPDATE_LAG, StepTimes, gathers_in_backward, step_seconds
from gulliver.solve._transit import MiddleReplacement, Transit
from gulliver.solve._unimodal import geometric_sizes

__all__ = [
    "BACKWARD",
    "ENTRY",
    "FORWARD",
    "INPUTS",
    "PAGE",
    "STATES",
    "UPDATE_LAG",
    "WEIGHTS",
    "Action",
    "ActivationChoice",
    "BalancedStep",
    "Block",
    "BlockActivations",
    "ChainPartition",
    "Choice",
    "Conversion",
    "ConversionStep",
    "Cycle",
    "DecayedCounts",
    "EdgeSeconds",
    "Event",
    "Extents",
    "Gap",
    "GroupWork",
    "HashIndex",
    "JointCost",
    "JointPlan",
    "MiddleReplacement",
    "MissCurve",
    "Move",
    "Moved",
    "NoRoom",
    "OffloadLink",
    "Operator",
    "Packing",
    "PassCosts",
    "Pick",
    "Policy",
    "Prediction",
    "Replacement",
    "Residency",
    "RowCounts",
    "RowIndex",
    "RowPlan",
    "RowPolicy",
    "RowReplacement",
    "RowRequest",
    "Sharding",
    "SharedCache",
    "StepArranger",
    "StepSolver",
    "StepTimes",
    "Strategy",
    "TableOption",
    "TablesPlaced",
    "TooSmall",
    "Transit",
    "WorkPiece",
    "accumulated",
    "activations_peak",
    "allocate",
    "balanced_parts",
    "box_elements",
    "chain_times",
    "choose_activations",
    "concave_hull",
    "convert_least",
    "count_moves",
    "covering",
    "extent",
    "fill_stages",
    "fluid_bound",
    "fluid_bound_by_lp",
    "gathers_in_backward",
    "geometric_sizes",
    "halves",
    "index_bytes",
    "joint_cost",
    "least_memory",
    "least_room",
    "lru_misses",
    "make_index",
    "moves_from",
    "one_row_each",
    "pack",
    "partition_chain",
    "place_tables",
    "plan_residency",
    "relaxed_value",
    "replay",
    "schedule_seconds",
    "share_cache",
    "simulate",
    "size_class",
    "solve_in_stages",
    "solve_joint",
    "split_batches",
    "step_seconds",
]
