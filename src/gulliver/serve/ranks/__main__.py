"""A rank, started by `controller.py`; it reads its `RankOrder` from standard input."""

import pickle
import sys

if __name__ == "__main__":
    # Modules may be in folders that only the controller's program has on its path.
    sys.path[:] = [*sys.path, *(p for p in pickle.load(sys.stdin.buffer) if p not in sys.path)]
    from gulliver.serve.ranks.controller import serve_rank

    serve_rank(pickle.load(sys.stdin.buffer))
