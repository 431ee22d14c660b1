"""What pytest loads in every environment where epmoe is installed: nothing, unless the suite is asked for by name.

A package that is named with --pyargs cannot bring command-line options through its conftest: pytest reads those for
paths only. So this entry point brings the plugin, and leaves other people's test runs (and their own --device) alone.
"""


def pytest_load_initial_conftests(early_config, args):
    """pytest's hook: before options are read for good."""
    if any(str(arg).startswith("epmoe.core.conformance") for arg in args):
        early_config.pluginmanager.import_plugin("epmoe.core.conformance.plugin")
