"""Drafts on a real model, by task, temperature, load and length, beside plain steps."""

from __future__ import annotations

import inspect
import math
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
from gulliver.serve.speculative.speculator import Speculator

DRAFTS = ("ngram", "suffix")
TASKS = ("code", "chat", "summary", "edit")
PROMPT = 320  # tokens at most
AGAIN = "plain again"  # no drafter either: what two equal engines differ by
LEAST = 0.97  # bar of each cell
FEWEST = 20  # steps without drafts whose median is an engine's own plain step
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
) -> dict[str, tuple[float, float, float, str]]:
    """Continues texts with each drafter and without, in turns of one step.

    Returns:
        Tokens per second while all requests run, their seconds over those of as many plain steps
        of the same engine, the part of answers that equal the plain ones, and the drafter's own
        account, by drafter. Plain steps of equal engines differ by up to 6 %, depending on where
        their memory lies, so the cost of a drafter shows only within its own engine.
    """
    room = len(texts) * (PROMPT + tokens + 32)
    options = ModelOptions(dtype="float32", cache_tokens=room)
    engines, made, spent, count = {}, {}, {}, {}
    calm: dict[str, list[float]] = {}  # seconds of steps without drafts
    for name in ("plain", AGAIN, *drafters):
        drafter = make_speculator(name) if name in drafters else None
        runner, _ = open_runner(source, None, options, len(texts))
        sizes = EngineOptions(1024, max(64, len(texts)), share_prefixes=False)
        engine = engines[name] = Engine(runner, None, sizes, drafter=drafter)
        answers = made[name] = {}
        for seed, text in enumerate(texts):
            asked = SamplingParams(tokens, temperature, seed=seed, ignore_eos=True)
            answers[engine.add(text, asked)] = []
        spent[name], count[name], calm[name] = 0.0, 0, []
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
                before, guessed = sum(map(len, answers.values())), _guesses(engine)
                begun = perf_counter()
                _step(engine, answers)
                took = perf_counter() - begun
                if full:
                    spent[name] += took
                    count[name] += sum(map(len, answers.values())) - before
                    calm[name] += [took] if _guesses(engine) == guessed else []
    plain = list(made["plain"].values())
    found = {}
    for name, engine in engines.items():
        same = statistics.mean(a == b for a, b in zip(made[name].values(), plain, strict=True))
        plain_s = statistics.median(calm[name]) if len(calm[name]) >= FEWEST else math.nan
        own = spent[name] / (count[name] / len(texts) * plain_s)
        found[name] = count[name] / spent[name], own, same, str(engine.drafter)
        engine.runner.close()
    return found


def _ratios(found: dict[str, tuple[float, float, float, str]], name: str) -> tuple[float, float]:
    """Speed over the plain engine's, and the same with each over its own plain steps."""
    ratio, guard = found[name][0] / found["plain"][0], found["plain"][1] / found[name][1]
    return ratio, ratio if math.isnan(guard) else guard  # it hardly ever steps without drafts


def _step(engine: Engine, answers: dict[int, list[int]]) -> None:
    for event in engine.step():
        answers[event.request] += [token.id for token in event.tokens]


def _guesses(engine: Engine) -> int:
    return engine.drafter.stats.guesses if isinstance(engine.drafter, Speculator) else 0


def real(source: Path, drafts: Sequence[str] = DRAFTS) -> Report:
    """Times all combinations of task, temperature and load at 256 tokens, and long answers."""
    columns = (
        *("task", "temperature", "requests", "tokens"),
        *("drafter", "speed", "guard", "equal", "runs", "its account"),
    )
    report = Report("speculation-real", f"Speculation on {source.name}", columns)
    names = {AGAIN: AGAIN, **{draft: Path(draft).name for draft in drafts}}
    tokenizer = read_tokenizer(source)
    cells = [
        (task, heat, load, 256) for task in TASKS for heat in (0.0, 0.7) for load in (1, 4, 16)
    ]
    cells += [("edit", 0.0, 64, 64), ("code", 0.0, 1, 2048), ("chat", 0.0, 4, 2048)]
    ratios: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for task, heat, load, tokens in cells:
        texts = prompts(tokenizer, task, load)
        runs = [beside(source, drafts, texts, tokens, heat)]
        if min(_ratios(runs[0], draft)[1] for draft in drafts) < LEAST:
            runs += [beside(source, drafts, texts, tokens, heat) for _ in range(2)]
        for name, shown in names.items():
            found = sorted(runs, key=lambda run: _ratios(run, name)[1])[len(runs) // 2]
            ratio, guard = _ratios(found, name)
            ratios[name in drafts].append((ratio, guard))
            row = (*map(str, (task, heat, load, tokens, shown)), f"{ratio:.2f}", f"{guard:.2f}")
            row = (*row, f"{found[name][2]:.0%}", str(len(runs)))
            account = found[name][3].partition(": ")[2]
            report.rows.append((*row, account))
            report.figures[f"{task}, {heat}, {load}, {tokens}, {shown}"] = found[name][:3]
            print(*row, account, flush=True)
    bars = zip(("speed", "guard"), map(min, zip(*ratios[True], strict=True)), strict=True)
    report.bars += [at_least(f"slowest cell, {name}", value, LEAST) for name, value in bars]
    same = [f"{min(s) - 1:+.0%} to {max(s) - 1:+.0%}" for s in zip(*ratios[False], strict=True)]
    report.notes.append(
        "float32; engines take turns of one step; speed is tokens/s over plain, guard the same "
        "with both over their engine's own steps without drafts; of three runs, the median, where "
        f"a drafter's guard was below {LEAST} in the first. Two plain engines differ by "
        f"{same[0]} in speed and by {same[1]} in guard"
    )
    return report
