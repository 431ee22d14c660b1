"""What calls leave behind, on their ranks: bytes that are still held when a call and its result are over."""

import gc
import time

from epmoe.core.cases import Case
from epmoe.core.conformance.live_peak import LivePeak
from epmoe.core.groups import EPGroup
from epmoe.core.verify import bring, build_case

_PATIENCE = 2.0  # seconds


def left_behind(group: EPGroup, case: Case) -> list[int]:
    """For each call of the case in turn: the bytes that it made and left; a rank program."""
    layer = build_case(group, case)
    left = []
    for call in range(len(case.tokens)):
        arguments = bring(group, case, call)
        with LivePeak() as live:
            layer(*arguments, max_tokens=case.max_tokens(call))
        left.append(_settled(live))
    layer.close()
    return left


def _settled(live: LivePeak) -> int:
    """Bytes that stay: an interpreter of kernels may hold arguments in cycles, gloo's threads let go of theirs late."""
    deadline = time.monotonic() + _PATIENCE
    while (left := _held(live)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _held(live: LivePeak) -> int:
    gc.collect()
    return sum(n for weak, n in live.alive.values() if not weak.expired())
