"""Downloads and uploads of Hugging Face Hub models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gulliver.errors import GulliverError, missing_extra

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")

READ = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.md")
"""Files to download: no pickles, and no weights of other frameworks."""


def is_hub_name(path: Path | str) -> bool:
    """Whether a path looks like a name on the Hub and does not exist locally."""
    local = Path(path)
    return NAME.fullmatch(str(path)) is not None and not (local.exists() or local.parent.exists())


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise missing_extra(f"{what}: huggingface_hub is missing", "transformers") from None
    except (OSError, ValueError) as error:
        raise GulliverError(f"{what}: {str(error).strip().splitlines()[0]}") from None


def fetch(path: Path, files: Sequence[str] = READ) -> Path:
    """Downloads a model from the Hub if `path` is a name there; returns its folder."""
    if not is_hub_name(path):
        if NAME.fullmatch(str(path)) and not path.exists():
            raise GulliverError(
                f"{path} does not exist; correct the path, or, to load a model of that name from "
                f"the Hub, run in a directory without a folder {path.parent}"
            )
        return path
    name, _, revision = str(path).partition("@")
    with _errors(f"{path} is no folder, and cannot be taken from the Hub"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))


def check_push(name: str | None) -> None:
    if name is not None and (NAME.fullmatch(name) is None or "@" in name):
        raise GulliverError(
            f"--push-to-hub {name} is not a repository; use a name such as org/name"
        )


def push(folder: Path, name: str) -> str:
    """Uploads a folder to a repository, created as private if missing; returns the URL."""
    check_push(name)
    with _errors(f"{folder} is written, and cannot be pushed to {name}"):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder)))
