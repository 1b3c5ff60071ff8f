"""Writes one safetensors file while the program goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gulliver.checkpoint._collect import collect
from gulliver.checkpoint._guard import install_hooks
from gulliver.checkpoint._saving import PAGE
from gulliver.checkpoint._snapshot import Snapshot
from gulliver.errors import GulliverError
from gulliver.io import PARTIAL, check_process, default_engine, named_errors, sync
from gulliver.memory import add_read_lock, drop_read_lock


class FileSaver:
    """Writes tensors to a file in the background, whole or not at all."""

    # An optimizer's step waits until what it changes has been copied, as with `AsyncCheckpointer`.
    # The copy of the tensors in host memory is freed with every file.

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = Path(path)
        self._failure: Exception | None = None
        self._process = os.getpid()
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}{PARTIAL}")
        self._snapshot = Snapshot(collect({"file": dict(tensors)}))
        if self._snapshot.devices:
            raise GulliverError(
                f"{self.path} cannot be written in the background from "
                f"{next(iter(self._snapshot.devices))}: save the whole run with booster.save, or "
                "use_async=False"
            )
        install_hooks()
        pages = max(2, self._snapshot.pages(PAGE))
        with named_errors(self.path, needed=self._snapshot.nbytes):
            self._partial.mkdir(parents=True)
        self._engine = default_engine(page_bytes=PAGE, pages=min(8, pages), queue=pages + 8)
        add_read_lock(self._snapshot)
        try:
            self._snapshot.submit(self._engine, self._partial)
        except GulliverError:
            self._abandon()
            raise
        self._thread = threading.Thread(target=self._finish, args=(pages,))
        self._thread.start()
        if self._snapshot.unguarded:
            self._snapshot.release(self._snapshot.unguarded)

    def _finish(self, pages: int) -> None:
        try:
            # Of what lies on disk no copy is made: it goes through the pages that there are.
            while not self._snapshot.disk_bytes and self._engine.pages < pages:
                self._engine.grow(min(32, pages - self._engine.pages))
            self._snapshot.wait_copied()
            self._snapshot.finish(self._engine)
            drop_read_lock(self._snapshot)
            (written,) = self._snapshot.images
            with named_errors(self.path):
                os.replace(self._partial / written, self.path)
                self._partial.rmdir()
                sync(self.path.parent)
            self._engine.close()
        except Exception as error:
            self._failure = error
            self._abandon()

    def _abandon(self) -> None:
        drop_read_lock(self._snapshot)
        self._snapshot.close_files(self._engine)
        self._engine.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def wait(self) -> None:
        """Waits until the file is there."""
        check_process(self._process)
        self._snapshot.release(None)
        self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise GulliverError(f"{self.path} was not written: {failure}") from failure
