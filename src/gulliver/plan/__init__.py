"""The plan: how a model runs, as values that are read, edited, checked and compared."""

from gulliver.plan._checks import check_plan
from gulliver.plan._compare import Comparison, ComparisonRow
from gulliver.plan._plan import VERSION, Plan
from gulliver.plan._predicted import MemoryPlan, Predicted, Seconds, TierTraffic
from gulliver.plan._reading import join
from gulliver.plan._tree import (
    AXES,
    MODEL_AXES,
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    WIRE_KINDS,
    BlockWork,
    ChunkPlan,
    DDPPlan,
    Fp8Plan,
    Mesh,
    Model,
    OperatorBlock,
    OperatorChoice,
    OperatorPlan,
    PipelineLayout,
    Precision,
    SequenceLayout,
    TensorLayout,
    Tiers,
    Wire,
    Work,
    ZeroPlan,
)
from gulliver.plan.analysis import Analysis, analyse

__all__ = [
    "AXES",
    "MODEL_AXES",
    "SHARED_BY_SEQUENCE",
    "SHARED_BY_TENSOR",
    "VERSION",
    "WIRE_KINDS",
    "Analysis",
    "BlockWork",
    "ChunkPlan",
    "Comparison",
    "ComparisonRow",
    "DDPPlan",
    "Fp8Plan",
    "MemoryPlan",
    "Mesh",
    "Model",
    "OperatorBlock",
    "OperatorChoice",
    "OperatorPlan",
    "PipelineLayout",
    "Plan",
    "Precision",
    "Predicted",
    "Seconds",
    "SequenceLayout",
    "TensorLayout",
    "TierTraffic",
    "Tiers",
    "Wire",
    "Work",
    "ZeroPlan",
    "analyse",
    "check_plan",
    "join",
]
