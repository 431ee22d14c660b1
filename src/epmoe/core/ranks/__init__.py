"""Processes that are ranks: where they run, how they start, are watched, asked and ended. `launch` is their front."""
