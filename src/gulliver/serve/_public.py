"""The public names of `gulliver.serve`, imported when one of them is asked for."""

from gulliver.serve._batch import Batch, Facts, Runner, RunnerLost, Span
from gulliver.serve._blocks import BlockPool, extend_digests
from gulliver.serve._draw import DrawRow, draw, draw_key, noise, probabilities
from gulliver.serve._engine import Engine
from gulliver.serve._events import Completion, Event, FinishReason, Likely, Output, Token
from gulliver.serve._families import SERVED, check_served
from gulliver.serve._llm import LLM
from gulliver.serve._load import check_folder, end_tokens, load
from gulliver.serve._local import LocalRunner
from gulliver.serve._memory import free_bytes
from gulliver.serve._native import kernel_problem
from gulliver.serve._pages import LayerShape, Pages
from gulliver.serve._prompts import chat_tokens
from gulliver.serve._sampling import SamplingParameters
from gulliver.serve._speculation import Draft, Drafter, Wanted, walk
from gulliver.serve._ways import EngineOptions, ModelOptions

__all__ = [
    "LLM",
    "SERVED",
    "Batch",
    "BlockPool",
    "Completion",
    "Draft",
    "Drafter",
    "DrawRow",
    "Engine",
    "EngineOptions",
    "Event",
    "Facts",
    "FinishReason",
    "LayerShape",
    "Likely",
    "LocalRunner",
    "ModelOptions",
    "Output",
    "Pages",
    "Runner",
    "RunnerLost",
    "SamplingParameters",
    "Span",
    "Token",
    "Wanted",
    "chat_tokens",
    "check_folder",
    "check_served",
    "draw",
    "draw_key",
    "end_tokens",
    "extend_digests",
    "free_bytes",
    "kernel_problem",
    "load",
    "noise",
    "probabilities",
    "walk",
]
