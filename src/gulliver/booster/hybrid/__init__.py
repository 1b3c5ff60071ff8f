"""Hybrid parallelism: tensor, sequence, pipeline and data axes over one model.

Read `_plugin.py`, which treats a model in five steps; `_mesh.py` says who works with whom, and
`_capability.py` what may be combined.
"""

from gulliver.booster.hybrid._capability import DTYPES, HEADER, MODES, table

__all__ = ["DTYPES", "HEADER", "MODES", "table"]
