"""``gulliver quantize``: int8 and int4 folders of language models and of diffusers pipelines."""

from __future__ import annotations

from dataclasses import asdict

from gulliver.cli._options import QuantizeConfig
from gulliver.quantize import quantize_folder


def quantize_command(config: QuantizeConfig, arguments: list[str]) -> int:
    """Quantises a folder, and prints what became of it."""
    del arguments
    done = quantize_folder(**asdict(config))
    for name, report in done.reports.items():
        print(f"{name}, {report}")
    for line in (*done.lines, f"{config.out}: written"):
        print(line)
    return 0
