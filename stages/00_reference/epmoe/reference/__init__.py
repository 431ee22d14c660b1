"""The oracle, and the simplest expert-parallel layer around it."""
