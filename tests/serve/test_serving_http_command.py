"""The command that serves a folder, and a client beside it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from gulliver.serve import LLM, SamplingParams
from tests.patience import patient
from tests.programs import Program, module
from tests.serve.test_serving import small
from tests.texts import tokenizer_of

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small-llama"
    small().save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return path


def ready(url: str) -> None:
    """Waits until a server that has said where it listens takes connections."""
    end = time.monotonic() + patient(30)
    while time.monotonic() < end:
        try:
            httpx.get(f"{url}/models", timeout=5)
            return
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError(f"nothing listens at {url}")


def test_the_command_serves_a_folder_and_drains(folder: Path) -> None:
    words = ("serve", "--model", str(folder), "--port", "0", "--cache", "8MiB", "--context", "96")
    program = Program(module, "gulliver.cli", *words)
    try:
        said = ""
        while "small-llama at http" not in said:
            line = program.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        url = re.findall(r"http://\S+", said)[0]
        ready(url)
        asked = {"prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=asked, timeout=patient(60)).json()
        greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        with LLM(folder, cache_tokens=512) as llm:
            assert answer["choices"][0]["text"] == llm.generate(["the quick"], greedy)[0].text
        assert answer["model"] == "small-llama"
        # A completion is active until its handler returns, which may be after its last byte.
        end = time.monotonic() + patient(30)
        while not re.search(r"_answers 0\b", httpx.get(f"{url[:-3]}/metrics").text):
            assert time.monotonic() < end
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        assert program.wait(patient(30)) == 0
        said = program.stderr.read()
        assert re.search(r"signal: 0 completions .*\b30 seconds", said), said[-300:]
        assert said.endswith("gulliver: the server has ended\n")
    finally:
        program.kill()
