"""Teaching a model one subject from a few pictures, with its own token (DreamBooth)."""
