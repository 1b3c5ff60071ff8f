"""Arguments of other frameworks that do not go with Gulliver, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gulliver.errors import GulliverError

_OTHER = "leave it out, or gulliver"
_PLANNED = "chunk sizes are planned, not searched; leave it out, or give chunk_mb= in MiB"
_HALF = "use bf16=True, or gulliver={'precision': 'fp16'} for a model in float16"
_WHOLE = "it converts the model itself; use bf16=True"

# Arguments by the class that takes them. None, 0 and False ask for nothing, and pass.
REFUSED: dict[str, dict[str, str]] = {
    "Accelerator": {
        "deepspeed_plugin": f"it lets DeepSpeed run the model; {_OTHER}",
        "deepspeed_plugins": f"it lets DeepSpeed run the model; {_OTHER}",
        "fsdp_plugin": f"it lets FSDP run the model; {_OTHER}",
        "megatron_lm_plugin": f"it lets Megatron-LM run the model; {_OTHER}",
        "torch_tp_plugin": f"it lets transformers cut the model; {_OTHER}",
        "parallelism_config": f"it lets accelerate cut the model; {_OTHER}",
    },
    "TrainingArguments": {
        "deepspeed": f"it lets DeepSpeed run the model; {_OTHER}",
        "fsdp": f"it lets FSDP run the model; {_OTHER}",
        "parallelism_config": f"it lets accelerate cut the model; {_OTHER}",
        "fp16": _HALF,
        "fp16_full_eval": _WHOLE,
        "bf16_full_eval": _WHOLE,
        "auto_find_batch_size": "it retries in the middle of a step; give memory_limit=, or a size",
        "save_on_each_node": "a checkpoint is one folder of all ranks; save to a shared disk",
    },
    "GulliverStrategy": {
        "chunk_search_range": _PLANNED,
        "chunk_search_n_grids": _PLANNED,
        "min_chunk_size": _PLANNED,
        "gpu_margin_mem_ratio": "the plan decides what the optimizer takes; give memory_limit=",
        "force_outputs_fp32": "outputs keep their dtype; call .float() on them in training_step",
        "hysteresis": "the loss scale falls with the first overflow; leave it out",
    },
}


def refuse_arguments(owner: str, given: Mapping[str, Any]) -> None:
    """Refuses arguments of a class that would let something else run the model."""
    for name, instead in REFUSED[owner].items():
        if given.get(name):
            raise GulliverError(f"{owner}({name}={given[name]!r}) is not supported: {instead}")
