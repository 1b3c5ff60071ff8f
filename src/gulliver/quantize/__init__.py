"""Int8 and int4 quantization of checkpoints, read slice by slice.

Example::

    with lazy_parameters():
        model = AutoModelForCausalLM.from_config(config)
    stream_quantized(model, "folder", rank_group=group)    # this rank's shard, quantized
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.quantize.calibrated import replace_calibrated
    from gulliver.quantize.files import load_quantized, save_quantized, stream_quantized
    from gulliver.quantize.job import Quantized, load_pipeline, quantize_folder, quantize_pipeline

__all__ = [
    "Quantized",
    "load_pipeline",
    "load_quantized",
    "quantize_folder",
    "quantize_pipeline",
    "replace_calibrated",
    "save_quantized",
    "stream_quantized",
]

__getattr__, __dir__ = lazy_exports(__name__)
