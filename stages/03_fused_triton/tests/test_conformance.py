"""The shared suite on this stage alone; see epmoe.core.conformance."""

from pathlib import Path

from epmoe.core.conformance.everything import *  # noqa: F403

STAGE = Path(__file__).parents[1].name
LONG = True
