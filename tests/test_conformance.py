"""The shared suite on every registered stage; see epmoe.core.conformance."""

from epmoe.core.conformance.everything import *  # noqa: F403
