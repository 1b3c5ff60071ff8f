"""Options of ``gulliver speculate``; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.finetune.config import DataConfig, check_data
from gulliver.options import AT_LEAST_0, AT_LEAST_1, RANKS, RATE, Range


@dataclass(frozen=True)
class TrainDraftConfig(DataConfig):
    """Trains a draft that attends to the target's cached keys and values (GliDe)."""

    target: tyro.conf.Positional[Path | None] = None
    """Hugging Face folder of the target model, which stays unchanged."""
    out: Path = Path("draft")
    """Folder of the draft."""
    layers: Annotated[int, Range(1, 16)] = 1
    """Layers of the draft."""
    hidden: Annotated[int | None, Range(16, 65536)] = None
    """Width of the draft; by default half of the target's, at least 64."""
    drafted: Annotated[int, AT_LEAST_1] = 8192
    """Number of tokens that it can draft, the most frequent ones of the data. More are drafted
    more often, fewer faster."""
    feed_forward: Annotated[int | None, Range(16, 2**20)] = None
    """Width of its feed-forward parts; by default 8/3 of --hidden."""
    glimpses: tuple[int, ...] = ()
    """Layers of the target that the draft's layers attend to, one each; by default the last
    ones."""
    plain: bool = False
    """Do not attend to the target: a baseline with as many parameters."""
    block: Annotated[int, Range(1, 64)] = 5
    """Draft length to train for: tokens per block of the mask; 1 for no mask."""
    distill: bool = True
    """Train on the target's distribution of each next token; --no-distill trains on the text."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Optimizer steps; by default one epoch."""
    batch_tokens: Annotated[int, AT_LEAST_1] = 16384
    """Tokens per optimizer step over all ranks."""
    learning_rate: Annotated[float, RATE] = 1e-3
    """Peak learning rate of a cosine schedule."""
    warmup: Annotated[int, AT_LEAST_0] = 20
    """Steps of linear warm-up."""
    stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage; 0 is torch's DDP."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or one. Ignored under torchrun."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the target's weights; by default that of the files."""
    save_every: Annotated[int, AT_LEAST_1] = 500
    """Steps between checkpoints."""
    resume: bool = False
    """Continue from the newest checkpoint under --out, bit for bit."""


MAY_CHANGE = frozenset(
    {"out", "target", "data", "held_out"}
    | {"ranks", "stage", "save_every", "resume", "bad_rows"}
    | {"steps"}
)
"""Options that may change when a run is resumed."""


def check_train_draft(config: TrainDraftConfig) -> None:
    if config.target is None:
        raise GulliverError(
            "no target: pass a Hugging Face folder, gulliver speculate train FOLDER"
        )
    if config.glimpses and len(config.glimpses) != config.layers:
        raise GulliverError(
            f"--glimpses names {len(config.glimpses)} layers: use one for each of the "
            f"{config.layers} --layers of the draft"
        )
    if config.glimpses and config.plain:
        raise GulliverError("--plain and --glimpses cannot be combined: omit one of them")
    if (config.out / "config.json").exists():
        raise GulliverError(
            f"--out {config.out} already has a draft or a model: use another folder"
        )
    check_data(config)


@dataclass(frozen=True)
class ReportConfig(DataConfig):
    """Measures drafts of a model: acceptance, cost and speedup."""

    target: tyro.conf.Positional[Path | None] = None
    """Hugging Face folder of the model."""
    draft: str = "ngram"
    """ngram, suffix, or the folder of a draft or a small model."""
    texts: Annotated[int, Range(1, 512)] = 8
    """Number of held-out texts to continue."""
    prompt_length: Annotated[int, Range(1, 2**20)] = 64
    """Prompt tokens of each text."""
    tokens: Annotated[int, Range(8, 2**16)] = 64
    """Tokens to generate for each text."""
    depth: Annotated[int, Range(1, 15)] = 5
    """Draft tokens per round."""
    sequences: Annotated[int, Range(1, 512)] = 1
    """Number of concurrent texts."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Sampling temperature; 0 is greedy."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the weights; by default that of the files."""
    json: bool = False
    """Print JSON."""
