"""Which stage? `select` says, with a reason for everything that it did not choose; `build("auto", ...)` asks it.

Everything registered is a candidate: the rungs of the ladder, other packages' stages, and pairs. Of those that can
serve what is asked, the last rung is taken; others, of which nothing is known but that they work, only where no rung
can, and interpreted kernels last of all. A measured comparison (`epmoe.core.measured`) overrules that order, if the one
that the order would take was part of it and lost by more than `LEAST_EFFECT`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from epmoe.core import measured, registry
from epmoe.core.agreement import agree
from epmoe.core.capabilities import Capabilities, Spec
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.measured import LEAST_EFFECT, Comparison
from epmoe.core.memory import in_words
from epmoe.core.own_file import device_name
from epmoe.core.registry import Stage

if TYPE_CHECKING:
    from epmoe.core.layer_spec import LayerSpec

AUTO = "auto"
LADDER_ORDER = "ladder order"

Candidates = Mapping[str, Stage | UnsupportedError]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One candidate.

    Attributes:
        reasons: why it cannot serve; empty when it can.
        options: what it must be built with to serve.
        interpreted: its kernels would run through an interpreter.
    """

    reasons: list[str]
    options: dict[str, object] = field(default_factory=dict)
    interpreted: bool = False


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The choice.

    Attributes:
        chosen: the registered name.
        by: "ladder order", or the measurement that decided.
        options: what the stage must be built with to serve.
        reasons: for each other candidate, every reason.
    """

    chosen: str
    by: str
    options: dict[str, object] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)


def select(
    spec: Spec,
    stages: Candidates | None = None,
    comparisons: Sequence[Comparison] | None = None,
) -> Selection:
    """The stage that serves `spec` best, as far as is known; never a silent fallback.

    Args:
        spec: what is needed.
        stages: candidates, the preferred ones last; everything registered by default.
        comparisons: measured ones; by default those of this user, see `own_file`.

    Raises:
        UnsupportedError: no candidate can; the message lists each with its reasons.
        InputError: a limit of memory without the sizes that it depends on, or a broken file of measurements.
    """
    verdicts = judge(spec, candidates() if stages is None else stages)
    found = measured.nearest(spec, measured.read() if comparisons is None else comparisons)
    return _choose(spec, verdicts, found)


def select_together(group: EPGroup, spec: Spec) -> Selection:
    """`select` for a group: the same choice on all ranks. Collective.

    A candidate must be able on every rank, whatever GPUs and packages they have. Measurements are rank 0's: files of
    others may say something else, and nobody reads them.

    Raises:
        UnsupportedError, InputError: as in `select`, the same on every rank.
    """
    found, verdicts, problem = None, {}, None
    try:
        verdicts = judge(spec, candidates())
        if group.rank == 0:
            found = measured.nearest(spec, measured.read())
    except InputError as error:
        problem = error
    agree(group, {}, problem)
    everyone = group.all_gather_objects((verdicts, found))
    selection = _choose(spec, merge([one for one, _ in everyone]), everyone[0][1])
    agree(group, {"chosen stage": selection.chosen, "its options": selection.options}, None)
    return selection


def settle(spec: "LayerSpec", overflow: str | None) -> "LayerSpec":
    """What `build("auto", ...)` builds: the spec with a stage, its options and how it was chosen. Collective."""
    selection = select_together(spec.group, needs(spec))
    return replace(
        spec,
        stage=selection.chosen,
        options={**selection.options, **spec.options},
        overflow=overflow or overflow_of(selection.chosen),
        chosen_by=selection.by,
    )


def overflow_of(stage: str) -> str:
    """What a stage does by default with too many tokens; before "auto" is settled, what any stage can."""
    return "raise" if stage == AUTO else registry.load(stage).overflow


def needs(spec: "LayerSpec") -> Spec:
    """What a layer asks of its stage."""
    on_gpu = spec.device.type == "cuda"
    wishes = asdict(spec.wishes)
    wishes["maskable"] |= bool(spec.placement.lost)
    return Spec(
        **wishes,
        dtype=spec.dtype,
        device=spec.device.type,
        device_name=device_name(spec.device),
        arch=torch.cuda.get_device_capability(spec.device) if on_gpu else None,
        transport=spec.group.transport,
        placement=spec.placement.kind,
        tokens=spec.max_tokens_per_rank,
        ranks=spec.group.size,
        shape=spec.shape,
        local_experts=max(spec.placement.counts()),
        weights=spec.weights,
        options=spec.options,
    )


def candidates() -> dict[str, Stage | UnsupportedError]:
    """Everything registered, or why it cannot be imported; the preferred ones last: the ladder, in its order."""
    stages = registry.loaded(registry.STAGES)
    rungs = {name: stage for name, stage in stages.items() if _is_rung(name)}
    return {
        **_unusable_parts(),
        **{pair: registry.load(pair) for pair in registry.pairs()},
        **{name: stage for name, stage in stages.items() if name not in rungs},
        **rungs,
    }


def judge(spec: Spec, stages: Candidates) -> dict[str, Verdict]:
    """Every candidate's verdict, in the order given."""
    return {name: _verdict(stage, spec) for name, stage in stages.items()}


def reasons_against(stage: Stage, spec: Spec, options: Mapping[str, object]) -> list[str]:
    """Why a layer of this stage, built with `options`, cannot serve `spec`; empty when it can."""
    can = stage.capabilities_with(options)
    return [
        *stage.problems_with(options),
        *can.reasons_against(spec),
        *_options_missed(stage, can, spec),
        *_too_much_memory(stage, spec),
        *_unreadable(stage, spec),
    ]


def merge(by_rank: Sequence[Mapping[str, Verdict]]) -> dict[str, Verdict]:
    """One verdict for a group: a reason of all ranks once, any other with its rank in front. Rank 0's order."""
    merged = {}
    for name in dict.fromkeys(name for verdicts in by_rank for name in verdicts):
        missing = Verdict(reasons=["is not registered"])
        found = [verdicts.get(name, missing) for verdicts in by_rank]
        reasons: dict[str, None] = {}
        for rank, verdict in enumerate(found):
            for reason in verdict.reasons:
                shared = all(reason in other.reasons for other in found)
                reasons[reason if shared else f"rank {rank}: {reason}"] = None
        merged[name] = Verdict(
            reasons=list(reasons),
            options=next((v.options for v in found if v.options), {}),
            interpreted=any(v.interpreted for v in found),
        )
    return merged


def _unusable_parts() -> dict[str, UnsupportedError]:
    """Parts that cannot be imported: no pair has them, and this is why."""
    forms = {
        registry.EXCHANGES: f"{{}}{registry.JOINT}*",
        registry.EXPERTS: f"*{registry.JOINT}{{}}",
    }
    return {
        form.format(name): part
        for group, form in forms.items()
        for name, part in registry.loaded(group).items()
        if isinstance(part, UnsupportedError)
    }


def _is_rung(name: str) -> bool:
    return name[:1].isdigit()


def _verdict(stage: Stage | UnsupportedError, spec: Spec) -> Verdict:
    if isinstance(stage, UnsupportedError):
        return Verdict(reasons=[str(stage)])
    granted: dict[str, object] = {}
    for wish, needed in stage.grants.items():
        if getattr(spec, wish) and not getattr(stage.capabilities, wish):
            granted |= needed
    return Verdict(
        reasons=reasons_against(stage, spec, {**granted, **spec.options}),
        options=granted,
        interpreted=stage.capabilities.interpreted_on_cpu and spec.device == "cpu",
    )


def _options_missed(stage: Stage, can: Capabilities, spec: Spec) -> list[str]:
    """For each capability that is missing though an option would switch it on: that option."""
    return [
        f"would be {wish.replace('_', ' ')} with {', '.join(f'{k}={v}' for k, v in needed.items())}"
        for wish, needed in stage.grants.items()
        if getattr(spec, wish) and not getattr(can, wish)
    ]


def _too_much_memory(stage: Stage, spec: Spec) -> list[str]:
    if spec.memory is None:
        return []
    size = spec.size()
    if stage.memory is None:
        return ["does not say how much memory its buffers take"]
    needs = stage.memory(size)
    if needs.total <= spec.memory:
        return []
    kept = f"{in_words(needs.kept)} for good and " if needs.kept else ""
    return [
        f"buffers may take {kept}{in_words(needs.call)} in a call, over the limit of {in_words(spec.memory)}"
    ]


def _unreadable(stage: Stage, spec: Spec) -> list[str]:
    if spec.weights is None or stage.reasons_against is None:
        return []
    return stage.reasons_against(spec.weights)


def _choose(spec: Spec, verdicts: Mapping[str, Verdict], found: Comparison | None) -> Selection:
    able = [name for name, verdict in verdicts.items() if not verdict.reasons]
    if not able:
        listed = "; ".join(f"{name}: {', '.join(v.reasons)}" for name, v in verdicts.items())
        raise UnsupportedError(f"no stage can serve {spec}: {listed or 'no stage is registered'}")
    first = max(able, key=lambda name: (not verdicts[name].interpreted, able.index(name)))
    times = _times(able, verdicts, found)
    chosen, by = first, LADDER_ORDER
    if found is not None and first in times and len(times) > 1:
        fastest = min(times, key=lambda name: (times[name], -able.index(name)))
        if times[fastest] < times[first] * (1 - LEAST_EFFECT):
            chosen = fastest
        by = f"measured: {times[chosen]:.1f} us, {found}"
    reasons = {
        name: verdict.reasons or [_passed_over(name, chosen, by, verdict, times)]
        for name, verdict in verdicts.items()
        if name != chosen
    }
    return Selection(chosen=chosen, by=by, options=verdicts[chosen].options, reasons=reasons)


def _times(
    able: Sequence[str], verdicts: Mapping[str, Verdict], found: Comparison | None
) -> dict[str, float]:
    """Measured microseconds of those that can; times of default options say nothing about others."""
    known = found.microseconds if found is not None else {}
    return {name: known[name] for name in able if name in known and not verdicts[name].options}


def _passed_over(
    name: str, chosen: str, by: str, verdict: Verdict, times: Mapping[str, float]
) -> str:
    """Why a candidate that can serve was not taken."""
    if by != LADDER_ORDER and name in times:
        return f"could serve this in {times[name]:.1f} us, {chosen} takes {times[chosen]:.1f} us"
    if by != LADDER_ORDER:
        return f"could serve this, but was not measured with {chosen}"
    if verdict.interpreted:
        return "could serve this, but its kernels are interpreted on a CPU"
    if _is_rung(name):
        return f"could serve this, but {chosen} is the later rung"
    return f"could serve this, but nothing was measured that puts it before {chosen}"
