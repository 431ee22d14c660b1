"""The exercises of this stage: skeletons and solutions belong together, and the solutions are right."""

from epmoe.core.conformance.exercise_checks import *  # noqa: F403
