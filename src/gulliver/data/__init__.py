"""Data loading: clips and their sources, sample order, and copies of batches to the device."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.data.buckets import BucketConfig
    from gulliver.data.clips import Bucket
    from gulliver.data.documents import document_shapes, pack_documents
    from gulliver.data.loader import DataLoader
    from gulliver.data.records import STYLES
    from gulliver.data.sampler import BucketSampler, ResumableSampler, Step
    from gulliver.data_centric.costs import Samples, Seconds, Tokens
    from gulliver.data_centric.planner import DataCentricOptions, DataCentricPlanner

__all__ = [
    "STYLES",
    "Bucket",
    "BucketConfig",
    "BucketSampler",
    "DataCentricOptions",
    "DataCentricPlanner",
    "DataLoader",
    "ResumableSampler",
    "Samples",
    "Seconds",
    "Step",
    "Tokens",
    "document_shapes",
    "pack_documents",
]

__getattr__, __dir__ = lazy_exports(__name__)
