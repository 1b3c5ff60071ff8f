"""Models named as on the Hub, against a server on this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from gulliver import GulliverError
from gulliver.cli.dispatch import run
from gulliver.io.hub import check_push, fetch, is_hub_name, push

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
SHA = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one repository, ``org/tiny``."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer(self._content())

    do_HEAD = do_GET

    def _content(self) -> bytes | None:
        """The answer to a request; None where there is nothing."""
        parts = self.path.partition("?")[0].split("/")
        if parts[1:5] == ["api", "models", "org", "tiny"]:
            entries = [{"rfilename": n, "path": n, "type": "file"} for n in self.files]
            if "tree" in parts:
                rows = [{**e, "size": len(self.files[e["path"]]), "oid": SHA} for e in entries]
                return json.dumps(rows).encode()
            facts = {"id": "org/tiny", "sha": SHA, "siblings": entries}
            return json.dumps(facts).encode()
        name = "/".join(parts[5:])
        if parts[1:4] == ["org", "tiny", "resolve"] and name in self.files:
            return self.files[name]
        return None

    def _answer(self, content: bytes | None) -> None:
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        else:
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files that the Hub has under ``org/tiny``."""
    Hub.files = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Hub.files
        server.shutdown()


def test_hub_names_are_distinguished_from_paths(tmp_path: Path) -> None:
    assert is_hub_name("org/name")
    assert is_hub_name("org/name.v2@main")
    assert not any(map(is_hub_name, ("name", "/org/name", "./org/name", "org/name/part", "a:b/c")))
    assert not is_hub_name(tmp_path)
    assert fetch(tmp_path) == tmp_path


def test_mistyped_path_is_not_fetched_from_hub(
    served: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", None)
    (tmp_path / "runs").mkdir()
    with pytest.raises(GulliverError, match=r"runs/mine.*path.*Hub"):
        fetch(Path("runs/mine"))


def test_offline_mode_uses_only_cache(
    served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    served["config.json"] = b"{}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GulliverError, match=r"org/tiny is no folder.*Hub"):
        fetch(Path("org/tiny"))


def test_a_model_is_fetched_without_its_pickles(served: dict[str, bytes]) -> None:
    served |= {"config.json": b"{}", "model.safetensors": b"x", "pytorch_model.bin": b"y"}
    folder = fetch(Path("org/tiny"))
    found = {path.name for path in folder.iterdir()}
    assert found == {"config.json", "model.safetensors"}
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_repository_that_is_missing_is_one_line(served: dict[str, bytes]) -> None:
    with pytest.raises(GulliverError, match="org/other"):
        fetch(Path("org/other"))


def test_a_model_of_the_hub_is_fine_tuned_quantised_and_pushed(
    served: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gulliver.finetune import FinetuneConfig, finetune, make_example

    make_example(tmp_path / "example")
    folder = tmp_path / "example" / "model"
    served |= {path.name: path.read_bytes() for path in folder.iterdir()}
    pushed: list[tuple[str, set[str]]] = []

    def upload(repo_id: str, folder_path: str) -> str:
        pushed.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))
        return f"address/{repo_id}"

    made = SimpleNamespace(create_repo=lambda *_, **__: None, upload_folder=upload)
    monkeypatch.setattr(hub, "HfApi", lambda: made)
    data = tmp_path / "example" / "capitals.jsonl"
    finetune(
        FinetuneConfig(
            data=(data,),
            model=Path("org/tiny"),
            out=tmp_path / "run",
            steps=1,
            batch_tokens=512,
            samples=0,
            report_to=(),
            push_to_hub="me/tuned",
        )
    )
    out = str(tmp_path / "int8")
    assert run(["quantize", "org/tiny", "--out", out, "--push-to-hub", "me/int8"]) == 0
    assert [name for name, _ in pushed] == ["me/tuned", "me/int8"]
    for _, files in pushed:
        assert "config.json" in files
        assert any(name.endswith(".safetensors") for name in files)


def test_failed_push_names_written_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("401 Unauthorized")

    monkeypatch.setattr(hub, "HfApi", lambda: SimpleNamespace(create_repo=refuse))
    with pytest.raises(GulliverError, match="401"):
        push(tmp_path, "me/model")
    with pytest.raises(GulliverError, match="--push-to-hub"):
        check_push("no-owner")
