"""Ranks for the tests: the fixtures of epmoe's conformance suite."""

pytest_plugins = ["epmoe.core.conformance.plugin"]
