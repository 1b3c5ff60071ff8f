"""Hybrid parallelism: tensor, sequence and pipeline axes over one model.

Read `_steps.py`, which cuts a model in place, step by step; `_checks.py` refuses what cannot be
cut, `_mesh.py` says who works with whom, and `_capability.py` what may be combined.
"""

from gulliver.booster.hybrid._batches import Vocabulary
from gulliver.booster.hybrid._capability import (
    DTYPES,
    HEADER,
    MODES,
    Wanted,
    check,
    families,
    family_of,
    table,
)
from gulliver.booster.hybrid._checks import check_cut, check_new, check_recompute
from gulliver.booster.hybrid._choice import HEADS, attention_shape, choose_plan
from gulliver.booster.hybrid._degree import Degree, degree_of, sequence_degree, sequence_rows
from gulliver.booster.hybrid._dropout import drops_by_position
from gulliver.booster.hybrid._inside import HooksLast
from gulliver.booster.hybrid._lazy import fill, lazy_parameters
from gulliver.booster.hybrid._mesh import HybridMesh, check_size, size_axes
from gulliver.booster.hybrid._optimizer import HybridOptimizer
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._steps import (
    SHORT,
    WholeModel,
    cut_stages,
    cut_tensors,
    finish,
    grid,
    recompute,
    rewrite_groups,
    say,
    sequence_plan,
    wire_sequences,
)
from gulliver.booster.hybrid._transformers import keep_logits

__all__ = [
    "DTYPES",
    "HEADER",
    "HEADS",
    "MODES",
    "SHORT",
    "Degree",
    "HooksLast",
    "HybridMesh",
    "HybridOptimizer",
    "Vocabulary",
    "Wanted",
    "WholeModel",
    "attention_shape",
    "check",
    "check_cut",
    "check_new",
    "check_recompute",
    "check_size",
    "choose_plan",
    "cut_stages",
    "cut_tensors",
    "degree_of",
    "drops_by_position",
    "families",
    "family_of",
    "fill",
    "finish",
    "grid",
    "keep_logits",
    "lazy_parameters",
    "recompute",
    "rewrite_groups",
    "say",
    "sequence_degree",
    "sequence_plan",
    "sequence_rows",
    "size_axes",
    "table",
    "wire_sequences",
    "wire_stdit",
]
