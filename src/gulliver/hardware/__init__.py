"""Cost models: measured or described devices, links and disks, and formulas based on them."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.hardware.attention import AttentionShape as Shape
    from gulliver.hardware.attention import attention_seconds, split_attention_seconds
    from gulliver.hardware.cluster import Cluster, described, described_names
    from gulliver.hardware.costs import (
        all_reduce_seconds,
        all_reduce_ways,
        linear_flops,
        linear_seconds,
        resharding_bytes,
        torus_seconds,
    )
    from gulliver.hardware.operators import fp8_seconds
    from gulliver.hardware.probe import current_cluster, memory_bytes
    from gulliver.hardware.sample_tables import TableCosts
    from gulliver.hardware.samples import (
        SampleCosts,
        SampleShape,
        fit_samples,
        load_samples,
        measure_samples,
        save_samples,
    )
    from gulliver.hardware.scaling import Scaling, fit_scaling

__all__ = [
    "Cluster",
    "SampleCosts",
    "SampleShape",
    "Scaling",
    "Shape",
    "TableCosts",
    "all_reduce_seconds",
    "all_reduce_ways",
    "attention_seconds",
    "current_cluster",
    "described",
    "described_names",
    "fit_samples",
    "fit_scaling",
    "fp8_seconds",
    "linear_flops",
    "linear_seconds",
    "load_samples",
    "measure_samples",
    "memory_bytes",
    "resharding_bytes",
    "save_samples",
    "split_attention_seconds",
    "torus_seconds",
]

__getattr__, __dir__ = lazy_exports(__name__)
