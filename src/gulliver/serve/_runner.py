"""`open_runner`: a folder's model as whatever runs it, by what is asked for.

| asked for | runner |
|---|---|
| nothing | `LocalRunner`, the model in this process |
| ``memory=`` | the same, with weights that come from a disk (`StreamedWeights`) |
| ``tensor=``, ``pipeline=`` | `RanksRunner`, processes that it starts (`gulliver.serve.ranks`) |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gulliver.serve._batch import Runner
from gulliver.serve._load import end_tokens, load, load_text
from gulliver.serve._local import LocalRunner
from gulliver.serve._source import build_on_meta
from gulliver.serve._streamed import load_streamed
from gulliver.serve._ways import Ways

_log = logging.getLogger("gulliver")


@dataclass(frozen=True)
class Opened:
    """A model that runs, and what the engine needs beside it."""

    runner: Runner
    tokenizer: Any
    end_tokens: list[int]


def open_runner(folder: Path | str, ways: Ways, sequences: int, step_tokens: int) -> Opened:
    """Loads a model, or starts the ranks that do."""
    if ways.tensor * ways.pipeline > 1:
        from gulliver.serve.ranks import start_ranks

        tokenizer = load_text(Path(folder), ways.dtype, ways.quantize)
        runner = start_ranks(Path(folder), ways, sequences, step_tokens)
        return Opened(
            runner, tokenizer, end_tokens(build_on_meta(folder, torch.float32), tokenizer)
        )
    sizes = ways.context, ways.cache_bytes, ways.cache_tokens
    if ways.limit is None:
        model, tokenizer = load(folder, ways.dtype, ways.quantize)
        runner = LocalRunner(model, *sizes, sequences=sequences)
        return Opened(runner, tokenizer, end_tokens(model, tokenizer))
    tokenizer = load_text(Path(folder), ways.dtype, ways.quantize)
    model, streamed = load_streamed(Path(folder), ways, ways.limit)
    try:
        runner = LocalRunner(model, *sizes, sequences=sequences, streamed=streamed)
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise
    if streamed is not None:
        _log.warning("memory=%s: %s", ways.memory, streamed)
    return Opened(runner, tokenizer, end_tokens(model, tokenizer))
