"""Data: clips and their sources, the order of samples, and the way of batches to the device."""

from gulliver.data._arena import ArenaStatistics, PinnedArena
from gulliver.data._bucket_config import BucketConfig
from gulliver.data._clips import BrokenClip, Bucket, Clip, ClipBatch, ClipDataset, collate
from gulliver.data._frames import STILL_FPS, Frame, open_video, stacked, upright_frames
from gulliver.data._loader import DataLoader, LoaderStatistics
from gulliver.data._records import read_utf8
from gulliver.data._resolutions import resolution
from gulliver.data._sampler import BucketSampler, ResumableSampler, Step
from gulliver.data._scores import STYLES, with_scores
from gulliver.data._table import (
    ClipTable,
    Probe,
    Row,
    choose_bucket,
    probe_file,
    resize_and_crop,
    span_of,
)

__all__ = [
    "STILL_FPS",
    "STYLES",
    "ArenaStatistics",
    "BrokenClip",
    "Bucket",
    "BucketConfig",
    "BucketSampler",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipTable",
    "DataLoader",
    "Frame",
    "LoaderStatistics",
    "PinnedArena",
    "Probe",
    "ResumableSampler",
    "Row",
    "Step",
    "choose_bucket",
    "collate",
    "open_video",
    "probe_file",
    "read_utf8",
    "resize_and_crop",
    "resolution",
    "span_of",
    "stacked",
    "upright_frames",
    "with_scores",
]
