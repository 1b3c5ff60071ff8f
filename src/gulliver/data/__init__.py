"""Feeding: clips, where they come from, which meet in a step, and how they get to the device."""

from gulliver.data._arena import ArenaStatistics, PinnedArena
from gulliver.data._clips import BrokenClip, Bucket, Clip, ClipBatch, ClipDataset, collate
from gulliver.data._digits import DIGITS, DIRECTIONS, FPS, MovingDigits, sentence
from gulliver.data._frames import stacked, upright_frames
from gulliver.data._loader import DataLoader, LoaderStatistics
from gulliver.data._prefetch import prefetch
from gulliver.data._records import read_utf8
from gulliver.data._sampler import BucketSampler, Step
from gulliver.data._table import (
    ClipTable,
    Probe,
    choose_bucket,
    probe_file,
    resize_and_crop,
)
from gulliver.data._words import WordEncoder, unknown_words, words_of

__all__ = [
    "DIGITS",
    "DIRECTIONS",
    "FPS",
    "ArenaStatistics",
    "BrokenClip",
    "Bucket",
    "BucketSampler",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipTable",
    "DataLoader",
    "LoaderStatistics",
    "MovingDigits",
    "PinnedArena",
    "Probe",
    "Step",
    "WordEncoder",
    "choose_bucket",
    "collate",
    "prefetch",
    "probe_file",
    "read_utf8",
    "resize_and_crop",
    "sentence",
    "stacked",
    "unknown_words",
    "upright_frames",
    "words_of",
]
