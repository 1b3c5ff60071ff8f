"""Serving engines on CPUs, each in a process of its own: ``python -m benchmarks._serving_engines``.

An engine reads a GGUF file and answers prompts of tokens that come at once, greedily. The process
prints a line of JSON when it has answered a first request, and one for each number of requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from itertools import count as counted
from pathlib import Path
from typing import Any

MOST = 32  # requests at a time
LONGEST = 288  # tokens of prompt and answer
STEP = 512  # tokens of a batch
RATE = 1.0  # requests a second that come in turn

Prompts = Sequence[list[int]]
Run = Callable[[Prompts, int, Sequence[float]], tuple[list[list[int]], list[list[float]]]]
"""Answers prompts that come at given seconds with a number of tokens each: tokens, and the seconds
at which they came."""


SHAPES = {"0.5b": (896, 4864, 14, 2, 24), "1.5b": (1536, 8960, 12, 2, 28)}
"""Hidden size, size of the feed-forward, heads, heads of keys, layers: those of Qwen 2.5."""


def write_gguf(source: Path, kind: str, target: Path, shape: str | None = None) -> None:
    """Writes a copy of a Llama's GGUF file with float32, float16 or Q8_0 matrices.

    With a `shape`, weights are random, and only the tokenizer is that of the file.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    kinds = gguf.GGMLQuantizationType
    wanted = {"f32": kinds.F32, "f16": kinds.F16, "q8_0": kinds.Q8_0}[kind]
    read = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(read.fields["general.architecture"].contents()))
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization")
    sizes = _sizes(shape) if shape else {}
    for name, field in read.fields.items():
        if not name.startswith(left_out):
            part = field.types[1] if len(field.types) > 1 else None
            value = sizes.get(name.partition(".")[2], field.contents())
            writer.add_key_value(name, value, field.types[0], part)
    files = gguf.LlamaFileType
    types = {"f32": files.ALL_F32, "f16": files.MOSTLY_F16, "q8_0": files.MOSTLY_Q8_0}
    writer.add_file_type(types[kind])
    own = ((t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in read.tensors)
    for name, values in _random(read, shape) if shape else own:
        form = wanted if values.ndim > 1 else kinds.F32
        writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(shape: str) -> dict[str, int]:
    hidden, inner, heads, kv_heads, layers = SHAPES[shape]
    return {
        "block_count": layers,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.dimension_count": hidden // heads,
        "attention.key_length": hidden // heads,
        "attention.value_length": hidden // heads,
    }


def _random(read: Any, shape: str) -> Iterator[tuple[str, Any]]:
    """Random tensors of a shape, in place of a file's."""
    import numpy as np

    hidden, inner, heads, kv_heads, layers = SHAPES[shape]
    kv = hidden // heads * kv_heads
    sides = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    sides |= {"attn_output": (hidden, hidden), "ffn_gate": (inner, hidden)}
    sides |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    draw = np.random.default_rng(0)
    words = int(next(t.shape[1] for t in read.tensors if t.name == "token_embd.weight"))
    yield "token_embd.weight", 0.02 * draw.standard_normal((words, hidden), dtype=np.float32)
    for n in range(layers):
        for name, side in sides.items():
            values = draw.standard_normal(side, dtype=np.float32) / side[1] ** 0.5
            yield f"blk.{n}.{name}.weight", values
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{n}.{name}.weight", np.ones(hidden, np.float32)
    yield "output_norm.weight", np.ones(hidden, np.float32)


def gulliver(path: Path, kind: str, threads: int) -> Run:
    """`gulliver.serve` in float32, bfloat16 or int8 with rounded activations."""
    import torch

    from gulliver.serve import LLM, EngineOptions, SamplingParams

    torch.set_num_threads(threads)
    ways = {"f32": {"dtype": "float32"}, "f16": {"dtype": "bfloat16"}}
    int8 = {"quantize": "int8_dynamic", "dtype": "bfloat16"}  # the cache has 16 bits
    how: dict[str, Any] = ways.get(kind, int8)
    llm = LLM(
        *(path, None),
        options=EngineOptions(STEP, MOST, share_prefixes=False),
        cache_tokens=MOST * LONGEST,
        **how,
    )

    asked = SamplingParams(temperature=0, ignore_eos=True)

    def add(prompt: list[int], count: int) -> int:
        return llm.engine.add(prompt, replace(asked, max_tokens=count))

    def step(_: Sequence[int]) -> list[tuple[int, list[int]]]:
        return [(e.request, [token.id for token in e.tokens]) for e in llm.engine.step()]

    return _looped(add, step)


def _looped(
    add: Callable[[list[int], int], Any],
    step: Callable[[Sequence[Any]], list[tuple[Any, list[int]]]],
) -> Run:
    """An engine whose steps this process makes."""

    def run(prompts: Prompts, count: int, at: Sequence[float]) -> tuple[Any, Any]:
        begun, added, tokens, times = time.perf_counter(), [], [], []
        while len(added) < len(prompts) or any(len(of) < count for of in tokens):
            now = time.perf_counter() - begun
            while len(added) < len(prompts) and at[len(added)] <= now:
                added.append(add(prompts[len(added)], count))
                tokens.append([])
                times.append([])
            if all(len(of) == count for of in tokens):
                time.sleep(max(0.0, at[len(added)] - now))
                continue
            for key, new in step(added):
                place = added.index(key)
                tokens[place] += new
                times[place] += [time.perf_counter() - begun] * len(new)
        return tokens, times

    return run


def llamacpp(path: Path, kind: str, threads: int) -> Run:
    """llama.cpp's server within this process, as many slots as requests."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    asked = xllamacpp.CommonParams()
    asked.model.path = str(path)
    asked.n_parallel, asked.n_ctx = MOST, MOST * LONGEST
    asked.n_batch = asked.n_ubatch = STEP
    if kind == "f32":
        asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
    asked.cache_prompt, asked.warmup, asked.port, asked.verbosity = False, False, 0, 0
    server = xllamacpp.Server(asked)

    def run(prompts: Prompts, count: int, at: Sequence[float]) -> tuple[Any, Any]:
        url = f"{server.listening_address}/completion"  # the server lives as long as this function
        begun = time.perf_counter()

        def one(prompt: list[int], when: float) -> list[tuple[int, float]]:
            body = {"prompt": prompt, "n_predict": count, "temperature": 0, "samplers": ["top_k"]}
            body |= {"top_k": 1, "ignore_eos": True, "cache_prompt": False, "stream": True}
            body |= {"return_tokens": True}
            head, came = {"Content-Type": "application/json"}, []
            time.sleep(max(0.0, when - (time.perf_counter() - begun)))
            asked = urllib.request.Request(url, json.dumps(body).encode(), head)
            with urllib.request.urlopen(asked) as found:
                for line in found:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter() - begun
                        came += [(token, now) for token in json.loads(line[6:])["tokens"]]
            return came

        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(one, prompts, at))
        return [[t for t, _ in came] for came in found], [[s for _, s in came] for came in found]

    return run


def openvino(path: Path, kind: str, threads: int) -> Run:
    """OpenVINO GenAI's continuous batching; the cache has 8 bits, but in float32."""
    import numpy as np
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]
    from openvino import Tensor  # pyright: ignore[reportMissingImports]

    sizes = genai.SchedulerConfig()
    sizes.max_num_batched_tokens, sizes.max_num_seqs = STEP, MOST
    sizes.enable_prefix_caching, sizes.cache_size = False, 2
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    how = {"INFERENCE_NUM_THREADS": threads} | (exact if kind == "f32" else {})
    pipeline = genai.ContinuousBatchingPipeline(str(path), sizes, "CPU", how)

    def add(prompt: list[int], count: int) -> Any:
        asked = genai.GenerationConfig()
        asked.max_new_tokens, asked.ignore_eos, asked.do_sample = count, True, False
        given = Tensor(np.array([prompt], dtype=np.int64))
        return pipeline.add_request(next(numbers), given, asked)

    def step(handles: Sequence[Any]) -> list[tuple[Any, list[int]]]:
        pipeline.step()
        came = [(one, one.read()) for one in handles if one.can_read()]
        return [(one, list(of.generated_ids)) for one, found in came for of in found.values()]

    numbers = counted()
    return _looped(add, step)


def transformers(path: Path, kind: str, threads: int) -> Run:
    """One static batch of transformers' `generate`; prompts are equally long."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    how: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, **how).eval()

    def run(prompts: Prompts, count: int, at: Sequence[float]) -> tuple[Any, Any]:
        del at  # all come at once
        ids = torch.tensor(list(prompts))
        sizes = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **sizes)
        return made[:, ids.shape[1] :].tolist(), []

    return run


ENGINES: dict[str, Callable[[Path, str, int], Run]] = {
    "gulliver": gulliver,
    "llama.cpp": llamacpp,
    "OpenVINO": openvino,
    "transformers": transformers,
}


def _age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def main(engine: str, kind: str, path: str, prompts: str, count: int, *sizes: int) -> None:
    """Times an engine with each number of requests; 0 are all of them, which come in turn."""
    given: list[list[int]] = json.loads(Path(prompts).read_text())
    run = ENGINES[engine](Path(path), kind, len(os.sched_getaffinity(0)))
    run([given[-1][:16]], 2, [0.0])
    print(json.dumps({"ready": _age()}), flush=True)
    for size in sizes:
        chosen = random.Random(0)
        gaps = [chosen.expovariate(RATE) if not size else 0.0 for _ in given]
        at = list(accumulate(gaps))[: size or len(given)]
        begun = time.perf_counter()
        answers, times = run(given[: len(at)], count, at)
        seconds = time.perf_counter() - begun
        assert all(len(answer) == count for answer in answers), [len(a) for a in answers]
        figures = {"size": size, "seconds": seconds, "first": [a[:16] for a in answers]}
        if not size:
            firsts = [came[0] - when for came, when in zip(times, at, strict=True)]
            gaps = [b - a for came in times for a, b in pairwise(came)]
            figures |= {"firsts": firsts, "gaps": gaps}
        print(json.dumps(figures), flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines' threads may outlive the interpreter


if __name__ == "__main__":
    engine_name, weights, file, texts, answer, *requests = sys.argv[1:]
    main(engine_name, weights, file, texts, int(answer), *map(int, requests))
