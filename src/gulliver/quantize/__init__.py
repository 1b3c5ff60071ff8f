"""Int8 and int4 quantization of checkpoints, read slice by slice.

Example::

    with lazy_parameters():
        model = AutoModelForCausalLM.from_config(config)
    stream_quantized(model, "folder", rank_group=group)    # this rank's shard, quantized
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.quantize.calibrated import replace_calibrated as replace_calibrated
    from gulliver.quantize.files import load_quantized as load_quantized
    from gulliver.quantize.files import save_quantized as save_quantized
    from gulliver.quantize.files import stream_quantized as stream_quantized
    from gulliver.quantize.job import Quantized as Quantized
    from gulliver.quantize.job import load_pipeline as load_pipeline
    from gulliver.quantize.job import quantize_folder as quantize_folder
    from gulliver.quantize.job import quantize_pipeline as quantize_pipeline

__getattr__, __dir__ = lazy_exports(__name__)
