"""Pure algorithms on plain numbers: no torch, no files, no clocks.

Each file is an answer to one question: what becomes of activations (`_activations.py`), where to
cut a pipeline (`_chain.py`), where a block of memory goes (`_extents.py`), what a fast tier of
memory keeps (`_replacement.py`), how long a step of ZeRO takes (`_timeline.py`), which sizes to try
(`_unimodal.py`).
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
from gulliver.solve._chain import ChainPartition, chain_times, partition_chain
from gulliver.solve._extents import PAGE, Extents, size_class
from gulliver.solve._replacement import Action, Move, Replacement
from gulliver.solve._schedule import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Prediction,
    schedule_seconds,
)
from gulliver.solve._timeline import StepTimes, step_seconds
from gulliver.solve._unimodal import geometric_sizes

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INPUTS",
    "PAGE",
    "WEIGHTS",
    "Action",
    "ActivationChoice",
    "BlockActivations",
    "ChainPartition",
    "Choice",
    "Extents",
    "Move",
    "PassCosts",
    "Prediction",
    "Replacement",
    "StepTimes",
    "activations_peak",
    "chain_times",
    "choose_activations",
    "geometric_sizes",
    "least_room",
    "partition_chain",
    "schedule_seconds",
    "size_class",
    "step_seconds",
]
