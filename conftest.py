"""The suite's options and fixtures, for whatever part of the tests is run."""

pytest_plugins = ["epmoe.core.conformance.plugin"]
