"""``gulliver app``: a page in the browser that makes clips with a run and looks at its training."""

from __future__ import annotations

import signal

from gulliver.app import Source, find_run, serve
from gulliver.cli._options import AppConfig
from gulliver.errors import GulliverError


def app_command(config: AppConfig, arguments: list[str]) -> int:
    """Serves the page until Ctrl+C or SIGTERM."""
    del arguments
    if config.model is None:
        for name in ("autoencoder", "text_encoder", "clip"):
            if getattr(config, name) is not None:
                option = name.replace("_", "-")
                raise GulliverError(f"--{option} is for a --model: name that, too")
        source = Source(run=find_run(config.run))
    elif config.run is not None:
        raise GulliverError(f"run {config.run} and --model {config.model} exclude each other")
    else:
        parts = config.autoencoder, config.text_encoder, config.clip
        source = Source(None, config.model, *parts, keep=config.keep)

    def ended(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    serve(source, config.out, config.host, config.port)
    return 0
