"""The generator of load and the command: against this server, and against one that is broken."""

from __future__ import annotations

import http.server
import json
import math
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gulliver.cli.dispatch import run
from gulliver.errors import GulliverError
from gulliver.serve import LLM, SamplingParams
from tests.patience import patient
from tests.programs import Program, module
from tests.serve.serving_server import idle, serving
from tests.serve.test_serving import small
from tests.texts import tokenizer_of

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")

from gulliver.serve.http import Load, Measured, RequestTiming, generate_load  # noqa: E402
from gulliver.serve.http.load import arrivals  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small-llama"
    small().save_pretrained(path)
    tokenizer_of().save_pretrained(path)
    return path


def test_figures_are_those_of_the_times() -> None:
    good = RequestTiming(1.0, 1.25, [2.0, 2.5, 4.0], 4.5, 7, 30)
    lost = RequestTiming(2.0, 2.0, [3.0], 5.25, error="ReadError")
    known = Measured([good, lost], math.inf, 0).json
    assert known["errors"] == {"ReadError": 1}
    assert (known["requests"], known["answered"], known["seconds"]) == (2, 1, 4.0)
    assert known["tokens_per_second"] == 30 / 4
    assert known["first_token_seconds"]["p50"] == 0.75
    assert known["between_tokens_seconds"] == {
        **{"count": 2, "p50": 0.5, "p90": 1.5, "p99": 1.5, "most": 1.5}
    }
    assert known["request_seconds"]["most"] == 3.25
    assert known["sent_late_seconds"]["most"] == 0.25


def test_a_load_drives_the_server_and_counts_what_it_counts() -> None:
    with serving() as (server, _, _):
        for endpoint in ("completions", "chat"):
            seen: list[Any] = []
            before = server.counts()
            load = Load(
                server.url.removesuffix("/v1"),
                requests=20,
                rate=400.0,
                prompt_words=(2, 6),
                max_tokens=(3, 9),
                endpoint=endpoint,
                ignore_eos=True,
                seed=5,
            )
            measured = generate_load(load, seen.append)
            known, after = measured.json, idle(server)
            assert (known["answered"], known["errors"], len(seen)) == (20, {}, 20)
            assert known["answer_tokens"] == sum(a.max_tokens for a in arrivals(load))
            assert known["answer_tokens"] == after["tokens"] - before["tokens"]
            assert known["prompt_tokens"] == after["prompt_tokens"] - before["prompt_tokens"]
            assert known["first_token_seconds"]["count"] == 20
            assert 0 < known["first_token_seconds"]["p50"] <= known["request_seconds"]["most"]
        # Refused ones are counted by what the server says.
        load = Load(server.url, requests=3, prompt_words=(500, 500), seed=5)
        known = generate_load(load).json
        assert known["answered"] == 0
        assert sum(known["errors"].values()) == 3
        assert all("use at most 127" in said for said in known["errors"])


@contextmanager
def broken_server() -> Iterator[str]:
    """Answers every third request with an error, a stream that ends early, or no JSON."""
    count = iter(range(1000))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            number = next(count) % 3
            self.send_response(500 if number == 0 else 200)
            self.end_headers()
            piece = b'data: {"choices": [{"text": "x"}]}\n\n'
            said = [b'{"error": {"message": "no luck"}}', piece, b"data: {\n\n"][number]
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_load_errors_are_counted_by_kind() -> None:
    with broken_server() as url:
        known = generate_load(Load(url, model="x", requests=9, connections=1)).json
        assert known["errors"] == {
            "500 no luck": 3,
            "a stream that ended early": 3,
            "a response that does not follow the OpenAI API": 3,
        }
        with pytest.raises(GulliverError, match="/v1/models answers 501"):
            generate_load(Load(url))
    with pytest.raises(GulliverError, match="/v1/models does not answer"):
        generate_load(Load(url))
    for more in ({"url": "localhost"}, {"rate": 0.0}, {"max_tokens": (5, 4)}, {"requests": 0}):
        with pytest.raises(GulliverError):
            Load(**{"url": "http://x", **more})


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


def test_the_command_serves_a_folder_and_drains(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        out = tmp_path / "load.json"
        bench = ["serve", "bench", "--url", url, "--requests", "6", "--prompt-words", "2", "6"]
        assert run([*bench, "--max-tokens", "3", "5", "--json", "--out", str(out)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == json.loads(out.read_text())
        assert (printed["answered"], printed["rate_asked"]) == (6, None)
        assert run([*bench[:-2], "400", "400", "--rate", "50"]) == 1
        assert "x 400 the prompt has" in capsys.readouterr().out
        program.send_signal(signal.SIGTERM)
        assert program.wait(patient(30)) == 0
        said = program.stderr.read()
        assert "signal: 0 completions are active and have 30 seconds" in said
        assert said.endswith("gulliver: the server has ended\n")
    finally:
        program.kill()
