"""Downloads and uploads of Hugging Face Hub models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gulliver.errors import GulliverError, missing_extra

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
"""A repository's name, ``org/name`` or ``org/name@revision``."""

READ = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.md")
"""Files that are fetched: no pickles, and no weights of other frameworks."""


def is_hub_name(path: Path | str) -> bool:
    """Whether a path that does not exist has the form of a name on the Hub."""
    return NAME.fullmatch(str(path)) is not None and not Path(str(path)).exists()


def fetch(path: Path, files: Sequence[str] = READ) -> Path:
    """Returns a folder unchanged; downloads a model given by its name on the Hub.

    Downloads are cached by huggingface_hub (``HF_HOME``); ``HF_ENDPOINT`` sets another server,
    ``HF_TOKEN`` the account.

    Args:
        path: folder, or a name such as ``org/name`` or ``org/name@revision``.
        files: patterns of the files to fetch.

    Raises:
        GulliverError: the Hub does not have it, or cannot be reached.
    """
    if not is_hub_name(path):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise missing_extra(
            f"{path} is no folder, and fetching it needs huggingface_hub", "transformers"
        ) from None
    name, _, revision = str(path).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except (OSError, ValueError) as error:  # of HTTP, of the network, of a file that is not there
        reason = str(error).strip().splitlines()[0]
        raise GulliverError(
            f"{path} is no folder, and cannot be fetched from the Hub: {reason}"
        ) from None


def check_push(name: str | None) -> None:
    """Rejects an invalid repository name before a run.

    Raises:
        GulliverError: the name is not of the form ``org/name``.
    """
    if name is not None and (NAME.fullmatch(name) is None or "@" in name):
        raise GulliverError(f"--push-to-hub {name}: name a repository, such as org/name")


def push(folder: Path, name: str) -> str:
    """Uploads a folder to a repository, which is created as private if it does not exist.

    Args:
        folder: folder to upload.
        name: repository, ``org/name``.

    Returns:
        The address of the commit.

    Raises:
        GulliverError: the Hub rejects it, or cannot be reached; the folder is unchanged.
    """
    check_push(name)
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise missing_extra("--push-to-hub needs huggingface_hub", "transformers") from None
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GulliverError(
            f"{folder} is written, and cannot be pushed to {name}: {reason}"
        ) from None
