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
    """Trains a draft that looks at the target's cached keys and values (GliDe)."""

    target: tyro.conf.Positional[Path | None] = None
    """Hugging Face folder of the model that the draft is for; it stays as it is."""
    out: Path = Path("draft")
    """Folder of the draft."""
    layers: Annotated[int, Range(1, 16)] = 1
    """Layers of the draft."""
    hidden: Annotated[int | None, Range(16, 65536)] = None
    """Width of the draft; by default half of the target's, at least 64."""
    feed_forward: Annotated[int | None, Range(16, 2**20)] = None
    """Width of its feed-forward parts; by default 8/3 of --hidden."""
    glimpses: tuple[int, ...] = ()
    """Layers of the target that the draft's layers look at, one each; by default the last ones."""
    plain: bool = False
    """Look at nothing, with as many parameters: to see what the looking is worth."""
    block: Annotated[int, Range(1, 64)] = 5
    """Guesses that the training prepares for: tokens of a block of the mask; 1 is no mask."""
    distill: bool = True
    """Learn the target's distribution of each next token; --no-distill learns the text's tokens."""
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Optimizer steps; by default one epoch."""
    batch_tokens: Annotated[int, AT_LEAST_1] = 16384
    """Tokens of an optimizer step, all ranks together."""
    learning_rate: Annotated[float, RATE] = 1e-3
    """Peak learning rate; it falls along a cosine."""
    warmup: Annotated[int, AT_LEAST_0] = 20
    """Steps of linear warm-up."""
    stage: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO; 0 is torch's DDP."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or one. Ignored under torchrun."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the target's weights; that of the files by default."""
    save_every: Annotated[int, AT_LEAST_1] = 500
    """Steps between checkpoints."""
    resume: bool = False
    """Continue from the newest checkpoint under --out, bit for bit."""


MAY_CHANGE = frozenset(
    {"out", "target", "data", "held_out"}
    | {"ranks", "stage", "save_every", "resume", "bad_rows"}
    | {"steps"}
)
"""Options that may differ between a run and its resumption: where, how, and how long."""


def check_train_draft(config: TrainDraftConfig) -> None:
    """Rejects options that cannot train anything."""
    if config.target is None:
        raise GulliverError(
            "no target is given: gulliver speculate train FOLDER, a Hugging Face folder"
        )
    if config.glimpses and len(config.glimpses) != config.layers:
        raise GulliverError(
            f"--glimpses names {len(config.glimpses)} layers: give one for each of the "
            f"{config.layers} --layers of the draft"
        )
    if config.glimpses and config.plain:
        raise GulliverError("--plain looks at no layer: leave --glimpses out")
    if (config.out / "config.json").exists():
        raise GulliverError(f"--out {config.out} has a draft or a model already: name another")
    check_data(config)


@dataclass(frozen=True)
class ReportConfig(DataConfig):
    """Measures drafts of a model: what is accepted, what it costs, and where it stops paying."""

    target: tyro.conf.Positional[Path | None] = None
    """Hugging Face folder of the model."""
    draft: str = "ngram"
    """ngram, suffix, or the folder of a draft or of a small model."""
    texts: Annotated[int, Range(1, 512)] = 8
    """Texts that are continued: the beginnings of held-out ones."""
    prompt_length: Annotated[int, Range(1, 2**20)] = 64
    """Tokens of each beginning."""
    tokens: Annotated[int, Range(8, 2**16)] = 64
    """Tokens that each is continued by."""
    depth: Annotated[int, Range(1, 15)] = 5
    """Tokens that are drafted in each round."""
    sequences: Annotated[int, Range(1, 512)] = 1
    """Texts that are continued at a time."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """How the tokens are drawn; 0 is greedy."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the weights; that of the files by default."""
    json: bool = False
    """Print JSON."""
