"""What calls leave behind, on their ranks: bytes that are still held when a call and its result are over."""

import gc

from epmoe.core.cases import Case
from epmoe.core.conformance.live_peak import LivePeak
from epmoe.core.groups import EPGroup
from epmoe.core.verify import bring, build_case


def left_behind(group: EPGroup, case: Case) -> list[int]:
    """For each call of the case in turn: the bytes that it made and left; a rank program."""
    layer = build_case(group, case)
    left = []
    for call in range(len(case.tokens)):
        arguments = bring(group, case, call)
        with LivePeak() as live:
            layer(*arguments, max_tokens=case.max_tokens(call))
        gc.collect()  # an interpreter of kernels may hold its arguments in cycles
        left.append(sum(n for weak, n in live.alive.values() if not weak.expired()))
    layer.close()
    return left
