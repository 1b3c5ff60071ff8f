"""The plan: how a model runs, explained and saved."""

from gulliver.plan._plan import ChunkPlan, MemoryPlan, Plan

__all__ = ["ChunkPlan", "MemoryPlan", "Plan"]
