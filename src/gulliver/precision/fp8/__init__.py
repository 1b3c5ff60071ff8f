"""FP8 training: scaled casts, linears, and where they pay."""
