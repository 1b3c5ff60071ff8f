"""Clients that leave, stall, flood or say half; steps that fail; the end of a server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import pytest

from gulliver.errors import GulliverError
from gulliver.serve import SamplingParams
from gulliver.serve.batch import RunnerLost
from tests.patience import patient
from tests.serve.serving_server import address, idle, reference, request, serving, within

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")

ASKED = {"prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
FIRST = {**ASKED, "max_tokens": 100, "stream": True}


def answer_of(text: str = "the quick", count: int = 12) -> str:
    greedy = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    with reference() as llm:
        return llm.generate([text], greedy)[0].text


def ask(server: Any, **more: Any) -> Any:
    return httpx.post(f"{server.url}/completions", json={**ASKED, **more}, timeout=patient(60))


async def leave(server: Any, seed: int) -> None:
    """Asks for something and leaves, in one of the ways in which clients do, at any moment."""
    draw = random.Random(seed)
    reader, writer = await asyncio.open_connection(*address(server))
    text = "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 40)))
    body = {"prompt": text, "max_tokens": draw.randint(20, 60), "ignore_eos": True}
    body |= {"stream": draw.random() < 0.6, "n": draw.randint(1, 3), "seed": seed}
    sent = request(body)
    if draw.random() < 0.15:
        sent = sent[: draw.randint(1, len(sent) - 1)]
    writer.write(sent)
    # A number of bytes, or of turns of the loop: any moment, and no wait for luck.
    for _ in range(draw.randint(0, 60)):
        await asyncio.sleep(0)
    if body["stream"] and draw.random() < 0.5 and len(sent) == len(request(body)):
        await within(reader.read(draw.randint(1, 2000)))
    match draw.choice(("close", "half", "reset")):
        case "half":
            with suppress(OSError):  # the server may have closed it meanwhile
                writer.write_eof()
                await within(reader.read())
        case "reset":
            found = writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def test_clients_that_leave_give_everything_back(full: bool) -> None:
    wanted = answer_of()
    with serving(cache_tokens=512, queue=1000, connections=300) as (server, steered, _):

        async def leave_all(start: int) -> str:
            others = [leave(server, start + seed) for seed in range(200)]
            stays = asyncio.to_thread(lambda: ask(server).json()["choices"][0]["text"])
            found, *_ = await within(asyncio.gather(stays, *others), 120)
            return found

        for start in range(0, 10_000 if full else 400, 200):
            assert asyncio.run(leave_all(start)) == wanted
            counts = idle(server)
            assert counts["free_blocks"] == counts["blocks"] == 32
            assert counts["failures"] == 0
        # One that is left in the middle of a step makes no more tokens, stream or not.
        for stream in (True, False):
            with steered.held():
                before = server.counts()["tokens"]
                left = socket.create_connection(address(server))
                left.sendall(request({**FIRST, "stream": stream}))
                assert steered.reached.wait(patient(30))
                left.close()
                while server.counts()["answers"]:
                    pass
            counts = idle(server)
            assert counts["free_blocks"] == 32
            assert counts["tokens"] <= before + 1
        assert ask(server).json()["choices"][0]["text"] == wanted


def test_excess_requests_get_429() -> None:
    with serving(sequences=2, queue=1) as (server, steered, _):
        done: list[Any] = []
        with steered.held():
            threads = [threading.Thread(target=lambda: done.append(ask(server))) for _ in range(3)]
            for thread in threads:
                thread.start()
            while server.counts()["answers"] < 3:
                pass
            late = ask(server)
            assert late.status_code == 429
            assert 1 <= int(late.headers["retry-after"]) <= 60
            assert late.json()["error"]["code"] == "overloaded"
            assert httpx.get(f"{server.url}/models").status_code == 200
        for thread in threads:
            thread.join(patient(60))
        assert [answer.status_code for answer in done] == [200] * 3
        assert ask(server, n=2).status_code == 200
        assert ask(server, n=3).json()["error"]["param"] == "n"


def test_requests_of_connections_beyond_the_limit_are_refused() -> None:
    with serving(connections=4, header_seconds=60) as (server, _, _):
        opened = [socket.create_connection(address(server)) for _ in range(4)]
        for client in opened:  # they are let in, and answered
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert ask(server).status_code == 503
        for client in opened:
            client.close()
        while ask(server).status_code == 503:
            pass
        assert ask(server).status_code == 200


def read_all(sent: bytes, server: Any) -> bytes:
    """What a server says to bytes until it closes."""
    with socket.create_connection(address(server), timeout=patient(30)) as client:
        client.sendall(sent)
        said = b""
        while part := client.recv(65536):
            said += part
        return said


def test_slow_request_bodies_time_out() -> None:
    limits = {"header_seconds": 0.3, "body_seconds": 0.3, "idle_seconds": 1}
    with serving(**limits) as (server, _, _):
        whole = request(ASKED)
        assert read_all(b"", server) == b""
        assert read_all(b"POST /v1/comple", server) == b""
        assert b" 408 " in read_all(whole[:-5], server)
        assert b'"code":"too_slow"' in read_all(whole[:-5], server)
        # A whole request, and half of another behind it.
        said = read_all(whole + whole[:20], server)
        assert said.startswith(b"HTTP/1.1 200")
        assert said.count(b"HTTP/1.1") == 1
        assert read_all(b"\x16\x03\x01 no HTTP\r\n\r\n", server).startswith(b"HTTP/1.1 400")
        assert ask(server).status_code == 200


def test_bodies_that_are_malformed_are_refused_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    json_, text = (b"content-type: " + kind + b"\r\n\r\n" for kind in (b"application/json", b"a/b"))
    with serving(body_seconds=0.3) as (server, _, _):
        for sent in (
            head + json_ + b"ZZZ\r\nno chunk\r\n",
            head + json_ + b"5\r\n{    \r\nno size\r\n",
            head + text + b"ZZZ\r\n",
        ):
            said = read_all(sent, server)
            assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert said.count(b"connection: close") == 1
        # An answer has gone out already, as the garbage comes.
        with socket.create_connection(address(server), timeout=patient(30)) as client:
            client.sendall(head + text)
            said = client.recv(65536)
            client.sendall(b"ZZZ\r\nno chunk\r\n")
            said += b"".join(iter(lambda: client.recv(65536), b""))
            assert said.startswith(b"HTTP/1.1 415")
            assert b" 400 " not in said
        assert ask(server).status_code == 200
        idle(server)
    assert not [
        record for record in caplog.records if record.exc_info or record.levelname == "ERROR"
    ]


def drained(client: socket.socket) -> bytes:
    """What the kernel had taken on for a client that was let go, up to the end of one kind."""
    said = b""
    try:
        while part := client.recv(65536):
            said += part
    except ConnectionResetError:
        pass
    return said


def test_stalled_client_is_disconnected() -> None:
    wanted = answer_of()
    with serving(stall_seconds=0.3, cache_tokens=4096) as (server, _, _):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(address(server))
        slow.sendall(request({**FIRST, "n": 16, "logprobs": 20, "max_tokens": 115}))
        assert ask(server).json()["choices"][0]["text"] == wanted
        counts = idle(server)
        assert counts["free_blocks"] == counts["blocks"]
        slow.settimeout(patient(30))
        said = drained(slow)
        assert said.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in said
        slow.close()


def test_logits_that_are_not_finite_end_one_request() -> None:
    wanted = answer_of()
    with serving() as (server, steered, _):
        steered.broken = 77
        broken = ask(server, prompt=[5, 6, 77])
        assert (broken.status_code, broken.json()["error"]["code"]) == (500, "engine_error")
        assert "logits are not finite" in broken.json()["error"]["message"]
        said = ask(server, prompt=[[5, 6], [77]], stream=True).text
        assert "logits are not finite" in said
        assert "[DONE]" not in said
        assert ask(server).json()["choices"][0]["text"] == wanted
        counts = idle(server)
        assert counts["free_blocks"] == counts["blocks"]
        assert counts["failures"] == 0


def test_failed_step_is_reported_and_engine_continues() -> None:
    wanted = answer_of()
    with serving() as (server, steered, _):
        steered.fails = RuntimeError("the device is gone")
        failed = ask(server)
        assert failed.status_code == 500
        assert "RuntimeError: the device is gone" in failed.json()["error"]["message"]
        assert ask(server).json()["choices"][0]["text"] == wanted
        assert server.counts()["failures"] == 1
        assert httpx.get(f"{server.url[:-3]}/health").status_code == 200


def test_an_engine_that_cannot_go_on_ends_the_server() -> None:
    with serving() as (server, steered, _):
        steered.fails = GulliverError("no stage is left")
        failed = ask(server)
        assert failed.status_code == 503
        assert "no stage is left" in failed.json()["error"]["message"]
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url[:-3]}/health")
    assert server.dead == "the engine stopped: no stage is left"


def test_a_runner_that_is_lost_is_started_again_and_no_client_notices() -> None:
    wanted = answer_of()
    with serving() as (server, steered, _):
        steered.restarted = lambda: steered
        steered.fails = RunnerLost("rank 1 was ended by SIGKILL")
        assert ask(server).json()["choices"][0]["text"] == wanted
        page = httpx.get(f"{server.url[:-3]}/metrics").text
        assert "gulliver_restarts_total 1.0" in page
        assert "gulliver_drafted_tokens_total 0.0" in page
        assert "gulliver_accepted_tokens_total 0.0" in page
        assert server.dead is None


def test_shutdown_drains_running_and_rejects_new_requests() -> None:
    wanted = answer_of()
    done: list[Any] = []
    with serving() as (server, steered, _), httpx.Client() as known:
        root = server.url.removesuffix("/v1")
        assert known.get(f"{root}/health").status_code == 200
        with steered.held():
            runs = threading.Thread(target=lambda: done.append(ask(server)))
            runs.start()
            assert steered.reached.wait(patient(30))
            server.drain()
            while known.get(f"{root}/health").status_code == 200:
                pass
            late = ask(server)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            assert "retry-after" in late.headers
        runs.join(patient(30))
    assert done[0].json()["choices"][0]["text"] == wanted


def test_requests_over_drain_time_are_ended() -> None:
    parts: list[str] = []
    with serving(drain_seconds=0) as (server, steered, _):

        def listen() -> None:
            with httpx.stream(
                "POST", f"{server.url}/completions", json=FIRST, timeout=patient(30)
            ) as answer:
                parts.extend(answer.iter_lines())

        listener = threading.Thread(target=listen)
        with steered.held():
            listener.start()
            assert steered.reached.wait(patient(30))
            server.drain()
            while not server._gate.draining:
                pass
        listener.join(patient(30))
    last = json.loads([line for line in parts if line][-1].removeprefix("data: "))
    assert last["error"]["code"] == "draining"
    assert "data: [DONE]" not in parts
