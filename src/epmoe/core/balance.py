"""A map from routing counts, so that the fullest rank has less to do: all wait for it.

Longest processing time first (R. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969): experts in descending
order of their load, each to the least loaded rank that still has a slot. With redundant slots, the expert whose
replicas are the hottest gets one more, again and again, before anything is placed; so does DeepSeek's EPLB
(https://github.com/deepseek-ai/EPLB). All ranks hold equally many slots, but for one where EP does not divide E.

The load of a rank is what `Placement` will send there when every source rank brings the same share of each expert's
assignments. Worked: counts 6 1 1 2 on 2 ranks: contiguous has 7 and 3, and no map of 2 experts a rank has less than 7.
With one redundant slot a rank, experts 0 and 3 live on both, and 3 + 1 + 1 faces 3 + 1 + 1.

Legend: E experts, EP ranks, n replicas of an expert.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from epmoe.core.errors import InputError
from epmoe.core.placement import Placement, contiguous, replicated, serving
from epmoe.core.values import check_whole

_MOST_COUNTED = 2**63 - 1  # what an int64 counter holds, and far below the largest float


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What `balance` found for the counts of one layer.

    Attributes:
        counts: [E] assignments that name each expert.
        before: the contiguous map.
        after: the map to use; `before` itself where nothing would be gained.
    """

    counts: tuple[int, ...]
    before: Placement
    after: Placement

    @property
    def gained(self) -> bool:
        return self.after != self.before

    def loads(self, placement: Placement) -> tuple[float, ...]:
        """Assignments that every rank serves under `placement`."""
        return tuple(float(load) for load in _loads(placement, self.counts))

    def excess(self, placement: Placement) -> float:
        """The fullest rank's load over the mean load; 1.0 is even. 1.0 too where nothing was counted."""
        loads = self.loads(placement)
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def balance(counts: Sequence[int], ranks: int, redundant: int = 0) -> Balance:
    """Place the experts by their counts; the same map for the same counts on every machine.

    Args:
        counts: [E] assignments that name each expert, such as a router's statistics.
        ranks: EP.
        redundant: slots that every rank holds more than its share of the E experts.

    Raises:
        InputError: a negative or missing count, or more slots on a rank than there are experts.
    """
    counts = _checked_counts(counts)
    before = contiguous(len(counts), ranks)
    slots = [held + redundant for held in before.counts()]
    if redundant < 0 or max(slots) > len(counts):
        raise InputError(
            f"redundant={redundant}: a rank holds an expert at most once, so give 0 to "
            f"{len(counts) - max(before.counts())} for {len(counts)} experts on {ranks} ranks"
        )
    replicas = _replicas(counts, ranks, sum(slots))
    after = replicated(_pack(counts, replicas, slots), ranks)
    better = max(_loads(after, counts)) < max(_loads(before, counts))
    return Balance(counts=counts, before=before, after=after if better else before)


def _replicas(counts: Sequence[int], ranks: int, slots: int) -> list[int]:
    """n of every expert: one, and each further slot to the expert with the most to do per replica."""
    replicas = [1] * len(counts)
    heap = [(Fraction(-count), e) for e, count in enumerate(counts)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(slots - len(counts)):
        _, expert = heapq.heappop(heap)
        replicas[expert] += 1
        if replicas[expert] < ranks:
            heapq.heappush(heap, (Fraction(-counts[expert], replicas[expert]), expert))
    return replicas


def _pack(counts: Sequence[int], replicas: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
    """homes[e]: every expert's replicas on different ranks, the largest share first, to the least loaded ranks."""
    ranks, free = len(slots), list(slots)
    loads = [0] * ranks  # in units of 1 / EP assignments
    homes: list[list[int]] = [[] for _ in counts]
    # reach[k - 1]: how many slots of k ranks the experts that still wait could fill
    reach = [sum(min(n, k) for n in replicas) for k in range(1, ranks + 1)]
    for expert in sorted(range(len(counts)), key=lambda e: (-Fraction(counts[e], replicas[e]), e)):
        n = replicas[expert]
        reach = [slots - min(n, k) for k, slots in enumerate(reach, start=1)]
        homes[expert] = _choose(n, loads, free, reach)
        for rank in homes[expert]:
            free[rank] -= 1
        for source in range(ranks):
            loads[serving(homes[expert], source)] += counts[expert]
    return homes


def _choose(n: int, loads: list[int], free: list[int], reach: list[int]) -> list[int]:
    """The n least loaded ranks with a free slot, such that all experts that wait still find different ranks.

    Where they would not, as many as necessary are the ranks with the most free slots; all n of those always do.
    """
    ranks = [rank for rank, slots in enumerate(free) if slots]
    idle = sorted(ranks, key=lambda rank: (loads[rank], rank))
    roomy = sorted(ranks, key=lambda rank: (-free[rank], loads[rank], rank))
    for forced in range(n):
        chosen = roomy[:forced]
        chosen += [rank for rank in idle if rank not in chosen][: n - forced]
        if _fits(reach, [slots - (rank in chosen) for rank, slots in enumerate(free)]):
            return sorted(chosen)
    return sorted(roomy[:n])


def _fits(reach: Sequence[int], free: Sequence[int]) -> bool:
    """Can each expert's replicas lie on different ranks, with every slot used? (D. Gale and H. Ryser, 1957.)"""
    room = accumulate(sorted(free, reverse=True))
    return all(needed <= reachable for needed, reachable in zip(room, reach, strict=True))


def _loads(placement: Placement, counts: Sequence[int]) -> list[Fraction]:
    loads = [0] * placement.ranks
    for source in range(placement.ranks):
        for count, owner in zip(counts, placement.owners_from(source), strict=True):
            loads[owner] += count
    return [Fraction(load, placement.ranks) for load in loads]


def _checked_counts(counts: Sequence[int]) -> tuple[int, ...]:
    if not counts:
        raise InputError("counts are empty: give how many assignments name each expert")
    for expert, count in enumerate(counts):
        check_whole(f"counts[{expert}]", count, 0, _MOST_COUNTED)
    return tuple(counts)
