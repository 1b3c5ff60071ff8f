"""The page of a run: prompts, pictures and settings in a browser, clips as they are made."""
