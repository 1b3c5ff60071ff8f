"""Options of `gulliver serve` and `gulliver chat` for models larger than a process, and drafts.

They are named as `gulliver.LLM` names its arguments. Nothing here imports torch at its top.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from gulliver.errors import GulliverError
from gulliver.options import Options, Range

RANKS = Range(1, 1024)


@dataclass(frozen=True)
class Placement(Options):
    """Where weights lie, how many ranks compute, and what guesses tokens."""

    UNPREFIXED: ClassVar[bool] = True
    """The options stand beside those of the command, under names of their own."""

    memory: str | None = None
    """Memory of weights, keys and values in each process, such as 6GiB; the rest is on a disk."""
    disk: Path | None = None
    """Folder on a local disk for those weights; that of temporary files by default."""
    tensor: Annotated[int, RANKS] = 1
    """Ranks that each layer is cut over."""
    pipeline: Annotated[int, RANKS] = 1
    """Stages that the layers are dealt to, each on that many ranks."""
    speeds: tuple[float, ...] = ()
    """Relative speeds of the stages; equal ones by default."""
    timeout_s: Annotated[float | None, Range(0.1, 86400)] = None
    """Seconds after which a silent rank is lost; 60 by default, 600 with --memory."""
    speculation: str | None = None
    """Drafts: ngram, suffix, or the folder of a draft; answers stay the same."""

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `gulliver.LLM`."""
        return {
            "memory": self.memory,
            "disk": self.disk,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "speeds": self.speeds or None,
            "timeout_s": self.timeout_s,
            "speculation": self.speculation,
        }


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Says errors of loading a model in the words of the command line.

    Raises:
        GulliverError: it could not be loaded, or memory ran out.
    """
    try:
        yield
    except GulliverError as error:
        raise GulliverError(as_options(str(error))) from None
    except (MemoryError, RuntimeError) as error:
        # Memory that was free when it was looked for and is not now, or a limit of the process.
        said = str(error).lower()
        if not isinstance(error, MemoryError) and "memory" not in said and "alloc" not in said:
            raise
        raise GulliverError(
            f"{folder}: memory ran out while it was loaded: try --quantize int8_dynamic (a "
            "quarter of float32), a smaller --context, --memory with less than is free (the rest "
            "of the weights on a disk), or, where each rank has a limit of its own, more ranks "
            "(--tensor, --pipeline)"
        ) from None


def as_options(message: str) -> str:
    """Writes the library's arguments as options: ``dtype="bfloat16"`` as ``--dtype bfloat16``."""
    found = re.sub(r'\b(dtype|quantize)="(\w+)"', lambda m: f"--{m[1]} {m[2]}", message)
    found = re.sub(r"give cache_tokens of at most \d+", "give a smaller --cache", found)
    found = found.replace("give cache_tokens, ", "give a smaller --cache, ")
    found = re.sub(r"\bcontext=(\d+)", r"--context \1", found)
    found = re.sub(rf"(?<!-)\b({_NAMES})=(?=[\w'\"(\[])", lambda m: f"{_option(m[1])} ", found)
    found = re.sub(r"(?<!-)\b(tensor|pipeline) from (?=\d)", r"--\1 from ", found)
    # As in "needs memory=": the argument without a value.
    found = re.sub(rf"(?<!-)\b({_NAMES})=", lambda m: _option(m[1]), found)
    return found.replace("give a context of", "give a --context of")


_NAMES = "memory|disk|tensor|pipeline|speeds|timeout_s|speculation"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
