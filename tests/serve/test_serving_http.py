"""The server beside the library: what clients of OpenAI's interface get is what LLM answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from gulliver.serve import LLM, SamplingParams
from tests.serve.serving_server import idle, reference, serving

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

TEXTS = ("the quick brown", "write 12345678901234567890: the end.", "é and 漢字, and")
TALK = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving() as (made, _, _):
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with reference() as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    with httpx.Client() as made:
        yield made


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **more)


IDS = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}


def test_completions_are_those_of_the_library(client: Any, llm: LLM) -> None:
    for text in TEXTS:
        output = llm.generate([text], greedy(14))[0]
        asked = {"model": "tiny", "prompt": text, "max_tokens": 14, "temperature": 0, **IDS}
        answer = client.completions.create(**asked)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == (output.text, "length")
        assert choice.token_ids == output.outputs[0].token_ids
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
        assert (answer.usage.completion_tokens, answer.model) == (14, "tiny")
        pieces = list(
            client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(c.text for p in pieces for c in p.choices) == output.text
        ids = [token for p in pieces for c in p.choices for token in c.token_ids]
        assert ids == output.outputs[0].token_ids
        assert pieces[-1].usage.completion_tokens == 14
        assert not pieces[-1].choices
        assert pieces[-2].choices[0].finish_reason == "length"


def test_chats_are_those_of_the_library(client: Any, llm: LLM) -> None:
    output = llm.chat(TALK, greedy(9))
    asked = {"model": "tiny", "max_completion_tokens": 9, "temperature": 0, **IDS}
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    for messages in (TALK, [{"role": "user", "content": parts}]):
        answer = client.chat.completions.create(messages=messages, **asked)
        assert answer.choices[0].message.content == output.text
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    pieces = list(client.chat.completions.create(messages=TALK, stream=True, **asked))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == output.text
    assert pieces[0].choices[0].delta.role == "assistant"
    # A chat that names no number goes on until the context is full.
    asked["max_completion_tokens"] = None
    whole = client.chat.completions.create(messages=TALK, **asked)
    assert whole.usage.total_tokens == 128


def test_seeds_samples_and_penalties_draw_as_the_library(client: Any, llm: LLM) -> None:
    how = {"temperature": 1.3, "top_p": 0.9, "seed": 11, "n": 3, "presence_penalty": 0.5}
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    sampling = SamplingParams(max_tokens=10, ignore_eos=True, **how, **more)
    output = llm.generate([TEXTS[0]], sampling)[0]
    asked = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 10, **how}
    extra = {"extra_body": {**IDS["extra_body"], **more}}
    answer = client.completions.create(**asked, **extra)
    assert [c.token_ids for c in answer.choices] == [c.token_ids for c in output.outputs]
    texts = ["", "", ""]
    for piece in client.completions.create(**asked, **extra, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in output.outputs]


def test_logprobs_equal_the_librarys(client: Any, llm: LLM) -> None:
    tokens = llm.generate([TEXTS[2]], greedy(8, logprobs=3))[0].outputs[0].tokens
    values = [token.logprob for token in tokens]
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, **IDS}
    found = client.completions.create(prompt=TEXTS[2], logprobs=3, **asked).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx(values, abs=1e-5)
    for told, token in zip(found.logprobs.top_logprobs, tokens, strict=True):
        assert list(told.values()) == pytest.approx([o.logprob for o in token.likely], abs=1e-5)
    pieces = client.completions.create(prompt=TEXTS[2], logprobs=3, stream=True, **asked)
    told = [v for p in pieces for c in p.choices for v in c.logprobs.token_logprobs]
    assert told == pytest.approx(values, abs=1e-5)
    tokens = llm.chat(TALK, greedy(8, logprobs=2)).outputs[0].tokens
    chat = client.chat.completions.create(messages=TALK, logprobs=True, top_logprobs=2, **asked)
    for one, token in zip(chat.choices[0].logprobs.content, tokens, strict=True):
        assert one.logprob == pytest.approx(token.logprob, abs=1e-5)
        assert [o.logprob for o in one.top_logprobs] == pytest.approx(
            [o.logprob for o in token.likely], abs=1e-5
        )
        assert one.bytes is None or bytes(one.bytes).decode() == one.token


def test_stops_several_prompts_tokens_and_echo(client: Any, llm: LLM) -> None:
    said = llm.generate([TEXTS[0]], greedy(14))[0]
    asked = {"model": "tiny", "max_tokens": 14, "temperature": 0, **IDS}
    stop = said.text[5:8]
    for given in (stop, ["never", stop]):
        found = client.completions.create(prompt=TEXTS[0], stop=given, **asked).choices[0]
        assert (found.text, found.finish_reason) == (said.text[: said.text.index(stop)], "stop")
    wanted = [output.text for output in llm.generate(TEXTS, greedy(14))]
    found = client.completions.create(prompt=list(TEXTS), **asked)
    assert [choice.text for choice in found.choices] == wanted
    tokens = [llm.engine.tokens_of(text) for text in TEXTS]
    found = client.completions.create(prompt=tokens, n=2, **asked)
    assert [choice.text for choice in found.choices] == [text for text in wanted for _ in (0, 1)]
    whole = TEXTS[0] + wanted[0]
    for prompt in (TEXTS[0], tokens[0]):
        found = client.completions.create(prompt=prompt, echo=True, **asked)
        assert found.choices[0].text == whole
        pieces = client.completions.create(prompt=prompt, echo=True, stream=True, **asked)
        assert "".join(p.choices[0].text for p in pieces) == whole


def test_many_clients_at_once_get_what_each_would_alone(server: Any, llm: LLM) -> None:
    random_ = random.Random(5)
    cases = [
        (random_.choice(TEXTS)[: random_.randint(3, 20)], random_.randint(1, 30), number % 2 == 0)
        for number in range(40)
    ]
    wanted = [
        llm.generate([text], greedy(count))[0].outputs[0].token_ids for text, count, _ in cases
    ]

    async def ask(client: Any, text: str, count: int, stream: bool) -> list[int]:
        asked = {"model": "tiny", "prompt": text, "max_tokens": count, "temperature": 0, **IDS}
        answer = await client.completions.create(**asked, stream=stream)
        if not stream:
            return answer.choices[0].token_ids
        return [token async for piece in answer for c in piece.choices for token in c.token_ids]

    async def ask_all() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, *case) for case in cases))

    assert asyncio.run(ask_all()) == wanted
    counts = idle(server)
    assert counts["free_blocks"] == counts["blocks"]


REFUSED: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "long answer": ({"max_tokens": 999}, 400, "max_tokens", "128: use at most 124"),
    "empty prompt": ({"prompt": []}, 400, "prompt", "prompt must be a string"),
    "no prompt": ({"prompt": None}, 400, "prompt", "prompt must be a string"),
    "strange token": ({"prompt": [380]}, 400, "prompt", "token 380 is not in the vocabulary"),
    "slip": ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    "inner slip": (
        {"stream": True, "stream_options": {"usage": True}},
        *(400, "stream_options.usage", "unknown field"),
    ),
    "bias": ({"logit_bias": {"5": 1}}, 400, "logit_bias", "logit_bias is not supported"),
    "best_of": ({"best_of": 3}, 400, "best_of", "best_of is not supported"),
    "echo": ({"echo": True, "logprobs": 1}, 400, "echo", "echo with logprobs"),
    "model": ({"model": "tinny"}, 404, "model", "did you mean 'tiny'"),
    "samples": ({"n": 17}, 400, "n", "n=17: this server allows at most 16"),
    "answers": ({"prompt": ["a"] * 100, "n": 3}, 400, "prompt", "request 300"),
    "text for number": ({"top_p": "0.5"}, 400, "top_p", "top_p: input should be a valid number"),
    "seed": ({"seed": 2**70}, 400, "seed", "a 64-bit integer"),
    "stop": ({"stop": ""}, 400, "stop", "strings must have 1 to"),
    "stream options": ({"stream_options": {}}, 400, "stream_options", "needs stream=true"),
}
CHATS: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "unheard of": ({"zzz": 1}, 400, "zzz", "choose from 'frequency_penalty', 'ignore_eos', "),
    "tools": ({"tools": [{}]}, 400, "tools", "tools is not supported"),
    "messages": ({"messages": []}, 400, "messages", "at least one message"),
    "role": ({"messages": [{"content": "x"}]}, 400, "messages[0]", "must have a role"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        *(400, "messages[0].content", "'image_url': only text"),
    ),
    "tool calls": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        *(400, "messages[0].tool_calls", "not supported"),
    ),
    "many": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "top_logprobs is 21"),
}


def test_unsupported_fields_are_rejected_by_name(server: Any, http: Any) -> None:
    for path, first, cases in (
        ("completions", {"prompt": "the"}, REFUSED),
        ("chat/completions", {"messages": TALK}, CHATS),
    ):
        for name, (more, status, param, said) in cases.items():
            answer = http.post(f"{server.url}/{path}", json={"model": "tiny", **first, **more})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (name, error)
            assert said in error["message"], name
        # What says nothing is as good as not there.
        neutral = {"user": "me", "logit_bias": {}, "metadata": {"a": "b"}, "max_tokens": 1}
        assert http.post(f"{server.url}/{path}", json={**first, **neutral}).status_code == 200


BODIES = {
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', 400, "not a JSON object"),
    "half a pair": (b'{"prompt": "\\ud800"}', 400, "not a JSON object"),
    "cut off": (b'{"prompt": "x"', 400, "not a JSON object"),
    "no object": (b"[1]", 400, "not a JSON object"),
    "deep": (b'{"prompt": ' + b"[" * 20_000, 400, "recursion limit"),
    "deep metadata": (b'{"metadata": ' + b'{"a":' * 9_000, 400, "recursion limit"),
    "long number": (b'{"seed": ' + b"9" * 6_000 + b"}", 400, "number out of range"),
    "no number": (b'{"prompt": "x", "temperature": NaN}', 400, "finite number"),
    "huge": (b"x" * 100_000, 413, "exceeds 69,632 bytes"),
    "empty": (b"", 400, "not a JSON object"),
}


def test_bodies_that_are_no_requests_are_refused(server: Any, http: Any) -> None:
    head = {"content-type": "application/json"}
    where = f"{server.url}/completions"
    for name, (body, status, said) in BODIES.items():
        answer = http.post(where, content=body, headers=head)
        assert (answer.status_code, said in answer.text) == (status, True), (name, answer.text)
    # Without a length: what is read is bounded all the same.
    parts = iter([b" " * 10_000] * 20)
    assert http.post(where, content=parts, headers=head).status_code == 413
    assert http.post(where, content=b'{"prompt": "x"}').status_code == 415


def test_models_health_metrics_and_unknown_paths(server: Any, client: Any, http: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families as families

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 128
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    root = server.url.removesuffix("/v1")
    assert http.get(f"{root}/health").json()["status"] == "ok"

    def told() -> dict[str, float]:
        found = families(http.get(f"{root}/metrics").text)
        return {
            sample.name + "".join(f" {v}" for v in sample.labels.values()): sample.value
            for family in found
            for sample in family.samples
        }

    before = told()
    client.completions.create(model="tiny", prompt=[[5, 6, 7]] * 2, max_tokens=4, **IDS)
    counts, after = idle(server), told()
    for name, more in (("tokens", 8), ("prompt_tokens", 6), ("finished", 2)):
        assert after[f"gulliver_{name}_total"] - before[f"gulliver_{name}_total"] == more
    path = "gulliver_requests_total /v1/completions 200"
    assert after[path] - before[path] == 1
    seen = "gulliver_first_token_seconds_count"
    assert after[seen] - before[seen] == 2
    assert after["gulliver_free_blocks"] == counts["blocks"]
    assert after["gulliver_answers"] == 0
    for method, where in (("GET", "/v2"), ("GET", "/v1/completions"), ("POST", "/health")):
        answer = http.request(method, root + where)
        assert answer.status_code in (404, 405)
        assert "/v1/chat/completions" in answer.json()["error"]["message"]


def test_offsets_count_characters_of_the_text(client: Any, llm: LLM) -> None:
    prompt = "漢字 is"
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 14, "temperature": 0, **IDS}
    choice = client.completions.create(**asked, logprobs=1).choices[0]
    offsets, tokenizer = choice.logprobs.text_offset, llm.tokenizer
    wanted = 0
    for count, offset in enumerate(offsets):
        text = tokenizer.decode(choice.token_ids[:count], skip_special_tokens=True)
        # Bytes of a character that is not whole yet do not count.
        wanted = wanted if text.endswith("\ufffd") else len(text)
        assert offset == wanted
    assert len(offsets) == 14


def test_api_key_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_API_KEY", "from-the-environment")
    with serving(api_key="se cret") as (server, _, _):
        root = server.url.removesuffix("/v1")
        for given in (None, "Bearer", "Bearer wrong", "se cret", "Bearer from-the-environment"):
            head = {"authorization": given} if given else {}
            assert httpx.get(f"{root}/openapi.json", headers=head).status_code in (401, 404)
            for path in ("/v1/models", "/metrics"):
                assert httpx.get(root + path, headers=head).status_code == 401
            answer = httpx.post(f"{root}/v1/completions", json={}, headers=head)
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{root}/health").status_code == 200
        with openai.OpenAI(base_url=server.url, api_key="se cret") as client:
            client.completions.create(model="tiny", prompt="the", max_tokens=1)
    with serving() as (server, _, _):
        assert httpx.get(f"{server.url}/models").status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER"):
            head = {"authorization": f"{scheme} from-the-environment"}
            assert httpx.get(f"{server.url}/models", headers=head).status_code == 200


def test_json_of_the_answers_is_json(server: Any, http: Any) -> None:
    # -inf has no JSON: this model's likeliest 20 are finite, the writer's rule is looked at.
    from gulliver.serve import Token
    from gulliver.serve.http.answers import AnswerChoice, ChatFormat, CompletionFormat, Usage
    from gulliver.serve.http.requests import ChatBody, CompletionBody
    from gulliver.serve.sampling import Likely

    lost = float("-inf")
    choice = AnswerChoice(0, "x", [Token(5, lost, (Likely(5, lost),))], "stop")
    forms = (
        CompletionFormat(CompletionBody(logprobs=1), "tiny", str),
        ChatFormat(ChatBody(logprobs=True, top_logprobs=1), "tiny", str),
    )
    for form in forms:
        said = json.dumps(form.whole([choice], Usage()), allow_nan=False)
        assert said.count("-9999") == 2
