"""Drafts on a real model, by task, temperature, load and length, beside plain steps."""

from __future__ import annotations

import inspect
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks._harness import Report, at_least
from gulliver.serve import Engine, EngineOptions, SamplingParams
from gulliver.serve.gguf import read_tokenizer
from gulliver.serve.llm import open_runner
from gulliver.serve.options import ModelOptions
from gulliver.serve.speculative import make_speculator

DRAFTS = ("ngram", "suffix")
TASKS = ("code", "chat", "summary", "edit")
PROMPT = 320  # tokens at most
AGAIN = "plain again"  # no drafter either: what two equal engines differ by
SUBJECTS = (
    *("the moon", "bread", "sailing ships", "volcanoes", "chess", "rivers", "bees", "glass"),
    *("maps", "winter", "bridges", "tea", "owls", "trains", "coral", "clocks"),
)


def prompts(tokenizer: Any, task: str, count: int) -> list[list[int]]:
    """Tokens of prompts that no drafter has seen."""
    lines = inspect.getsource(textwrap).splitlines()
    licence = Path("LICENSE").read_text().split("\n\n")
    made = []
    for n in range(count):
        part = "\n".join(lines[17 * (n % 20) : 17 * (n % 20) + 20])
        asked = {
            "chat": f"Explain to a child what is interesting about {SUBJECTS[n % 16]}.",
            "summary": f"Summarize this text:\n\n{licence[n % len(licence)]}",
            "edit": f"Repeat this code with `self` renamed to `this`:\n\n{part}",
        }
        if task == "code":
            ids = tokenizer(part)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": asked[task]}], add_generation_prompt=True
            )
            ids = ids["input_ids"] if isinstance(ids, dict) else ids
        made.append(list(ids)[-PROMPT:])
    return made


def beside(
    source: Path,
    drafters: Sequence[str],
    texts: list[list[int]],
    tokens: int,
    temperature: float,
) -> dict[str, tuple[float, float, str]]:
    """Continues texts with each drafter and without, in turns of one step.

    Returns:
        Tokens per second while all requests run, the part of answers that equal the plain ones,
        and the drafter's own account, by drafter.
    """
    room = len(texts) * (PROMPT + tokens + 32)
    options = ModelOptions(dtype="float32", cache_tokens=room)
    engines, made, spent, count = {}, {}, {}, {}
    for name in ("plain", AGAIN, *drafters):
        drafter = make_speculator(name) if name in drafters else None
        runner, _ = open_runner(source, None, options, len(texts))
        sizes = EngineOptions(1024, max(64, len(texts)), share_prefixes=False)
        engine = engines[name] = Engine(runner, None, sizes, drafter=drafter)
        answers = made[name] = {}
        for seed, text in enumerate(texts):
            asked = SamplingParams(tokens, temperature, seed=seed, ignore_eos=True)
            answers[engine.add(text, asked)] = []
        spent[name], count[name] = 0.0, 0
        while not all(answers.values()):
            _step(engine, answers)
    order = list(engines)
    while any(engines[name].busy for name in order):
        order = [*order[1:], order[0]]  # reversed, the first and last would follow themselves
        for name in order:
            engine, answers = engines[name], made[name]
            if engine.busy:
                # A server would give a finished request's place to another one.
                full = all(len(answer) < tokens for answer in answers.values())
                before, begun = sum(map(len, answers.values())), perf_counter()
                _step(engine, answers)
                if full:
                    spent[name] += perf_counter() - begun
                    count[name] += sum(map(len, answers.values())) - before
    plain = list(made["plain"].values())
    found = {}
    for name, engine in engines.items():
        same = statistics.mean(a == b for a, b in zip(made[name].values(), plain, strict=True))
        found[name] = count[name] / spent[name], same, str(engine.drafter)
        engine.runner.close()
    return found


def _step(engine: Engine, answers: dict[int, list[int]]) -> None:
    for event in engine.step():
        answers[event.request] += [token.id for token in event.tokens]


def real(source: Path, drafts: Sequence[str] = DRAFTS) -> Report:
    """Times all combinations of task, temperature and load at 256 tokens, and long answers."""
    columns = (
        *("task", "temperature", "requests", "tokens"),
        *("drafter", "speed", "equal", "its account"),
    )
    report = Report("speculation-real", f"Speculation on {source.name}", columns)
    names = {AGAIN: AGAIN, **{draft: Path(draft).name for draft in drafts}}
    tokenizer = read_tokenizer(source)
    cells = [
        (task, heat, load, 256) for task in TASKS for heat in (0.0, 0.7) for load in (1, 4, 16)
    ]
    cells += [("edit", 0.0, 64, 64), ("code", 0.0, 1, 2048), ("chat", 0.0, 4, 2048)]
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for task, heat, load, tokens in cells:
        found = beside(source, drafts, prompts(tokenizer, task, load), tokens, heat)
        for name, shown in names.items():
            ratio = found[name][0] / found["plain"][0]
            ratios[name in drafts].append(ratio)
            row = (*map(str, (task, heat, load, tokens, shown)), f"{ratio:.2f}")
            row = (*row, f"{found[name][1]:.0%}")
            account = found[name][2].partition(": ")[2]
            report.rows.append((*row, account))
            report.figures[f"{task}, {heat}, {load}, {tokens}, {shown}"] = found[name][:2]
            print(*row, account, flush=True)
    report.bars.append(at_least("slowest cell over plain", min(ratios[True]), 0.97))
    same = ratios[False]
    report.notes.append(
        "float32; engines take turns of one step; speed is tokens/s over plain. Two plain engines "
        f"differ by {min(same) - 1:+.0%} to {max(same) - 1:+.0%}"
    )
    return report
