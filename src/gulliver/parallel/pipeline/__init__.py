"""Pipeline parallelism: a model's blocks cut into stages, micro-batches run through them.

`stack` finds the blocks and cuts between them, `stage` makes a stage in place, `stage_forward` has
what a forward does on it, `runner` adapts it to torch's schedules, and `pipeline` runs a step.
"""

from gulliver.parallel.pipeline._agree import agree
from gulliver.parallel.pipeline._batch import split
from gulliver.parallel.pipeline._cut import Cut, block_costs, cut
from gulliver.parallel.pipeline._pipeline import Pipeline
from gulliver.parallel.pipeline._predict import computations, predict
from gulliver.parallel.pipeline._schedules import STYLES, check_counts, deal, style_of
from gulliver.parallel.pipeline._stack import Stack, stack_of, units_of
from gulliver.parallel.pipeline._stage import (
    Stage,
    check_stages,
    checkpoint_blocks,
    make_stage,
    names_held,
    uses_held,
)
from gulliver.solve import Prediction

__all__ = [
    "STYLES",
    "Cut",
    "Pipeline",
    "Prediction",
    "Stack",
    "Stage",
    "agree",
    "block_costs",
    "check_counts",
    "check_stages",
    "checkpoint_blocks",
    "computations",
    "cut",
    "deal",
    "make_stage",
    "names_held",
    "predict",
    "split",
    "stack_of",
    "style_of",
    "units_of",
    "uses_held",
]
