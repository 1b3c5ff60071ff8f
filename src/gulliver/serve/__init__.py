"""Serves language models: continuous batching over a paged KV cache.

    from gulliver import LLM, SamplingParams
    LLM("folder").generate(["The sea is"], SamplingParams(max_tokens=32))[0].outputs[0].text

Start with `engine.py` (requests in, events out), then `scheduler.py` and `batch.py`. Sockets and
threads are in `http`, whose server owns an engine and calls `step`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.serve.batch import Batch as Batch
    from gulliver.serve.batch import Draft as Draft
    from gulliver.serve.batch import Drafter as Drafter
    from gulliver.serve.batch import Runner as Runner
    from gulliver.serve.batch import Span as Span
    from gulliver.serve.engine import Engine as Engine
    from gulliver.serve.llm import LLM as LLM
    from gulliver.serve.local import LocalRunner as LocalRunner
    from gulliver.serve.options import EngineOptions as EngineOptions
    from gulliver.serve.options import ModelOptions as ModelOptions
    from gulliver.serve.sampling import Completion as Completion
    from gulliver.serve.sampling import CompletionOutput as CompletionOutput
    from gulliver.serve.sampling import Event as Event
    from gulliver.serve.sampling import Output as Output
    from gulliver.serve.sampling import RequestOutput as RequestOutput
    from gulliver.serve.sampling import SamplingParameters as SamplingParameters
    from gulliver.serve.sampling import SamplingParams as SamplingParams
    from gulliver.serve.sampling import Token as Token
    from gulliver.serve.weights import end_tokens as end_tokens
    from gulliver.serve.weights import load as load

__getattr__, __dir__ = lazy_exports(__name__)
