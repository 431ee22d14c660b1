"""Where a router sends tokens: counted on the device as calls go by, read only when somebody asks.

    layer.counter = RoutingCounter(layer.spec.tables)   # from now on every call is counted; None stops it
    stats = layer.counter.read(group)                   # collective, and the only wait for the device
    print(render(stats))

Counting has fixed shapes and writes in place, so that it can be captured in a CUDA graph with the layer: replays count.

Worked on the toy (4 experts on 2 ranks, contiguous; rank 0's tokens name (0, 1) and (1, 2), rank 1's (2, 3), (0, 3)):

    visits of experts 0 to 3    from rank 0: 1 2 1 0; from rank 1: 1 0 1 2
    hits on ranks 0 and 1       from rank 0: 2 1; from rank 1: 1 2
    needed                      6 rows, of the 8 that an all-gather delivers (4 on each rank)

Legend: T tokens, E experts, K experts per token, EP ranks, S source rank, D owner rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.ambient import building
from epmoe.core.errors import InputError
from epmoe.core.expert_tables import ExpertTables
from epmoe.core.groups import EPGroup
from epmoe.core.ids import look_up, named
from epmoe.core.placement import Placement
from epmoe.core.tables import WholeTable

Matrix = tuple[tuple[int, ...], ...]


class RoutingCounter:
    """Counts of one source rank since it was made or `reset`."""

    def __init__(self, tables: ExpertTables):
        self._tables, placement = tables, tables.placement
        self._sizes = [placement.experts, placement.ranks, 1, 1]
        device = tables.owner_E.device
        with building():
            self._counts = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)

    def add(self, topk_ids_TK: Tensor) -> None:
        """Count one call's ids [T, K], int32 or int64; an id outside [0, E) is none. Waits for nothing."""
        with ledger.paused():  # the watching is not the layer
            owner_E, ranks = self._tables.owner_E, self._tables.placement.ranks
            self._counts += count_routing(topk_ids_TK, owner_E, ranks)

    def reset(self) -> None:
        """Begin again at zero, in place."""
        self._counts.zero_()

    def read(self, group: EPGroup) -> "RoutingStats":
        """What all ranks counted. Collective over the control plane; waits for the device."""
        counted = group.all_gather_ints(self._counts.tolist())
        owners = self._tables.owner_SE.tolist()
        return _stats([torch.tensor(row).split(self._sizes) for row in counted], owners)


def count_routing(topk_ids_TK: Tensor, owner_E: Tensor, ranks: int) -> Tensor:
    """One call's counts on the ids' device, [E + EP + 2] int64 side by side.

    They are: assignments of every expert; tokens that name at least one expert of every rank; tokens that name none of
    any rank; tokens. An expert named twice in one token is two assignments and one hit; an owner of EP is no rank.
    """
    tokens, experts = len(topk_ids_TK), len(owner_E)
    ids_TK = topk_ids_TK.long()
    owner_TK = look_up(owner_E, ids_TK, ranks).long()
    hit_TD = ids_TK.new_zeros(tokens, ranks + 1).scatter_(1, owner_TK, 1)[:, :ranks]
    visits_E = ids_TK.new_zeros(experts + 1)
    visited_N = torch.where(named(ids_TK, experts), ids_TK, experts).flatten()
    visits_E.index_add_(0, visited_N, torch.ones_like(visited_N))
    idle = (hit_TD.sum(dim=1) == 0).sum().view(1)
    return torch.cat([visits_E[:experts], hit_TD.sum(dim=0), idle, torch.full_like(idle, tokens)])


def count_draw(topk_ids: Sequence[Tensor], placement: Placement) -> "RoutingStats":
    """The statistics of one draw; topk_ids[s] is what source rank s brings."""
    owners = [placement.owners_from(source) for source in range(placement.ranks)]
    sizes, counted = [placement.experts, placement.ranks, 1, 1], []
    for ids_TK, owner_E in zip(topk_ids, owners, strict=True):
        table_E = torch.tensor(owner_E, device=ids_TK.device)
        counted.append(count_routing(ids_TK, table_E, placement.ranks).cpu().split(sizes))
    return _stats(counted, owners)


def _stats(counted: Sequence[Sequence[Tensor]], owners: Sequence[Sequence[int]]) -> "RoutingStats":
    visits, hits, idle, tokens = zip(*counted, strict=True)
    return RoutingStats(
        visits_SE=_rows(visits),
        owners_SE=tuple(tuple(row) for row in owners),
        hits_SD=_rows(hits),
        idle=tuple(int(n) for n in idle),
        tokens=tuple(int(n) for n in tokens),
    )


def _rows(tensors: Sequence[Tensor]) -> Matrix:
    return tuple(tuple(row.tolist()) for row in tensors)


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """What was routed where, over all calls that were counted. Whole numbers.

    Attributes:
        visits_SE: assignments of source rank s to expert e, [EP][E].
        owners_SE: the owner of expert e as rank s sees it, [EP][E]; EP where nobody holds it.
        hits_SD: tokens of source rank s that name at least one expert of rank d, [EP][EP]: the rows that are needed.
        idle: tokens of every source rank that name no expert of any rank.
        tokens: of every source rank.
        delivered: rows that every rank's experts were given, where somebody counted them.
    """

    visits_SE: Matrix
    owners_SE: Matrix
    hits_SD: Matrix
    idle: tuple[int, ...]
    tokens: tuple[int, ...]
    delivered: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        """EP."""
        return len(self.tokens)

    @property
    def visits(self) -> tuple[int, ...]:
        """Assignments of every expert."""
        return tuple(sum(column) for column in zip(*self.visits_SE, strict=True))

    @property
    def slots_SD(self) -> Matrix:
        """Assignments of source rank s that owner rank d computes, [EP][EP]."""
        sums = [[0] * (self.ranks + 1) for _ in self.tokens]
        for row, visits, owners in zip(sums, self.visits_SE, self.owners_SE, strict=True):
            for count, owner in zip(visits, owners, strict=True):
                row[owner] += count
        return tuple(tuple(row[: self.ranks]) for row in sums)

    @property
    def assignments(self) -> tuple[int, ...]:
        """(token, expert) pairs that every rank computes."""
        return tuple(sum(column) for column in zip(*self.slots_SD, strict=True))

    @property
    def active(self) -> tuple[int, ...]:
        """Experts of every rank that have at least one assignment there."""
        named = {
            (owner, expert)
            for visits, owners in zip(self.visits_SE, self.owners_SE, strict=True)
            for expert, (count, owner) in enumerate(zip(visits, owners, strict=True))
            if count
        }
        return tuple(sum(owner == rank for owner, _ in named) for rank in range(self.ranks))

    @property
    def needed(self) -> tuple[int, ...]:
        """Rows that every rank needs: one per token that names at least one of its experts."""
        return tuple(sum(column) for column in zip(*self.hits_SD, strict=True))

    @property
    def needed_share(self) -> float | None:
        """Of the rows that were sent, a rank's own to itself included, those that were needed; None if not counted."""
        sent = sum(self.delivered or ())
        return sum(self.needed) / sent if sent else None

    @property
    def rank_imbalance(self) -> float:
        """Assignments of the fullest rank over the mean of all ranks; 1 is even (and nothing at all is even)."""
        return _over_mean(self.assignments)

    @property
    def expert_imbalance(self) -> float:
        """Assignments of the busiest expert over the mean of all experts."""
        return _over_mean(self.visits)

    def __add__(self, other: "RoutingStats") -> "RoutingStats":
        """Both together; of the same map, and without `delivered`, which belongs to the whole."""
        if self.owners_SE != other.owners_SE:
            raise InputError("the owners differ: add up statistics of one placement and one mask")
        return RoutingStats(
            visits_SE=_sums(self.visits_SE, other.visits_SE),
            owners_SE=self.owners_SE,
            hits_SD=_sums(self.hits_SD, other.hits_SD),
            idle=_sums([self.idle], [other.idle])[0],
            tokens=_sums([self.tokens], [other.tokens])[0],
        )

    def with_delivered(self, delivered: Sequence[int]) -> "RoutingStats":
        """The same with the rows that every rank's experts were given. Raises InputError for fewer than were needed."""
        for rank, (given, needed) in enumerate(zip(delivered, self.needed, strict=True)):
            if given < needed:
                raise InputError(
                    f"rank {rank} was given {given} rows and needs {needed}: count the same calls"
                )
        return RoutingStats(**{**vars(self), "delivered": tuple(delivered)})


def _sums(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]]) -> Matrix:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(a, b, strict=True))


def _over_mean(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def render(stats: RoutingStats, active_per_call: Sequence[float] | None = None) -> RenderableType:
    """One row per rank, and below what holds for all of them.

    Args:
        stats: of one or more calls.
        active_per_call: active experts of every rank in one call on average, to show in place of those of all calls.
    """
    table = WholeTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    active = "active" if active_per_call is None else "active\na call"
    names = ("rank", "tokens", "idle", "assigned", "over\nmean", active)
    table.numbers(*names, *(("given", "needed") if stats.delivered else ()))
    mean = sum(stats.assignments) / stats.ranks
    for rank, assigned in enumerate(stats.assignments):
        share = f"{assigned / mean:.2f}" if mean else "-"
        cells = [rank, stats.tokens[rank], stats.idle[rank], assigned, share]
        cells.append(f"{active_per_call[rank]:.1f}" if active_per_call else stats.active[rank])
        cells += [stats.delivered[rank], stats.needed[rank]] if stats.delivered else []
        table.add_row(*map(str, cells))
    return Group(table, Text(_in_words(stats)))


def _in_words(stats: RoutingStats) -> str:
    visits = stats.visits
    named = sum(1 for count in visits if count)
    lines = [
        "Tokens, and of them idle ones without an expert, by source rank; the rest by owner rank.",
        f"{named} of {len(visits)} experts are named; the busiest, expert {visits.index(max(visits))}, {max(visits)} "
        f"times, {stats.expert_imbalance:.2f} times the mean of the experts.",
        f"The fullest rank computes {stats.rank_imbalance:.2f} times the mean of the ranks.",
    ]
    if stats.needed_share is not None:
        lines.append(
            f"{stats.needed_share:.0%} of the rows given to experts are needed: one per token and rank that it names."
        )
    return "\n".join(lines)
