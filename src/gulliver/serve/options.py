"""Options of a served model and its engine, for `LLM`, the command line and files.

This module does not import torch, so that ``gulliver serve --help`` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_1, Options, Range, byte_size


@dataclass(frozen=True)
class ModelOptions(Options):
    """How a folder's model is loaded and run.

    Attributes:
        dtype: Dtype of the weights; by default that of the files.
        quantize: Quantize the weights to int8 or int4 while loading, as `gulliver.replace_module`
            does.
        seq_length: Maximum tokens of prompt and completion; by default the model's own.
        kv_cache: Memory of the KV cache, such as 4GiB; by default as needed, but at most half of
            the free memory.
        cache_tokens: Size of the KV cache in tokens, instead of `kv_cache`.
        memory_limit: Memory of weights and KV cache in each process, such as 6GiB; the remaining
            weights stay on disk.
        disk: Local folder for those weights, optionally with a limit: /scratch:100GiB; by default
            the folder of temporary files.
        tp_size: Ranks that shard each layer.
        pp_size: Pipeline stages, each with `tp_size` ranks.
        speeds: Relative speeds of the stages; by default equal.
        timeout_s: Seconds after which a silent rank counts as lost; 60, or 600 with memory_limit.
        decoder: native runs the steps of dense decoders without Python, if the extension supports
            the processor; torch runs the model's own forward.
        speculation: Source of draft tokens: ngram, suffix, or a draft model's folder; does not
            change the output distribution.
    """

    dtype: Literal["float32", "bfloat16"] | None = None
    quantize: Literal["int8", "int8_dynamic", "int4"] | None = None
    seq_length: Annotated[int | None, Range(2)] = None
    kv_cache: int | str | None = None
    cache_tokens: Annotated[int | None, AT_LEAST_1] = None
    memory_limit: int | str | None = None
    disk: Path | None = None
    tp_size: Annotated[int, Range(1, 1024)] = 1
    pp_size: Annotated[int, Range(1, 1024)] = 1
    speeds: tuple[float, ...] | None = None
    timeout_s: Annotated[float | None, Range(0.1, 86400)] = None
    decoder: Literal["native", "torch"] = "native"
    speculation: str | Path | None = None

    def check_combinations(self) -> None:
        """Rejects options that have no effect without another one."""
        super().check_combinations()
        if self.disk is not None and self.memory_limit is None:
            raise GulliverError(
                f"disk={str(self.disk)!r} needs memory_limit=, which determines the weights on disk"
            )
        if self.speeds and self.pp_size == 1:
            raise GulliverError(f"speeds={self.speeds} need pipeline stages: also set pp_size")

    @property
    def ranks(self) -> int:
        """Number of processes that compute."""
        return self.tp_size * self.pp_size

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a rank counts as lost."""
        if self.timeout_s is not None:
            return self.timeout_s
        # A step that reads weights from a disk may take minutes.
        return 60.0 if self.memory_limit is None else 600.0

    @property
    def limit(self) -> int | None:
        """Maximum bytes of weights, keys and values in each process."""
        if self.memory_limit is None:
            return None
        import torch

        from gulliver.serve.weights import free_bytes

        return byte_size("memory_limit", self.memory_limit, free_bytes(torch.device("cpu")))


def disk_limit(disk: Path | str | None) -> tuple[Path | None, int | None]:
    """Splits ``/scratch:100GiB`` into folder and bytes, as in planner options; size is optional."""
    folder, _, size = str(disk).rpartition(":")
    if disk is None or not folder or not size[:1].isdigit() or Path(disk).is_dir():
        return Path(disk) if disk else None, None
    return Path(folder), byte_size("disk", size)


@dataclass(frozen=True)
class EngineOptions(Options):
    """Limits of an engine.

    Attributes:
        step_tokens: Maximum tokens of a batch. Longer prompts are prefilled in chunks, so that
            decoding sequences never wait for a full prompt. By default 512, or `sequences` if that
            is more.
        sequences: Maximum completions that run at a time; more requests wait.
        share_prefixes: Compute common prefixes of prompts once.
    """

    step_tokens: Annotated[int | None, AT_LEAST_1] = None
    sequences: Annotated[int, Range(1, 4096)] = 64
    share_prefixes: bool = True

    def check_combinations(self) -> None:
        """Rejects batches too small for one token of each sequence."""
        super().check_combinations()
        if self.step_tokens is not None and self.step_tokens < self.sequences:
            raise GulliverError(
                f"step_tokens={self.step_tokens} is less than sequences={self.sequences}, each of "
                "which needs a token per step: increase step_tokens"
            )

    @property
    def tokens(self) -> int:
        """Maximum tokens of a batch."""
        return self.step_tokens or max(512, self.sequences)
