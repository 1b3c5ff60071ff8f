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

from gulliver.errors import GulliverError
from gulliver.options import byte_size
from gulliver.serve._batch import Runner
from gulliver.serve._filling import Filling, is_quantised
from gulliver.serve._load import check_options, end_tokens, kept_dtype, load, load_text
from gulliver.serve._local import LocalRunner
from gulliver.serve._memory import free_bytes
from gulliver.serve._offload import StreamedWeights, Unit, group_units, unit_paths
from gulliver.serve._source import Source, build_on_meta

_log = logging.getLogger("gulliver")


@dataclass(frozen=True)
class Ways:
    """How a folder's model is run.

    Attributes:
        dtype: ``"float32"`` or ``"bfloat16"``; None for that of the files.
        quantize: mode of `gulliver.replace_module`; None for float weights.
        context: most tokens of a sequence; None for the model's own.
        cache_bytes: bytes of keys and values; None to choose.
        cache_tokens: the same in tokens.
        memory: bytes of weights, keys and values in memory, such as ``"6GiB"``, of each process;
            what does not fit comes from a disk. None for all that there is.
        disk: folder on a local disk for those weights; None for that of temporary files.
        tensor: ranks that each layer is cut over.
        pipeline: stages that the layers are dealt to.
        speeds: relative speeds of the stages, to which the layers are dealt; None for equal ones.
        timeout_s: seconds after which a rank that does not answer counts as lost; None for 60, or
            600 where weights come from a disk.
    """

    dtype: str | None = None
    quantize: str | None = None
    context: int | None = None
    cache_bytes: int | None = None
    cache_tokens: int | None = None
    memory: int | str | None = None
    disk: Path | str | None = None
    tensor: int = 1
    pipeline: int = 1
    speeds: tuple[float, ...] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise GulliverError(f"{name}={value!r}: give 1 or more ranks")
        if self.disk is not None and self.memory is None:
            raise GulliverError(f"disk={str(self.disk)!r} needs memory=: what fits it stays there")
        if self.speeds is not None and self.pipeline == 1:
            raise GulliverError(f"speeds={self.speeds} are of stages: give pipeline= as well")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise GulliverError(f"timeout_s={self.timeout_s}: give a number of seconds above 0")

    @property
    def patience_s(self) -> float:
        """Seconds without a word from any rank."""
        if self.timeout_s is not None:
            return self.timeout_s
        return 60.0 if self.memory is None else 600.0

    @property
    def limit(self) -> int | None:
        """Bytes of weights, keys and values in each process."""
        if self.memory is None:
            return None
        return byte_size("memory", self.memory, free_bytes(torch.device("cpu")))


@dataclass(frozen=True)
class Opened:
    """A model that runs, and what the engine needs beside it."""

    runner: Runner
    tokenizer: Any
    end_tokens: list[int]


def open_runner(folder: Path | str, ways: Ways, sequences: int, step_tokens: int) -> Opened:
    """Loads a model, or starts the ranks that do.

    Args:
        folder: folder that transformers or `gulliver quantize` wrote.
        ways: how it is run.
        sequences: sequences that run at a time.
        step_tokens: most tokens of a batch.

    Raises:
        GulliverError: the folder cannot be served so, or memory does not do.
    """
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


def load_streamed(folder: Path, ways: Ways, limit: int) -> tuple[Any, StreamedWeights]:
    """Reads a folder's model with weights that stay within a limit, the others on a disk.

    Args:
        folder: folder of the model.
        ways: dtype, mode of quantisation and disk.
        limit: bytes of weights, keys and values.

    Returns:
        The model, and what brings its weights.

    Raises:
        GulliverError: the limit does not take the largest layer, or there is no such disk.
    """
    check_options(folder, ways.dtype, ways.quantize)
    model = build_on_meta(folder, kept_dtype(folder, ways.dtype))
    paths = unit_paths(model)
    with Source(folder, model) as source:
        filling = Filling(model, source, ways.quantize, is_quantised(folder))
        return model, stream(model, paths, filling, limit, ways.disk)


def stream(
    model: Any, paths: list[str], filling: Filling, limit: int, disk: Path | str | None
) -> StreamedWeights:
    """Fills a model on meta with weights that stay within a limit.

    Args:
        model: the model.
        paths: paths of its units, as `unit_paths` found them before it was quantised.
        filling: reads its values.
        limit: bytes that they may take.
        disk: folder for the others.
    """

    def fill(unit: Unit) -> None:
        filling.fill(unit.path, unit.module)

    streamed = StreamedWeights(group_units(model, paths), fill, limit, disk)
    model.eval().requires_grad_(False)
    return streamed
