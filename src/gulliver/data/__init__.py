"""Data: clips and their sources, the order of samples, and the way of batches to the device."""

from gulliver.data._arena import PinnedArena
from gulliver.data._bucket_config import BucketConfig
from gulliver.data._budgets import Budget, Samples, Seconds, Tokens
from gulliver.data._clips import BrokenClip, Bucket, Clip, ClipBatch, ClipDataset, collate
from gulliver.data._documents import document_shapes, pack_documents
from gulliver.data._draws import DISTRIBUTIONS, draw_samples, draw_shapes, least_time
from gulliver.data._frames import STILL_FPS, Frame, open_video, rate_shown, stacked, upright_frames
from gulliver.data._loader import DataLoader, StagingOptions
from gulliver.data._nested import move_tensors
from gulliver.data._planner import DataCentricOptions, DataCentricPlanner
from gulliver.data._records import read_utf8
from gulliver.data._resolutions import resolution
from gulliver.data._sampler import BucketSampler, ResumableSampler, Step
from gulliver.data._scores import STYLES, with_scores
from gulliver.data._step_ends import StepEnds
from gulliver.data._step_pictures import Shares, shares_of, step_lines, steps_page
from gulliver.data._steps import MicroBatch, RankGroup, StepPlan
from gulliver.data._table import (
    ClipTable,
    Probe,
    TableRow,
    choose_bucket,
    probe_file,
    resize_and_crop,
    span_of,
)

__all__ = [
    "DISTRIBUTIONS",
    "STILL_FPS",
    "STYLES",
    "BrokenClip",
    "Bucket",
    "BucketConfig",
    "BucketSampler",
    "Budget",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipTable",
    "DataCentricOptions",
    "DataCentricPlanner",
    "DataLoader",
    "Frame",
    "MicroBatch",
    "PinnedArena",
    "Probe",
    "RankGroup",
    "ResumableSampler",
    "Samples",
    "Seconds",
    "Shares",
    "StagingOptions",
    "Step",
    "StepEnds",
    "StepPlan",
    "TableRow",
    "Tokens",
    "choose_bucket",
    "collate",
    "document_shapes",
    "draw_samples",
    "draw_shapes",
    "least_time",
    "move_tensors",
    "open_video",
    "pack_documents",
    "probe_file",
    "rate_shown",
    "read_utf8",
    "resize_and_crop",
    "resolution",
    "shares_of",
    "span_of",
    "stacked",
    "step_lines",
    "steps_page",
    "upright_frames",
    "with_scores",
]
