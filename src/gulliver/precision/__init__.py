"""Number formats: what travels between ranks, FP8 linears, int8 inference."""
