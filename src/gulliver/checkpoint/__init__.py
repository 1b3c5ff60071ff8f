"""Checkpoints, saved while training goes on and loaded at any number of ranks.

Read `_saving.py`, then `_snapshot.py`: a state is taken apart (`_collect.py`), copied page by page
(`_image.py` plans the files) and published as a step (`_publishing.py`, `_folder.py`).
`_loading.py`, `_filling.py` and `_reader.py` go the other way. `_weights.py`, `_writing.py` and
`_interchange.py` convert between steps and Hugging Face's folders. Bytes are moved by
`gulliver.io`; what ZeRO and model parallelism hold comes here as `gulliver.memory.Part`s.
"""

from gulliver.checkpoint._adapters import adapter_names, has_adapters, write_adapters
from gulliver.checkpoint._agreement import Saved
from gulliver.checkpoint._collect import PerRank, refuse_boosted
from gulliver.checkpoint._compare import (
    Comparison,
    Difference,
    Problem,
    any_step,
    compare,
    run_steps,
    verify,
)
from gulliver.checkpoint._files import (
    read_json,
    read_metadata,
    read_tensors,
    write_json,
    write_tensors,
)
from gulliver.checkpoint._filling import Filling
from gulliver.checkpoint._fits import fitted
from gulliver.checkpoint._folder import CheckpointFolder
from gulliver.checkpoint._gathering import GatheredWeights, on_gathered
from gulliver.checkpoint._huggingface import load_huggingface, match_huggingface, read_weights
from gulliver.checkpoint._interchange import (
    export_huggingface,
    gather_huggingface,
    import_huggingface,
    save_huggingface,
    write_untied,
)
from gulliver.checkpoint._loading import Loaded, fill_all, load, plan_all, step_folder
from gulliver.checkpoint._manifest import Manifest, read_manifest
from gulliver.checkpoint._matching import Mismatch, listed, match
from gulliver.checkpoint._parts_saving import PartsSaver, begin_huggingface, begin_single
from gulliver.checkpoint._reader import StepReader
from gulliver.checkpoint._refs import Ref, refs_in, replace_refs, with_refs
from gulliver.checkpoint._saving import AsyncCheckpointer
from gulliver.checkpoint._transformers import float_config, model_weights
from gulliver.checkpoint._tree import as_leaf, join_state, merge_skeletons, names_in, split_state
from gulliver.checkpoint._weights import Weights, is_step_or_run, open_weights
from gulliver.checkpoint._writing import refuse_existing, write_single

__all__ = [
    "AsyncCheckpointer",
    "CheckpointFolder",
    "Comparison",
    "Difference",
    "Filling",
    "GatheredWeights",
    "Loaded",
    "Manifest",
    "Mismatch",
    "PartsSaver",
    "PerRank",
    "Problem",
    "Ref",
    "Saved",
    "StepReader",
    "Weights",
    "adapter_names",
    "any_step",
    "as_leaf",
    "begin_huggingface",
    "begin_single",
    "compare",
    "export_huggingface",
    "fill_all",
    "fitted",
    "float_config",
    "gather_huggingface",
    "has_adapters",
    "import_huggingface",
    "is_step_or_run",
    "join_state",
    "listed",
    "load",
    "load_huggingface",
    "match",
    "match_huggingface",
    "merge_skeletons",
    "model_weights",
    "names_in",
    "on_gathered",
    "open_weights",
    "plan_all",
    "read_json",
    "read_manifest",
    "read_metadata",
    "read_tensors",
    "read_weights",
    "refs_in",
    "refuse_boosted",
    "refuse_existing",
    "replace_refs",
    "run_steps",
    "save_huggingface",
    "split_state",
    "step_folder",
    "verify",
    "with_refs",
    "write_adapters",
    "write_json",
    "write_single",
    "write_tensors",
    "write_untied",
]
