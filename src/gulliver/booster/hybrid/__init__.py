"""Hybrid parallelism: tensor, sequence, pipeline and data axes over one model.

Read `_plugin.py`, which treats a model in five steps; `_mesh.py` says who works with whom, and
`_capability.py` what may be combined.
"""

from gulliver.booster.hybrid._capability import DTYPES, FAMILIES, HEADER, MODES, table
from gulliver.booster.hybrid._lazy import lazy_parameters
from gulliver.booster.hybrid._mesh import size_axes
from gulliver.booster.hybrid._optimizer import HybridOptimizer
from gulliver.booster.hybrid._plugin import HybridParallelPlugin
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._transformers import keep_logits

__all__ = [
    "DTYPES",
    "FAMILIES",
    "HEADER",
    "MODES",
    "HybridOptimizer",
    "HybridParallelPlugin",
    "keep_logits",
    "lazy_parameters",
    "size_axes",
    "table",
    "wire_stdit",
]
