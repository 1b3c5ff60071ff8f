"""`open_runner`: a folder's model as what runs it, by its options.

| options | runner |
|---|---|
| none | `LocalRunner`, the model in this process |
| ``memory=`` | the same, with weights that come from a disk (`StreamedWeights`) |
| ``tensor=``, ``pipeline=`` | `RanksRunner`, processes that it starts (`gulliver.serve.ranks`) |
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from gulliver.serve._batch import Runner
from gulliver.serve._load import end_tokens, load_model
from gulliver.serve._local import LocalRunner
from gulliver.serve._source import build_on_meta
from gulliver.serve._ways import ModelOptions

_log = logging.getLogger("gulliver")


def open_runner(
    folder: Path, tokenizer: Any, options: ModelOptions, sequences: int
) -> tuple[Runner, list[int]]:
    """Loads a model, or starts the ranks that do; also returns the tokens that end a text."""
    if options.ranks > 1:
        from gulliver.serve.ranks import start_ranks

        runner = start_ranks(folder, options, sequences)
        return runner, end_tokens(build_on_meta(folder, torch.float32), tokenizer)
    model, streamed = load_model(folder, options)
    try:
        sizes = options.context, options.cache_bytes, options.cache_tokens
        runner = LocalRunner(model, *sizes, sequences=sequences, streamed=streamed)
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise
    if streamed is not None:
        _log.warning("memory=%s: %s", options.memory, streamed)
    return runner, end_tokens(model, tokenizer)
