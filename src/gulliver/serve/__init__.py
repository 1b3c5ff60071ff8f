"""Serving of language models: many requests at a time, over pages of keys and values.

    from gulliver.serve import LLM, SamplingParameters
    LLM("folder").generate(["The sea is"], SamplingParameters(max_tokens=32))

The names are those of `_public.py`, imported when the first of them is asked for. Read
`_engine.py` (requests in, events out), `_scheduler.py` over `_blocks.py` (what is in the next
batch, and which blocks it has), `_batch.py` (a batch as plain numbers, and who runs it),
`_local.py` with `_attention.py` and `_pages.py` (the model's own forward over pages), `_draw.py`
and `_text.py` (logits to tokens to text), `_speculation.py` (the seam of drafts), then `_llm.py`.

What it does not know: sockets and threads. The server in `http` owns an engine and calls `step`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.serve._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(name)
    from gulliver.serve import _public

    return getattr(_public, name)


def __dir__() -> list[str]:
    from gulliver.serve import _public

    return [*globals(), *_public.__all__]
