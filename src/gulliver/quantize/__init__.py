"""Quantises checkpoints: read slice by slice into int8, saved, loaded, and judged.

    with lazy_parameters():
        model = AutoModelForCausalLM.from_config(config)
    stream_quantized(model, "folder", rank_group=group)    # this rank's shard, quantised

Read `_streaming.py`, then `_files.py`; `_job.py` is ``gulliver quantize``.
"""

from gulliver.quantize._files import load_quantized, save_quantized
from gulliver.quantize._job import quantize_folder
from gulliver.quantize._judged import generation_seconds, perplexity
from gulliver.quantize._streaming import stream_quantized

__all__ = [
    "generation_seconds",
    "load_quantized",
    "perplexity",
    "quantize_folder",
    "save_quantized",
    "stream_quantized",
]
