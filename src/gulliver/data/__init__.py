"""Data loading: clips and their sources, sample order, and copies of batches to the device."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.data.buckets import BucketConfig as BucketConfig
    from gulliver.data.clips import Bucket as Bucket
    from gulliver.data.documents import document_shapes as document_shapes
    from gulliver.data.documents import pack_documents as pack_documents
    from gulliver.data.loader import DataLoader as DataLoader
    from gulliver.data.records import STYLES as STYLES
    from gulliver.data.sampler import BucketSampler as BucketSampler
    from gulliver.data.sampler import ResumableSampler as ResumableSampler
    from gulliver.data.sampler import Step as Step
    from gulliver.data_centric.costs import Samples as Samples
    from gulliver.data_centric.costs import Seconds as Seconds
    from gulliver.data_centric.costs import Tokens as Tokens
    from gulliver.data_centric.planner import DataCentricOptions as DataCentricOptions
    from gulliver.data_centric.planner import DataCentricPlanner as DataCentricPlanner

__getattr__, __dir__ = lazy_exports(__name__)
