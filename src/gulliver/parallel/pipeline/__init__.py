"""Pipeline parallelism: splits a model's blocks into stages and runs micro-batches through them.

`stack` finds and splits the blocks, `stage` creates a stage in place, `stage_forward` runs its
forward, `runner` adapts it to torch's schedules, and `pipeline` runs a step.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.parallel.pipeline.batches import split as split
    from gulliver.parallel.pipeline.pipeline import Pipeline as Pipeline
    from gulliver.parallel.pipeline.schedules import STYLES as STYLES
    from gulliver.parallel.pipeline.schedules import stages_by_rank as deal  # noqa: F401
    from gulliver.parallel.pipeline.schedules import stages_by_rank as stages_by_rank
    from gulliver.parallel.pipeline.stack import cut as cut
    from gulliver.parallel.pipeline.stack import stack_of as stack_of
    from gulliver.parallel.pipeline.stage import Stage as Stage
    from gulliver.parallel.pipeline.stage import make_stage as make_stage

__getattr__, __dir__ = lazy_exports(__name__)
