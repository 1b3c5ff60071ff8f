"""Feeding: clips, where they come from, and which of them meet in a step."""

from gulliver.data._clips import BrokenClip, Bucket, Clip, ClipBatch, ClipDataset, collate
from gulliver.data._digits import DIGITS, DIRECTIONS, FPS, MovingDigits, sentence
from gulliver.data._prefetch import prefetch
from gulliver.data._sampler import BucketSampler, Step
from gulliver.data._table import ClipTable, Probe, choose_bucket, probe_file, resize_and_crop
from gulliver.data._words import WordEncoder, unknown_words, words_of

__all__ = [
    "DIGITS",
    "DIRECTIONS",
    "FPS",
    "BrokenClip",
    "Bucket",
    "BucketSampler",
    "Clip",
    "ClipBatch",
    "ClipDataset",
    "ClipTable",
    "MovingDigits",
    "Probe",
    "Step",
    "WordEncoder",
    "choose_bucket",
    "collate",
    "prefetch",
    "probe_file",
    "resize_and_crop",
    "sentence",
    "unknown_words",
    "words_of",
]
