"""Options of fine-tuning: frozen dataclasses, which are also the command line.

Nothing here imports torch, so that `--help` does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from gulliver.errors import GulliverError
from gulliver.options import SEED, Options, Range

FORMS = ("messages", "instruction", "completion", "text")
LONGEST = 2**20
LENGTH = 2048
"""Length of sequences where none is asked for and the model's context is not shorter."""


@dataclass(frozen=True)
class DataConfig(Options):
    """Texts to learn from."""

    data: tuple[Path, ...] = ()
    """Files, or folders of them: JSON Lines, JSON, Parquet, CSV, TSV; any other file is a text."""
    form: Literal["auto", "messages", "instruction", "completion", "text"] = "auto"
    """What a row is; auto: recognised by its columns, the same for all rows."""
    answers_only: Literal["auto", "yes", "no"] = "auto"
    """Learn the answers and not the questions; auto: yes, where there are answers."""
    length: Annotated[int | None, Range(2, LONGEST)] = None
    """Longest sequence in tokens; by default the model's context, at most 2048."""
    long_chats: Literal["cut", "skip"] = "cut"
    """What becomes of longer conversations; other texts are split into windows."""
    packing: Literal["auto", "yes", "no"] = "auto"
    """Put several texts into a sequence, each on its own; auto: where the model does so exactly."""
    held_out: Annotated[float | Path, Range(0, 1, open_above=True)] = 0.05
    """Share of the texts that is kept for evaluation, or a file of them."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """What becomes of rows that cannot be used; they are counted and listed."""
    chat_template: Path | None = None
    """A Jinja template for conversations, where the tokenizer has none or another is wanted."""
    seed: Annotated[int, SEED] = 0
    """Seed of everything random."""


def check_data(config: DataConfig) -> None:
    """Refuses options that no data set could be read with, before anything is read.

    Raises:
        GulliverError: naming the option, its value and what would be right.
    """
    if not config.data:
        raise GulliverError("no data is named: give --data FILE, such as --data chats.jsonl")
    for path in config.data:
        if not path.exists():
            raise GulliverError(f"--data {path} does not exist")
    share = config.held_out
    if isinstance(share, Path) and not share.exists():
        raise GulliverError(
            f"--held-out {share} does not exist: give a file, or a share such as 0.05"
        )
    if config.form == "text" and config.answers_only == "yes":
        raise GulliverError("--answers-only yes: a plain text has no answers, leave it at auto")
