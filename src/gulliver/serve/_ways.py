"""`Ways`: how a folder's model is run, in one process or on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gulliver.errors import GulliverError
from gulliver.options import byte_size
from gulliver.serve._memory import free_bytes


@dataclass(frozen=True)
class Ways:
    """How a folder's model is run."""

    # ``"float32"`` or ``"bfloat16"``; None for that of the files.
    dtype: str | None = None
    # Mode of `gulliver.replace_module`; None for float weights.
    quantize: str | None = None
    # Most tokens of a sequence; None for the model's own.
    context: int | None = None
    # Bytes of keys and values, such as ``"2GiB"``; None to choose.
    cache_bytes: int | str | None = None
    cache_tokens: int | None = None
    # Bytes of weights, keys and values in memory, such as ``"6GiB"``, of each process; what does
    # not fit comes from a disk. None for all that there is.
    memory: int | str | None = None
    # Folder on a local disk for those weights; None for that of temporary files.
    disk: Path | str | None = None
    # Ranks that each layer is cut over.
    tensor: int = 1
    # Stages that the layers are dealt to.
    pipeline: int = 1
    # Relative speeds of the stages, to which the layers are dealt; None for equal ones.
    speeds: tuple[float, ...] | None = None
    # Seconds after which a rank that does not answer counts as lost; None for 60, or 600 where
    # weights come from a disk.
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise GulliverError(f"{name}={value!r}: give 1 or more ranks")
        for name, value, least in (
            ("context", self.context, 2),
            ("cache_tokens", self.cache_tokens, 1),
        ):
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GulliverError(f"{name}={value!r}: give {least} tokens or more")
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
