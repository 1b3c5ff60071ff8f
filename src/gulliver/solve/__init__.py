"""Pure algorithms on plain numbers: no torch, no files, no clocks.

Each file is an answer to one question: what becomes of activations (`_activations.py`), where to
cut a pipeline (`_chain.py`), how a tensor gets another layout (`_conversion.py`), who gets which
of several things (`_balance.py`), where a block of memory goes (`_extents.py`), what goes
together into bins of one size (`_packing.py`), what a fast tier of memory keeps
(`_replacement.py`; the plan for it: `_residency.py`), and one between two others (`_transit.py`),
how long a step of ZeRO takes (`_timeline.py`), which sizes to try (`_unimodal.py`), how operators
are sharded, recomputed and moved jointly (`_joint.py`, then `_joint_search.py`), how a chain is
recomputed with checkpoints inside checkpoints (`_rematerialize.py`), which of several unequal
devices takes which layers (`_devices.py`).
"""

from gulliver.solve._activations import (
    ActivationChoice,
    BlockActivations,
    Choice,
    PassCosts,
    activations_peak,
    choose_activations,
    least_room,
)
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
from gulliver.solve._devices import Fleet, Placement, makespan, place_layers
from gulliver.solve._devices_bound import lower_bound
from gulliver.solve._extents import PAGE, Extents, size_class
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
from gulliver.solve._joint_milp import MilpAnswer, joint_by_milp
from gulliver.solve._joint_search import JointPlan, least_memory, solve_joint
from gulliver.solve._moves import Action, Move, NoRoom
from gulliver.solve._packing import Packing, pack
from gulliver.solve._rematerialize import (
    Schedule,
    Stage,
    Step,
    least_budget,
    recomputed_seconds,
    rematerialize,
    schedule_peak,
)
from gulliver.solve._replacement import Policy, Replacement
from gulliver.solve._residency import STATES, Gap, Residency, plan_residency
from gulliver.solve._schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Prediction,
    schedule_seconds,
)
from gulliver.solve._simulation import Moved, count_moves, replay, simulate
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
    "Block",
    "BlockActivations",
    "ChainPartition",
    "Choice",
    "Conversion",
    "ConversionStep",
    "Cycle",
    "EdgeSeconds",
    "Event",
    "Extents",
    "Fleet",
    "Gap",
    "JointCost",
    "JointPlan",
    "MiddleReplacement",
    "MilpAnswer",
    "Move",
    "Moved",
    "NoRoom",
    "OffloadLink",
    "Operator",
    "Packing",
    "PassCosts",
    "Pick",
    "Placement",
    "Policy",
    "Prediction",
    "Replacement",
    "Residency",
    "Schedule",
    "Sharding",
    "Stage",
    "Step",
    "StepTimes",
    "Strategy",
    "Transit",
    "activations_peak",
    "balanced_parts",
    "box_elements",
    "chain_times",
    "choose_activations",
    "convert_least",
    "count_moves",
    "extent",
    "gathers_in_backward",
    "geometric_sizes",
    "joint_by_milp",
    "joint_cost",
    "least_budget",
    "least_memory",
    "least_room",
    "lower_bound",
    "makespan",
    "moves_from",
    "pack",
    "partition_chain",
    "place_layers",
    "plan_residency",
    "recomputed_seconds",
    "rematerialize",
    "replay",
    "schedule_peak",
    "schedule_seconds",
    "simulate",
    "size_class",
    "solve_joint",
    "step_seconds",
]
