"""Pipeline parallelism: a model's blocks cut into stages, micro-batches run through them.

Read `_stack.py` (which modules are the blocks), `_cut.py` (where to cut), `_stage_forward.py` (what
a forward does on one stage), `_stage.py` (making a stage in place), then `_pipeline.py` (a step).
How long a step takes, bubbles and all, is predicted in `_predict.py`.
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
