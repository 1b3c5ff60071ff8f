"""Inference with int8 and int4 weights."""
