"""Serving of language models: many requests at a time, over pages of keys and values.

    from gulliver.serve import LLM, SamplingParameters
    LLM("folder").generate(["The sea is"], SamplingParameters(max_tokens=32))

The names are those of `public.py`, imported when the first of them is asked for. Read
`_engine.py` (requests in, events out), `scheduler.py` over `_blocks.py` (what is in the next
batch, and which blocks it has), `_batch.py` (a batch as plain numbers, and who runs it),
`local.py` with `_attention.py` and `_pages.py` (the model's own forward over pages), `sampling.py`
and `requests.py` (logits to tokens to text), `batch.py` (the seam of drafts), then `llm.py`.

What it does not know: sockets and threads. The server in `http` owns an engine and calls `step`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.batch import Batch, Draft, Drafter, Runner, Span
    from gulliver.serve.engine import Engine
    from gulliver.serve.llm import LLM
    from gulliver.serve.local import LocalRunner
    from gulliver.serve.options import EngineOptions, ModelOptions
    from gulliver.serve.sampling import Completion, Event, Output, SamplingParameters, Token
    from gulliver.serve.weights import end_tokens, load

__all__ = [
    "LLM",
    "Batch",
    "Completion",
    "Draft",
    "Drafter",
    "Engine",
    "EngineOptions",
    "Event",
    "LocalRunner",
    "ModelOptions",
    "Output",
    "Runner",
    "SamplingParameters",
    "Span",
    "Token",
    "end_tokens",
    "load",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.serve.batch": ["Batch", "Draft", "Drafter", "Runner", "Span"],
        "gulliver.serve.engine": ["Engine"],
        "gulliver.serve.llm": ["LLM"],
        "gulliver.serve.local": ["LocalRunner"],
        "gulliver.serve.options": ["EngineOptions", "ModelOptions"],
        "gulliver.serve.sampling": ["Completion", "Event", "Output", "SamplingParameters", "Token"],
        "gulliver.serve.weights": ["end_tokens", "load"],
    },
)
