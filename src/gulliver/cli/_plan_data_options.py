"""Options of ``gulliver plan data``. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from gulliver.options import AT_LEAST_0, POSITIVE, Options, Range


@dataclass(frozen=True)
class PlanData(Options):
    """Draws the steps of data-centric training: which ranks share which samples, and who waits."""

    costs: Path
    """JSON file of costs: seconds by shape, degree and batch, or what gulliver train or
    save_samples has kept."""
    ranks: Annotated[int, Range(1, 4096)] = 8
    """Data ranks."""
    cluster: str = "here"
    """Machines whose links kept costs are planned with: h100x8, a described name, a file of
    gulliver probe's form, or here."""
    memory: Annotated[float | None, POSITIVE] = None
    """GiB of a rank, with kept costs; by default nine tenths of a GPU, or a tenth of the machine's
    memory."""
    offload: Annotated[float | None, POSITIVE] = None
    """GiB of a rank's host memory that activations may move to."""
    stages: Annotated[int, Range(1, 4096)] = 1
    """Stages of a pipeline that each of these ranks is."""
    samples: Annotated[int | None, Range(1, 2**24)] = None
    """Budget of a step: samples of all ranks."""
    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Budget of a step: about so many tokens."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Budget of a step: at most so many predicted seconds."""
    shapes: Path | None = None
    """Text file with the shape of a sample on each line, with kept costs also a number of tokens or
    latent frames x rows x columns; by default --count are drawn."""
    distribution: Literal["short", "balanced", "long"] = "balanced"
    """Samples that dominate among those drawn."""
    count: Annotated[int, Range(1, 2**24)] = 5000
    """Number of samples that are drawn."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples that are looked at ahead; by default 16 steps' worth."""
    intra: bool = True
    """Groups choose their own degrees; with --no-intra all have --degree."""
    inter: bool = True
    """Groups run several micro-batches in a step; with --no-inter one each."""
    together: bool = True
    """Samples of a shape wait in the window for an efficient micro-batch; with --no-together none
    does."""
    arrange: Annotated[int | None, Range(1, 4096)] = None
    """Ranks that steps are put together for, mostly --ranks; with --tokens."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Degree of all groups, with --no-intra."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """What becomes of samples that fit at no degree."""
    seed: Annotated[int, AT_LEAST_0] = 0
    """Seed of all orders."""
    steps: Annotated[int, Range(0, 1000)] = 2
    """Number of steps to draw as text."""
    html: Path | None = None
    """File to write a report with pictures to."""
