"""The server under clients that behave badly and under kills: answers right, memory flat?

A server in a process of its own answers 24 clients that each do the next thing at random: ask and
wait, read a stream, leave in the middle, send what is no request, connect and say nothing. Greedy
answers are compared with transformers' of one prompt alone. The memory of the server's process is
read once a second: what it has in the last third of the time is compared with the second third.
Before that, ranks and servers are killed and commands delayed (`_serving_kills.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._serving_kills import (
    DELAY_S,
    PATIENCE_S,
    Killed,
    delay_commands,
    kill_controllers,
    kill_stages,
)

CLIENTS = 24
PROMPTS, LONGEST = 48, 48
"""Prompts with known answers, and tokens of the longest."""
FLAT_MIB = 4.0
"""Growth that counts as flat: what allocators keep more or less of."""
WRONG = (
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "max_tokens": 0}',
    b'{"prompt": "x", "temprature": 1}',
    b'{"prompt": ' + b"[" * 3000,
    b'{"prompt": "x", "logit_bias": {"1": 1}}',
    b'{"prompt": ' + json.dumps([5] * 600).encode() + b"}",
    b"x" * 200_000,
)


@dataclass
class Seen:
    """Counts of what the clients have seen.

    Attributes:
        done: numbers of what was done.
        wrong: what should not have been.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kills:
    """How much is killed.

    Attributes:
        stages: kills of ranks.
        controllers: kills of servers.
        seconds: no kill of either kind comes later than this after the first.
    """

    stages: int = 40
    controllers: int = 10
    seconds: float = 900


def soak(seconds: float, kills: Kills, keep: bool) -> None:
    """Kills, then runs the clients for so long; a report for each that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "soaked"
        answers = _make(path)
        if kills.stages + kills.controllers:
            finish(_killed(path, answers, kills), keep)
        if seconds:
            finish(_soaked(path, answers, seconds), keep)


def _soaked(path: Path, answers: list[tuple[list[int], list[int]]], seconds: float) -> Report:
    words = ("serve", "--model", str(path), "--port", "0", "--stall-seconds", "2")
    server = subprocess.Popen(
        [sys.executable, "-m", "gulliver.cli", *words, "--body-seconds", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = _url(server)
        seen, memory = asyncio.run(_run(url, server.pid, answers, seconds))
        counts = _counts(url)
        server.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        code = server.wait(60)
        ended = time.monotonic() - begin
    finally:
        server.kill()
    return _reported(seen, memory, counts, code, ended)


def _make(path: Path) -> list[tuple[list[int], list[int]]]:
    """Writes a model and its tokenizer; returns prompts and transformers' answers to them."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers.logging.set_verbosity_error()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Logits far apart: rounding changes no token.
        initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=text).save_pretrained(path)
    draw = random.Random(0)
    made = []
    for _ in range(PROMPTS):
        prompt = [draw.randrange(len(letters)) for _ in range(draw.randint(1, 64))]
        found = model.generate(
            torch.tensor([prompt]),
            # Else tokens that are the padding's number would be taken for padding.
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=LONGEST,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        made.append((prompt, found[0, len(prompt) :].tolist()))
    return made


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r" at (http://\S+)/v1", line):
            return found[1]
    raise SystemExit("the server did not start")


async def _run(
    url: str, pid: int, answers: list[tuple[list[int], list[int]]], seconds: float
) -> tuple[Seen, list[float]]:
    seen, memory, end = Seen(), [], time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:

        async def one(seed: int) -> None:
            draw = random.Random(seed)
            acts = {_whole: 40, _stream: 20, _leave: 25, _wrong: 10, _silent: 5}
            while time.monotonic() < end:
                (act,) = draw.choices(list(acts), list(acts.values()))
                seen.done[act.__name__[1:]] += 1
                try:
                    await act(client, url, draw, answers, seen)
                except (httpx.HTTPError, OSError) as error:
                    seen.wrong.append(f"{act.__name__[1:]}: {type(error).__name__} {error}")

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(_mib(pid))
                await asyncio.sleep(1)

        await asyncio.gather(watch(), *(one(seed) for seed in range(CLIENTS)))
    return seen, memory


def _asked(draw: random.Random, answers: Any) -> tuple[dict[str, Any], list[int]]:
    prompt, answer = draw.choice(answers)
    count = draw.randint(1, LONGEST)
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    return body, answer[:count]


async def _whole(client: Any, url: str, draw: random.Random, answers: Any, seen: Seen) -> None:
    body, answer = _asked(draw, answers)
    found = await client.post(f"{url}/v1/completions", json=body)
    if found.status_code != 200 or found.json()["choices"][0]["token_ids"] != answer:
        seen.wrong.append(f"answer: {found.status_code} {found.text[:200]}")


async def _stream(client: Any, url: str, draw: random.Random, answers: Any, seen: Seen) -> None:
    body, answer = _asked(draw, answers)
    made: list[int] = []
    body["stream"] = True
    async with client.stream("POST", f"{url}/v1/completions", json=body) as found:
        async for line in found.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    seen.wrong.append(f"stream: {line[:200]}")
                    return
                made += piece["choices"][0]["token_ids"]
    if made != answer:
        seen.wrong.append("stream: other tokens")


async def _leave(client: Any, url: str, draw: random.Random, answers: Any, seen: Seen) -> None:
    del client, seen
    body, _ = _asked(draw, answers)
    body |= {"stream": draw.random() < 0.6, "n": draw.randint(1, 4), "max_tokens": 300}
    made = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(made)}\r\n\r\n"
    )
    sent = head.encode() + made
    writer.write(sent[: draw.randint(1, len(sent))] if draw.random() < 0.2 else sent)
    await asyncio.sleep(draw.random() * 0.1)
    writer.close()


async def _wrong(client: Any, url: str, draw: random.Random, answers: Any, seen: Seen) -> None:
    del answers
    head = {"content-type": "application/json"}
    body = draw.choice(WRONG)
    found = await client.post(f"{url}/v1/completions", content=body, headers=head)
    named = found.status_code in (400, 413) and found.json()["error"]["message"]
    if not named:
        seen.wrong.append(f"refusal: {found.status_code} {found.text[:200]}")


async def _silent(client: Any, url: str, draw: random.Random, answers: Any, seen: Seen) -> None:
    """Connects, says nothing for a while and is gone."""
    del client, answers, seen
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await asyncio.sleep(draw.random() * 0.5)
    writer.close()


def _counts(url: str) -> dict[str, float]:
    """The server's own numbers, once it is idle."""
    end = time.monotonic() + 30
    while True:
        page = httpx.get(f"{url}/metrics").text
        found = dict(re.findall(r"^gulliver_(\w+) (\S+)$", page, re.MULTILINE))
        counts = {name: float(value) for name, value in found.items()}
        if counts["answers"] + counts["running"] + counts["waiting"] == 0 or time.monotonic() > end:
            return counts
        time.sleep(0.05)


def _mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s*(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def _reported(
    seen: Seen, memory: list[float], counts: dict[str, float], code: int, ended: float
) -> Report:
    third = len(memory) // 3
    middle, last = statistics.median(memory[third:-third]), statistics.median(memory[-third:])
    lost = counts["blocks"] - counts["free_blocks"]
    report = Report("serving-faults", "Serving: clients that behave badly", ("what", "count"))
    report.rows += [(name, str(count)) for name, count in sorted(seen.done.items())]
    report.rows += [
        ("clients that the server saw leave", f"{counts['clients_left_total']:.0f}"),
        ("tokens", f"{counts['tokens_total']:.0f}"),
        ("MiB after a third of the time", f"{memory[third]:.1f}"),
        ("MiB in the second third", f"{middle:.1f}"),
        ("MiB in the last third", f"{last:.1f}"),
    ]
    report.figures |= {
        "done": dict(seen.done),
        "seconds": len(memory),
        "mib": [round(one, 1) for one in memory],
        "wrong": seen.wrong[:20],
        "drain_seconds": ended,
    }
    right = seen.done["whole"] + seen.done["stream"]
    report.bars += [
        at_least("answers that were checked", right, 100),
        at_least("clients that left", seen.done["leave"], 200),
        at_most("answers or errors that were not right", len(seen.wrong), 0),
        at_most("blocks of the cache that did not return", lost, 0),
        at_most("steps of the engine that failed", counts["failures_total"], 0),
        at_most(
            "MiB that the memory grew from the second third to the last", last - middle, FLAT_MIB
        ),
        at_most("exit code after SIGTERM", abs(code), 0),
    ]
    report.notes.append(
        f"{CLIENTS} clients for {len(memory)} s, each with the next thing as soon as it can: as "
        f"many requests as an hour has at {seen.done.total() / 3600:.1f} a second; "
        f"ended {ended:.1f} s after SIGTERM"
    )
    return report


def _killed(path: Path, answers: list[tuple[list[int], list[int]]], kills: Kills) -> Report:
    """Kills what is asked for, delays commands, and reports."""
    report = Report("serving-kills", "Serving: kills and late commands", ("what", "count"))
    killed: dict[str, Killed] = {}
    for name, kill, count in (
        ("stages", kill_stages, kills.stages),
        ("controllers", kill_controllers, kills.controllers),
    ):
        killed[name] = kill(path, answers, count, time.monotonic() + kills.seconds)
        print(name, killed[name], file=sys.stderr, flush=True)
    killed["commands"] = delay_commands(path, answers)
    for name, one in killed.items():
        what = "late commands" if name == "commands" else f"kills of {name}"
        report.rows.append((what, str(one.count)))
        report.rows.append((f"{what}: answers compared", str(one.right)))
        if one.seconds:
            last = "to the next answers" if name == "stages" else "until all ranks had ended"
            said = f"{statistics.median(one.seconds):.2f}, at most {max(one.seconds):.2f}"
            report.rows.append((f"{what}: seconds {last}", said))
        report.figures[name] = asdict(one)
        report.bars.append(at_most(f"{what}: what was not right", len(one.wrong), 0))
    count = killed["stages"].count + killed["controllers"].count
    report.bars.append(at_least("kills of stages and of the controller", count, 50))
    report.notes += [
        "stages: a rank of two is killed by SIGKILL at any time, and no client may notice; "
        f"{killed['stages'].restarts} restarts",
        f"controllers: the server is killed; {killed['controllers'].told} clients were told by the "
        "end of their connection, and another server answered on the same port",
        f"commands: each to every rank, and every word back, up to {DELAY_S * 1e3:.0f} ms late",
        "ranks are forked from a process that has torch; Pythons of their own would mostly import",
    ]
    return report
