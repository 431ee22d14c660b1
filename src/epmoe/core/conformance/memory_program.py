"""What a layer holds, on its ranks: bytes that it keeps, and the most that a call holds beside its result."""

from epmoe.core import choosing, registry
from epmoe.core.cases import Case
from epmoe.core.conformance.live_peak import LivePeak
from epmoe.core.groups import EPGroup
from epmoe.core.memory import Memory
from epmoe.core.verify import bring, build_case


def held(group: EPGroup, case: Case) -> tuple[Memory, Memory]:
    """What the stage says of a layer like this, and what is true of its calls; a rank program."""
    layer = build_case(group, case)
    stage = registry.load(case.stage)
    assert stage.memory is not None
    said = stage.memory(choosing.needs(layer.spec).size())
    peak = 0
    for call in range(len(case.tokens)):
        arguments = bring(group, case, call)
        with LivePeak() as live:
            y_TH = layer(*arguments)
        peak = max(peak, live.peak - y_TH.nbytes)
    kept = layer.describe().get("workspace_bytes", 0)
    assert isinstance(kept, int)
    layer.close()
    return said, Memory(kept, peak)
