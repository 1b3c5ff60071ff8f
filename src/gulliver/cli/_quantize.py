"""``gulliver quantize``: int8 and int4 folders of language models."""

from __future__ import annotations

from dataclasses import asdict

from gulliver.cli._options import QuantizeConfig
from gulliver.quantize import quantize_folder


def quantize_command(config: QuantizeConfig, arguments: list[str]) -> int:
    """Quantises a folder, and prints what became of it."""
    del arguments
    _, report, lines = quantize_folder(**asdict(config))
    for line in (str(report), *lines, f"{config.out}: written"):
        print(line)
    return 0
