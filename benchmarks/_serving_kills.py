"""Stages and controllers that are killed under load, and commands that come late.

Clients ask a server of two stages and compare what they get with transformers' answers of one
prompt alone. *Stages*: a rank is killed, again and again, each time once answers have come since
the last; no client may notice anything but the time. *Controllers*: the server itself is killed;
clients must be told (their connections end), ranks must end by themselves, and a server on the same
port must answer rightly. *Delays*: every command to every rank, and every word back, is held for a
random time, so that ranks are out of step; every answer must be its request's.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

Answers = list[tuple[list[int], list[int]]]
CLIENTS = 8
DELAY_S = 0.03
"""Longest delay of a command, and of a word back."""
PATIENCE_S = 900.0
"""Longest wait for anything: this may run beside other work, at low priority."""


@dataclass
class Killed:
    """Counts of kills, and of answers compared.

    Attributes:
        count: kills.
        seconds: of each until requests went on (stages), or until all ranks had ended.
        right: answers that were compared.
        wrong: what should not have been.
    """

    count: int = 0
    seconds: list[float] = field(default_factory=list)
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    told: int = 0
    restarts: int = 0


def start_server(folder: Path, port: int, module: str) -> tuple[subprocess.Popen[str], str]:
    """Starts a server of two stages.

    Args:
        folder: folder of the model.
        port: its port; 0 for any.
        module: `gulliver.cli`, or what stands for it.

    Returns:
        The process, and its address.
    """
    words = ("serve", "--model", str(folder), "--pipeline", "2", "--port", str(port))
    server = subprocess.Popen(
        [sys.executable, "-m", module, *words, "--cache", "16MiB"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r" at (http://\S+)/v1", line):
            return server, found[1]
    raise SystemExit(f"the server did not start: {''.join(said)}")


def ranks_of(pid: int) -> list[int]:
    """Processes that come from a server: its ranks, whoever started them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    found, layer = [], [pid]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        found += layer
    return found


def working_ranks(pid: int) -> list[int]:
    """Finds the processes with threads of gloo, which are no fork server."""
    found = []
    for child in ranks_of(pid):
        try:
            names = [p.read_text() for p in Path(f"/proc/{child}/task").glob("*/comm")]
        except OSError:
            continue
        if any("gloo" in name for name in names):
            found.append(child)
    return sorted(found)


async def _ask(client: Any, url: str, draw: random.Random, answers: Answers, seen: Killed) -> None:
    prompt, answer = draw.choice(answers)
    count = draw.randint(1, len(answer))
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    found = await client.post(f"{url}/v1/completions", json=body)
    if found.status_code != 200 or found.json()["choices"][0]["token_ids"] != answer[:count]:
        seen.wrong.append(f"answer: {found.status_code} {found.text[:200]}")
    else:
        seen.right += 1


def _metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf"^gulliver_{name} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _lost_blocks(url: str) -> float:
    """Blocks that are not free once the server has been idle for a while."""
    end = time.monotonic() + 30
    while True:
        lost = _metric(url, "blocks") - _metric(url, "free_blocks")
        if not lost or time.monotonic() > end:
            return lost
        time.sleep(0.05)


async def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("nothing went on for too long")
        await asyncio.sleep(0.05)


async def _more(seen: Killed) -> None:
    """Waits until all clients have been answered again, or one wrongly."""
    before = seen.right
    await _until(lambda: seen.right > before + CLIENTS or bool(seen.wrong))


async def _load(
    url: str, answers: Answers, seen: Killed, work: Any, told: tuple[type[Exception], ...] = ()
) -> None:
    """Runs clients until `work` has ended; errors that they should see are counted."""
    going = True

    async def one(seed: int) -> None:
        draw = random.Random(seed)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            while going:
                try:
                    await _ask(client, url, draw, answers, seen)
                except told:
                    seen.told += 1
                    return
                except httpx.HTTPError as error:
                    seen.wrong.append(f"{type(error).__name__} {error}")

    clients = [asyncio.create_task(one(seed)) for seed in range(CLIENTS)]
    try:
        await work()
    finally:
        going = False
    await asyncio.gather(*clients)


def kill_stages(folder: Path, answers: Answers, count: int, end: float) -> Killed:
    """Kills ranks of a server that answers.

    Args:
        folder: folder of the model.
        answers: prompts and their right answers.
        count: kills.
        end: no kill comes after this, on the monotonic clock.
    """
    seen, draw = Killed(), random.Random(2)
    server, url = start_server(folder, 0, "benchmarks._serving_forked")

    async def work() -> None:
        while seen.count < count and time.monotonic() < end:
            await _more(seen)
            ranks = await asyncio.to_thread(working_ranks, server.pid)
            if seen.wrong or not ranks:
                seen.wrong += [] if ranks else ["no ranks were found"]
                return
            await asyncio.sleep(draw.random() * 0.2)  # anywhere in a batch
            os.kill(draw.choice(ranks), signal.SIGKILL)
            begun = time.monotonic()
            seen.count += 1
            await _more(seen)
            seen.seconds.append(time.monotonic() - begun)

    try:
        asyncio.run(_load(url, answers, seen, work))
        seen.restarts = int(_metric(url, "restarts_total"))
        if lost := _lost_blocks(url):
            seen.wrong.append(f"{lost:.0f} blocks did not return")
        server.send_signal(signal.SIGTERM)
        if server.wait(PATIENCE_S):
            seen.wrong.append(f"exit code {server.returncode}")
    finally:
        server.kill()
    return seen


def kill_controllers(folder: Path, answers: Answers, count: int, end: float) -> Killed:
    """Kills servers that answer, and starts others on the same port; see `kill_stages`."""
    seen, port = Killed(), _free_port()
    server, url = start_server(folder, port, "benchmarks._serving_forked")

    while seen.count < count and time.monotonic() < end and not seen.wrong:
        victim = server

        async def work(victim: Any = victim) -> None:
            await _more(seen)
            ranks = await asyncio.to_thread(ranks_of, victim.pid)
            if len(await asyncio.to_thread(working_ranks, victim.pid)) != 2:
                seen.wrong.append("not two ranks")
            victim.kill()
            begun = time.monotonic()
            victim.wait()
            seen.count += 1
            await _until(lambda: not any(_lives(rank) for rank in ranks))
            seen.seconds.append(time.monotonic() - begun)

        asyncio.run(_load(url, answers, seen, work, (httpx.TransportError,)))
        server, url = start_server(folder, port, "benchmarks._serving_forked")
    server.send_signal(signal.SIGTERM)
    server.wait(PATIENCE_S)
    return seen


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class _Late:
    """A connection to a rank on which everything takes a random time."""

    def __init__(self, link: Any, seed: int) -> None:
        self._link, self._draw = link, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, value: Any) -> None:
        """Sends a command late."""
        time.sleep(self._draw.random() * DELAY_S)
        self._link.send(value)

    def recv(self) -> Any:
        """Hears a word late."""
        value = self._link.recv()
        time.sleep(self._draw.random() * DELAY_S)
        return value


def delay_commands(folder: Path, answers: Answers) -> Killed:
    """Answers all prompts with commands and words that are late."""
    from gulliver.serve import Engine, EngineOptions, SamplingParameters
    from gulliver.serve.options import ModelOptions
    from gulliver.serve.ranks.controller import Processes, RanksRunner
    from gulliver.serve.ranks.layout import plan_ranks

    seen = Killed()
    ways = ModelOptions(cache_tokens=8192, pipeline=2, timeout_s=PATIENCE_S)
    layout = plan_ranks(folder, None, 1, 2, None)
    processes = Processes(folder, ways, layout, 32, None)
    processes.links = [_Late(link, seed) for seed, link in enumerate(processes.links)]  # type: ignore[misc]
    runner: RanksRunner = processes.runner()
    engine = Engine(runner, options=EngineOptions(64, 32))
    right = {
        engine.add(prompt, SamplingParameters(max_tokens=len(answer), temperature=0)): answer
        for prompt, answer in answers
    }
    made: dict[int, list[int]] = {number: [] for number in right}
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    for number, answer in right.items():
        if made[number] == answer:
            seen.right += 1
        else:
            seen.wrong.append(f"request {number} has other tokens")
    seen.count = engine.counts()["steps"]
    seen.restarts = engine.counts()["restarts"]
    runner.close()
    return seen
