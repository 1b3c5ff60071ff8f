"""Serving from a folder: texts, stops, chats, int8, and what is refused."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import gulliver
from gulliver.errors import GulliverError
from gulliver.quantize import save_quantized
from gulliver.serve import LLM, Engine, EngineOptions, LocalRunner, SamplingParams, load
from gulliver.serve.requests import AnswerText, listed, tokens_of
from gulliver.serve.weights import free_bytes
from tests.serve.serving_models import Slots, one_by_one, prompts, tiny
from tests.texts import tokenizer_of

TEXTS = ("the quick brown", "write 12345678901234567890: the end.", "é and 漢字, and")


@cache
def small() -> Any:
    """A Llama with the vocabulary of the tests' tokenizer, whose likeliest answers are readable."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer_of()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    parts = [t for t in range(config.vocab_size) if not tokenizer_of().decode([t]).isascii()]
    with torch.no_grad():
        # Parts of characters are left to chance.
        model.lm_head.weight[parts] = 0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    small().save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return path


def alone(text: str, count: int) -> tuple[list[int], str]:
    """transformers' greedy answer to a text, and the answer's own text."""
    tokenizer = tokenizer_of()
    ids = tokenizer(text)["input_ids"]
    made, _ = one_by_one(small(), ids, count)
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return made, tokenizer.decode([*ids, *made], skip_special_tokens=True)[len(before) :]


def test_a_folder_answers_as_transformers_does(folder: Path) -> None:
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with gulliver.LLM(folder, cache_tokens=512) as llm:
        outputs = llm.generate(TEXTS, greedy)
        again = llm.generate(TEXTS[1], greedy)
    for text, output in zip(TEXTS, outputs, strict=True):
        ids, said = alone(text, 20)
        assert output.outputs[0].token_ids == ids
        assert output.text.rstrip("\ufffd") == said.rstrip("\ufffd")
        assert (output.prompt, output.outputs[0].finish_reason) == (text, "length")
    assert again[0].prefix_cached >= 16  # what is left of the first time
    assert again[0].text == outputs[1].text


def test_texts_of_events_add_up_and_no_character_comes_in_halves(folder: Path) -> None:
    model, tokenizer = load(folder)
    runner = LocalRunner(model, cache_tokens=512)
    engine = Engine(runner, tokenizer)
    asked = SamplingParams(max_tokens=60, temperature=1.2, seed=3, ignore_eos=True)
    engine.add(TEXTS[0], asked)
    pieces, ids = [], []
    while engine.busy:
        for event in engine.step():
            pieces.append(event.text)
            ids += [token.id for token in event.tokens]
    runner.close()
    before = tokenizer(TEXTS[0])["input_ids"]
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=True)
    assert TEXTS[0] + "".join(pieces) == whole
    assert all(not piece.endswith("\ufffd") for piece in pieces[:-1])
    assert sum(map(bool, pieces)) > 10


def test_texts_of_any_tokens_are_those_of_all_of_them_at_once() -> None:
    # Bytes that are no UTF-8, parts of characters and special tokens, in any order.
    tokenizer, random = tokenizer_of(), torch.Generator().manual_seed(0)
    for _ in range(60):
        tokens = torch.randint(0, len(tokenizer), (24,), generator=random).tolist()
        text = AnswerText(tokenizer, (), tokenizer(TEXTS[0])["input_ids"])
        made = "".join(text.add(token)[0] for token in tokens) + text.end()
        assert made == tokenizer.decode(tokens, skip_special_tokens=True)


def test_stop_texts_end_answers_wherever_tokens_end(folder: Path) -> None:
    _, said = alone(TEXTS[0], 20)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(folder, cache_tokens=512) as llm:
        for place in range(1, len(said) - 3):
            stop = said[place : place + 3]
            if "\ufffd" in said[: place + 3]:
                break
            asked = SamplingParams(
                max_tokens=20, temperature=0, ignore_eos=True, stop=(stop, "never")
            )
            output = llm.generate([TEXTS[0]], asked)[0]
            assert output.text == said[: said.index(stop)]
            assert output.outputs[0].finish_reason == "stop"
        assert place > 3
        # What only begins like a stop string is text.
        held = SamplingParams(
            max_tokens=20, temperature=0, ignore_eos=True, stop=(said[-2:] + "never",)
        )
        assert llm.generate([TEXTS[0]], held)[0].text == llm.generate([TEXTS[0]], greedy)[0].text


def test_end_tokens_and_stop_tokens_end_answers() -> None:
    model, (text,) = tiny("llama"), prompts((9,))
    ids, _ = one_by_one(model, text, 12)
    place = next(n for n in range(2, 12) if ids[n] not in ids[:n])
    runner = LocalRunner(model, cache_tokens=256)
    for ends, more, ignore, count in (
        ((ids[place],), (), False, place + 1),
        ((ids[place],), (), True, 12),
        ((), (ids[place],), True, place + 1),
    ):
        engine = Engine(runner, end_tokens=ends)
        asked = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=more, ignore_eos=ignore)
        engine.add(text, asked)
        events = []
        while engine.busy:
            events += engine.step()
        made = [token.id for event in events for token in event.tokens]
        assert made == ids[:count]
        assert events[-1].finish == ("stop" if count < 12 else "length")
    runner.close()


def test_a_chat_is_written_by_the_template(folder: Path) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(folder, cache_tokens=512) as llm:
        output = llm.chat([{"role": "user", "content": "the fox"}], greedy)
        written = "<s><|user|>the fox<|end|>\n<|assistant|>"
        assert llm.tokenizer.decode(output.prompt_token_ids) == written
        assert output.outputs[0].token_ids == one_by_one(small(), output.prompt_token_ids, 8)[0]
        llm.tokenizer.chat_template = None
        with pytest.raises(GulliverError, match="no chat template"):
            llm.chat([{"role": "user", "content": "the fox"}])


def test_the_command_answers_as_the_library(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gulliver.cli.dispatch import run

    common = ["chat", str(folder), "--temperature", "0", "--max-tokens", "9"]
    assert run([*common, "--plain", "--prompt", TEXTS[0], TEXTS[1]]) == 0
    printed = capsys.readouterr().out
    greedy = SamplingParams(max_tokens=9, temperature=0)
    with LLM(folder, cache_tokens=512) as llm:
        assert printed == "".join(o.text + "\n" for o in llm.generate(TEXTS[:2], greedy))
        said = {"role": "user", "content": "the fox"}
        first = llm.chat([said], greedy).text
        later = [said, {"role": "assistant", "content": first}, said]
        second = llm.chat(later, greedy).text
    assert run([*common, "--prompt", "the fox", "the fox"]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_stream_that_is_left_ends_its_request(folder: Path) -> None:
    with LLM(folder, cache_tokens=512) as llm:
        events = llm.stream(TEXTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
        next(iter(events))
        events.close()
        llm.engine.step()
        assert not llm.engine.busy
        assert llm.engine.counts()["free_blocks"] == llm.engine.counts()["blocks"]


def test_threads_and_streams_of_one_model_have_their_own_answers(folder: Path) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(folder, cache_tokens=1024) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(list(TEXTS), greedy)]
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda text: llm.generate(text, greedy)[0], TEXTS))
        assert [output.outputs[0].token_ids for output in found] == alone
        read = []
        for event in llm.stream(TEXTS[0], greedy):
            if not read:
                assert llm.generate(TEXTS[1], greedy)[0].outputs[0].token_ids == alone[1]
            read += [token.id for token in event.tokens]
        assert read == alone[0]


@pytest.mark.parametrize("fault", ["lacks", "shape"])
def test_a_folder_without_all_tensors_of_its_model_is_refused(
    folder: Path, tmp_path: Path, fault: str
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name][1:].clone()
    if fault == "lacks":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    said = {
        "lacks": f"the files lack {name}",
        "shape": rf"{name} is \[95, 64\] in the files but \[96, 64\] in ",
    }
    with pytest.raises(GulliverError, match=said[fault]):
        LLM(tmp_path / "model", cache_tokens=512)


@pytest.mark.parametrize("mode", ["int8_dynamic", "int4"])
def test_quantised_weights_answer_as_the_quantised_model(
    folder: Path, tmp_path: Path, mode: str
) -> None:
    import copy

    model = gulliver.replace_module(copy.deepcopy(small()), mode)
    ids = tokenizer_of()(TEXTS[1])["input_ids"]
    asked = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    # In torch: native code does not round activations, as the layers do.
    sizes: dict[str, Any] = {"cache_tokens": 512, "options": EngineOptions(9, 4)}
    with LLM(folder, quantize=mode, decoder="torch", **sizes) as llm:
        tokens = llm.generate([TEXTS[1]], asked)[0].outputs[0].tokens
    written = save_quantized(model, tmp_path / "written")
    tokenizer_of().save_pretrained(written)
    with LLM(written, decoder="torch", **sizes) as llm:
        assert llm.generate([TEXTS[1]], asked)[0].outputs[0].tokens == tokens
    with pytest.raises(GulliverError, match="is already quantized"):
        load(written, quantize=mode)
    made, logits = one_by_one(model, ids, 6)
    assert [token.id for token in tokens] == made
    for token, row in zip(tokens, logits.log_softmax(-1), strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)


def test_a_request_that_is_cancelled_says_so_and_frees_its_blocks() -> None:
    engine = Engine(Slots(blocks=20, size=4), options=EngineOptions(16, 4))
    asked = SamplingParams(max_tokens=20, temperature=0, n=2)
    kept, gone, never = engine.add([1], asked), engine.add([2], asked), engine.add([3], asked)
    engine.step()
    assert engine.cancel(gone)
    assert engine.cancel(never)
    ended = {}
    while engine.busy:
        for event in engine.step():
            if event.finish:
                ended[event.request, event.sample] = event.finish
    assert ended == {
        **{(gone, sample): "cancelled" for sample in (0, 1)},
        **{(never, sample): "cancelled" for sample in (0, 1)},
        **{(kept, sample): "length" for sample in (0, 1)},
    }
    assert engine.counts()["free_blocks"] == 20
    assert not engine.cancel(gone)
    assert not engine.cancel(99)


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    class Broken(Slots):
        def collect(self) -> torch.Tensor:
            requests = [s.sequence for s in self.flights[0].spans for _ in range(s.outputs)]
            logits = super().collect()
            logits[[row for row, number in enumerate(requests) if number == 0]] = torch.nan
            return logits

    engine = Engine(Broken(blocks=20, size=4))
    asked = SamplingParams(max_tokens=4, temperature=0)
    engine.add([1], asked)
    engine.add([2], asked)
    ended = {}
    while engine.busy:
        ended |= {e.request: (e.finish, e.error) for e in engine.step() if e.finish}
    assert ended[0][0] == "error"
    assert "logits are not finite" in str(ended[0][1])
    assert ended[1] == ("length", None)


REFUSED = {
    "empty": ([], {}, "the prompt is empty"),
    "token": ([1, 5], {}, "token 5 is not in the vocabulary of 5"),
    "context": ([1] * 12, {}, "has 12 tokens, but the context has 12: use at most 11"),
    "answer": ([1] * 8, {"max_tokens": 5}, "exceeds the context of 12: use at most 4"),
    "stop ids": ([1], {"stop_token_ids": (5,)}, "stop_token_ids: token 5 is not in the vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_requests_are_rejected_at_once(case: str) -> None:
    prompt, more, said = REFUSED[case]
    engine = Engine(Slots(blocks=20, size=4, context=12), options=EngineOptions(16, 4))
    with pytest.raises(GulliverError, match=said):
        engine.add(prompt, SamplingParams(**more))  # type: ignore[arg-type]
    assert not engine.busy


def test_single_and_multiple_prompts_are_distinguished() -> None:
    assert listed("ab") == ["ab"]
    assert listed([1, 2]) == [[1, 2]]
    assert listed([[1, 2], "ab"]) == [[1, 2], "ab"]
    rows = torch.tensor([[1, 2], [3, 4]])
    assert [tokens_of(row, None) for row in listed(rows)] == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert [tokens_of(row, None) for row in listed(rows[0].numpy())] == [[1, 2]]  # type: ignore[arg-type]
    with pytest.raises(GulliverError, match="character 1 of the prompt is half of a surrogate"):
        tokens_of("a\ud800", tokenizer_of())


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    engine = Engine(Slots(blocks=2, size=4))
    with pytest.raises(GulliverError, match="has 8 tokens, but the cache has 8: use at most 7"):
        engine.add([1] * 8)
    with pytest.raises(GulliverError, match="exceeds the cache of 8: use at most 3"):
        engine.add([1] * 5, SamplingParams(max_tokens=4))
    engine.add([1] * 5)
    events = []
    while engine.busy:
        events += engine.step()
    assert sum(len(event.tokens) for event in events) == 3
    assert events[-1].finish == "length"


def test_folders_that_cannot_be_served_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match=r"has no config\.json"):
        load(tmp_path)
    bare = tmp_path / "bare"
    small().save_pretrained(bare)
    with pytest.raises(GulliverError, match="has no tokenizer"):
        load(bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(GulliverError, match="'lama' are not served: did you mean 'llama'"):
        load(bare)
    for more, said in (({"dtype": "float8"}, "dtype='float8'"), ({"quantize": "fp4"}, "quantize")):
        with pytest.raises(GulliverError, match=said):
            load(folder, **more)


def test_models_that_would_answer_wrongly_are_refused() -> None:
    with pytest.raises(GulliverError, match="Linear is not a causal language model"):
        LocalRunner(torch.nn.Linear(2, 2))
    model = type(small())(small().config)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    try:
        with pytest.raises(GulliverError, match=r"RoPE type dynamic .*longest sequence"):
            LocalRunner(model)
    finally:
        model.config.rope_parameters["rope_type"] = "default"
    runner = LocalRunner(tiny("llama"), cache_tokens=64)
    with pytest.raises(GulliverError, match="already being served"):
        LocalRunner(tiny("llama"), cache_tokens=64)
    runner.close()


def test_a_torch_dtype_is_taken(folder: Path) -> None:
    with LLM(folder, dtype=torch.bfloat16, cache_tokens=64) as llm:
        assert llm.engine.runner.pages.keys[0].dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_insufficient_memory_error_names_what_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() for p in small().parameters())
    monkeypatch.setattr("gulliver.serve.weights.free_bytes", lambda device: size * 2)
    with pytest.raises(GulliverError, match='dtype="bfloat16" would fit'):
        load(folder)
    monkeypatch.setattr("gulliver.serve.weights.free_bytes", lambda device: size * 5 // 4)
    with pytest.raises(GulliverError, match='quantize="int8_dynamic" would fit'):
        load(folder)
    monkeypatch.setattr("gulliver.serve.weights.free_bytes", lambda device: 100_000)
    with pytest.raises(GulliverError, match="use a context of at most 96"):
        LocalRunner(small())
    runner = LocalRunner(small(), context=96)
    assert runner.facts.blocks == 6
    runner.close()
    with pytest.raises(GulliverError, match="use cache_tokens of at most 192"):
        LocalRunner(small(), cache_tokens=4096)
    with pytest.raises(GulliverError, match="not both"):
        LocalRunner(small(), cache_tokens=64, cache_bytes=1 << 20)
    assert free_bytes(torch.device("cpu")) > 0
