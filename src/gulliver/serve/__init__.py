"""Serves language models: continuous batching over a paged KV cache.

    from gulliver import LLM, SamplingParams
    LLM("folder").generate(["The sea is"], SamplingParams(max_tokens=32))[0].outputs[0].text

Start with `engine.py` (requests in, events out), then `scheduler.py` and `batch.py`. Sockets and
threads are in `http`, whose server owns an engine and calls `step`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.batch import Batch, Draft, Drafter, Runner, Span
    from gulliver.serve.engine import Engine
    from gulliver.serve.llm import LLM
    from gulliver.serve.local import LocalRunner
    from gulliver.serve.options import EngineOptions, ModelOptions
    from gulliver.serve.sampling import (
        Completion,
        CompletionOutput,
        Event,
        Output,
        RequestOutput,
        SamplingParameters,
        SamplingParams,
        Token,
    )
    from gulliver.serve.weights import end_tokens, load

__all__ = [
    "LLM",
    "Batch",
    "Completion",
    "CompletionOutput",
    "Draft",
    "Drafter",
    "Engine",
    "EngineOptions",
    "Event",
    "LocalRunner",
    "ModelOptions",
    "Output",
    "RequestOutput",
    "Runner",
    "SamplingParameters",
    "SamplingParams",
    "Span",
    "Token",
    "end_tokens",
    "load",
]

__getattr__, __dir__ = lazy_exports(__name__)
