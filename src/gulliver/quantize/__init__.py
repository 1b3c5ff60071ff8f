"""Quantises checkpoints: read slice by slice into int8, saved, loaded, and judged.

    with lazy_parameters():
        model = AutoModelForCausalLM.from_config(config)
    stream_quantized(model, "folder", rank_group=group)    # this rank's shard, quantised

Read `_streaming.py`, then `_files.py`; `_calibrated.py` rounds for given data, `_pictures.py` does
pipelines; `_job.py` is ``gulliver quantize``.
"""

from gulliver.quantize._calibrated import replace_calibrated
from gulliver.quantize._files import load_quantized, quantize_like, save_quantized
from gulliver.quantize._job import generation_seconds, perplexity, quantize_folder
from gulliver.quantize._pictures import Quantized, load_pipeline, quantize_pipeline
from gulliver.quantize._streaming import stream_quantized

__all__ = [
    "Quantized",
    "generation_seconds",
    "load_pipeline",
    "load_quantized",
    "perplexity",
    "quantize_folder",
    "quantize_like",
    "quantize_pipeline",
    "replace_calibrated",
    "save_quantized",
    "stream_quantized",
]
