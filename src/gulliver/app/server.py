"""Serves the page: finds the run, starts the service, and stops both."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.app.gallery import Gallery
from gulliver.app.service import Service
from gulliver.app.worker import Settings, Source
from gulliver.errors import GulliverError, missing_extra
from gulliver.jobs.display import console
from gulliver.video.config import SamplingConfig
from gulliver.video.pipeline import VideoPipeline
from gulliver.video.run import Run

RUNS = (Path("out/demo/run"), Path("runs/video"))
"""Default folders in which to look for a run: those of `demo` and `train`."""
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"


# [Note: without network] The page may show confidential data, and training machines often have no
# internet access. gradio's telemetry and update check are disabled, share links are never created,
# and a content security policy stops browsers from loading anything from other hosts.
def find_run(named: Path | None) -> Path:
    places = RUNS if named is None else (named, named / "run")
    for place in places:
        if Run(place).config_path.is_file():
            return place
    looked = " and ".join(str(place) for place in places)
    raise GulliverError(
        f"no training run in {looked} (no config.json); start one with `gulliver demo` or "
        "`gulliver train --out FOLDER`, or pass its folder to `gulliver app`"
    )


def first_settings(source: Source) -> tuple[Settings, list[str]]:
    """Returns the initial settings and the available shapes."""
    if source.run is not None:
        shapes = _shapes_of(source.run)
        frames, height, width = (int(n) for n in (shapes or ["13x32x32"])[0].split("x"))
        own = SamplingConfig()
        prompt = (
            "the digit 3 moving left" if Run(source.run).read_config().data.table is None else ""
        )
    else:
        paths = source.model, source.autoencoder, source.text_encoder, source.clip
        for name, path in (("--autoencoder", paths[1]), ("--text-encoder", paths[2])):
            if path is None:
                raise GulliverError(
                    f"--model {source.model} needs {name}; pass the one that it was trained with"
                )
        # Only headers are read.
        own = VideoPipeline.load(*paths).sampling  # type: ignore[arg-type]
        shapes, (frames, height, width), prompt = [], (17, 256, 256), ""
    guidance, steps = own.guidance, own.steps
    return Settings(prompt, "", frames, height, width, steps, guidance), shapes


@dataclass(frozen=True)
class Page:
    """A page being served.

    Attributes:
        url: address of the page.
        service: service behind it.
    """

    url: str
    service: Service
    _blocks: Any
    _copies: Path

    def close(self) -> None:
        self.service.close()
        self._blocks.close(verbose=False)
        shutil.rmtree(self._copies, ignore_errors=True)


def _shapes_of(folder: Path) -> list[str]:
    data = Run(folder).read_config().data
    if data.buckets is not None:
        return []
    return [shape.split(":")[0].strip() for shape in data.shapes]


def open_page(source: Source, out: Path, host: str = "127.0.0.1", port: int = 0) -> Page:
    port = _free_port(host, port)
    copies = Path(tempfile.mkdtemp(prefix="gulliver-app-"))
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # Environment variable read by gradio when components are created: folder for copies of shown
    # files, deleted with the page.
    os.environ["GRADIO_TEMP_DIR"] = str(copies)
    try:
        from starlette.middleware import Middleware

        from gulliver.app.page import CSS, Parts, build
    except ImportError as error:
        raise missing_extra(f"gulliver app needs {error.name or 'gradio'}", "app") from error
    first, shapes = first_settings(source)
    gallery = Gallery(out.resolve())
    service = Service(source)
    blocks = build(Parts(service, gallery, source, first, shapes))
    try:
        _, url, _ = blocks.launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            footer_links=[],
            css=CSS,
            allowed_paths=_shown_folders(source, gallery),
            app_kwargs={"middleware": [Middleware(_OwnFilesOnly)]},
        )
    except OSError as error:
        service.close()
        raise GulliverError(f"cannot listen on {host}:{port}: {error}") from error
    return Page(url, service, blocks, copies)


def serve(source: Source, out: Path, host: str, port: int) -> None:
    """Serves a page until interrupted."""
    page = open_page(source, out, host, port)
    show = console().print
    if not is_local(host):
        show(
            f"warning: {host} is reachable from other machines; anyone who opens {page.url} can "
            "generate clips and see those of others without a password"
        )
    show(f"{source.name} is on {page.url}, clips are saved in {out}; press Ctrl+C to stop")
    try:
        threading.Event().wait()
    finally:
        page.close()


def is_local(host: str) -> bool:
    """Whether an address is only reachable from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise GulliverError(
                f"cannot listen on {host}:{port} ({error.strerror}); stop the other program, pass "
                "another --port, or pass --port 0 to use a free one"
            ) from error
        return probe.getsockname()[1]


def _shown_folders(source: Source, gallery: Gallery) -> list[str]:
    """Lists the folders that browsers may read, which exclude checkpoints."""
    shown = [gallery.folder]
    if source.run is not None:
        shown += [source.run / "samples", source.run.parent / "sheet.gif"]
    return [str(path.resolve()) for path in shown]


class _OwnFilesOnly:
    """Adds the content security policy to all responses."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message["headers"], policy]}
            await send(message)

        await self._app(scope, receive, told)
