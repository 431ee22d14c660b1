"""Which ranks hold which expert, and at which place of their weight tensors.

Worked on the toy (4 experts on 2 ranks):

    contiguous    owner 0 0 1 1   slot 0 1 0 1
    round robin   owner 0 1 0 1   slot 0 0 1 1

When EP does not divide E, the first ranks hold one expert more: 30 experts on 8 ranks are 4 4 4 4 4 4 3 3, and 3
experts on 4 ranks are 1 1 1 0. A rank without an expert still takes part in every exchange.

Replicas. A hot expert may have several homes (redundant experts, an idea of DeepSeek's load balancer EPLB,
https://github.com/deepseek-ai/EPLB). Which of them serves an assignment, its source rank decides alone: its own replica
if it has one; otherwise the ranks without one take the replicas in turn. So the map, SEEN FROM ONE RANK, is still one
owner and one slot per expert. 4 experts on 3 ranks, homes (0 1) (0) (1 2) (2):

    seen from 0   owner 0 0 1 2   slot 0 1 1 1
    seen from 1   owner 1 0 1 2   slot 0 1 1 1
    seen from 2   owner 0 0 2 2   slot 0 1 0 1

The choice looks at no load and no token. Therefore nothing has to be counted, exchanged or read back: a call can be
captured in a CUDA graph, and a token's expert is computed on the same rank whoever shares its batch.
"""

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.reading import parse_json, read_text
from epmoe.core.values import check_whole, is_whole

KINDS = ("contiguous", "round_robin", "explicit", "replicated")


@dataclass(frozen=True)
class Placement:
    """An expert map; slots of a rank follow ascending expert ids.

    Attributes:
        homes: homes[e] are the ranks that hold global expert e, ascending; () for an expert that is lost (see
            `without`).
        ranks: EP.
        kind: one of `KINDS`: what a stage declares that it can serve.
    """

    homes: tuple[tuple[int, ...], ...]
    ranks: int
    kind: str = "explicit"

    def __post_init__(self):
        if not is_whole(self.ranks) or self.ranks < 1:
            raise InputError(
                f"ranks={self.ranks!r}: a placement needs a whole number of at least one rank"
            )
        if not any(self.homes):
            raise InputError("a placement needs at least one expert")
        for expert, homes in enumerate(self.homes):
            for rank in homes:
                if not is_whole(rank) or not 0 <= rank < self.ranks:
                    raise InputError(
                        f"expert {expert} is placed on rank {rank!r}: ranks are 0 to {self.ranks - 1}"
                    )
            if list(homes) != sorted(set(homes)):
                raise InputError(
                    f"expert {expert} is placed on ranks {homes}: name each rank once, in ascending order"
                )

    @property
    def experts(self) -> int:
        """E, the number of global experts."""
        return len(self.homes)

    @property
    def owners(self) -> tuple[int, ...]:
        """owner[e], where every rank sees the same one. InputError for replicas: ask `owners_from`."""
        self._refuse_replicas("owners")
        return self.owners_from(0)

    @property
    def slots(self) -> tuple[int, ...]:
        """slot[e]: the place of expert e in its owner's weight tensors; InputError as `owners`."""
        self._refuse_replicas("slots")
        return self.slots_from(0)

    @property
    def lost(self) -> tuple[int, ...]:
        """Experts that live nowhere."""
        return tuple(e for e, homes in enumerate(self.homes) if not homes)

    def owners_from(self, source: int, gone: Iterable[int] = ()) -> tuple[int, ...]:
        """The owner of every expert as `source` sees it, when the ranks `gone` hold nothing any more.

        EP, one past the last rank, where nobody is left: an owner that equals no rank, and indexes none.
        """
        self._check_rank(source)
        gone = frozenset(gone)
        left = (tuple(rank for rank in homes if rank not in gone) for homes in self.homes)
        return tuple(serving(homes, source) if homes else self.ranks for homes in left)

    def slots_from(self, source: int, gone: Iterable[int] = ()) -> tuple[int, ...]:
        """The slot of every expert on the owner that `source` sees; -1 where nobody is left."""
        owners = self.owners_from(source, gone)
        return tuple(
            -1 if owner == self.ranks else self._slot_of[owner][e] for e, owner in enumerate(owners)
        )

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Global ids of the experts that `rank` holds, replicas included, in slot order."""
        self._check_rank(rank)
        return tuple(self._slot_of[rank])

    def counts(self) -> tuple[int, ...]:
        """E_local of every rank."""
        return tuple(map(len, self._slot_of))

    def owner_table(self, device: torch.device | str = "cpu", source: int | None = None) -> Tensor:
        """owner_E [E] int32 on `device`, seen from `source`; from anywhere by default, as `owners`."""
        owners = self.owners if source is None else self.owners_from(source)
        return torch.tensor(owners, dtype=torch.int32, device=device)

    def slot_table(self, device: torch.device | str = "cpu", source: int | None = None) -> Tensor:
        """slot_E [E] int32 on `device`, as `owner_table`."""
        slots = self.slots if source is None else self.slots_from(source)
        return torch.tensor(slots, dtype=torch.int32, device=device)

    def without(self, gone: Iterable[int]) -> "Placement":
        """The map of the ranks that are left, renumbered in their order, when the ranks `gone` have died.

        A survivor keeps its experts and their slots, so its weights serve as they are. An expert whose homes have all
        died is in `lost`.

        Raises:
            InputError: an unknown rank, or nothing is left.
        """
        gone = gone_ranks(gone, self.ranks)
        number = {rank: i for i, rank in enumerate(r for r in range(self.ranks) if r not in gone)}
        left = tuple(tuple(number[r] for r in homes if r in number) for homes in self.homes)
        if not any(left):
            raise InputError(f"without ranks {list(gone)} no expert is left: load the model again")
        return Placement(left, len(number), _kind_of(left) if gone else self.kind)

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {"kind": self.kind, "ranks": self.ranks, "homes": [list(h) for h in self.homes]}

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(self.as_dict()) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """The placement of such a text. Raises InputError for anything else."""
        try:
            data = parse_json(text)
            if isinstance(data, list):
                raise InputError("it holds the maps of several layers: write one, with --layer")
            kind, ranks, homes = data["kind"], data["ranks"], data["homes"]
            placement = cls(tuple(tuple(home) for home in homes), ranks, kind)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"this text is no placement as `epmoe balance --json` writes it: {error}"
            ) from error
        if not _fits(placement):
            raise InputError(f"kind={kind!r} does not fit the homes: choose {', '.join(KINDS)}")
        return placement

    @cached_property
    def _slot_of(self) -> list[dict[int, int]]:
        """By rank: expert -> slot, in slot order; one pass over the homes for all ranks together."""
        found: list[dict[int, int]] = [{} for _ in range(self.ranks)]
        for expert, homes in enumerate(self.homes):
            for rank in homes:
                found[rank][expert] = len(found[rank])
        return found

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise InputError(f"rank={rank}: this placement has ranks 0 to {self.ranks - 1}")

    def _refuse_replicas(self, what: str) -> None:
        expert = next((e for e, homes in enumerate(self.homes) if len(homes) > 1), None)
        if expert is not None:
            raise InputError(
                f"expert {expert} lives on ranks {self.homes[expert]}: its owner depends on the source rank, "
                f"ask for {what}_from(source)"
            )


def contiguous(experts: int, ranks: int) -> Placement:
    """Neighbouring experts share a rank; the first `experts % ranks` ranks hold one more."""
    _check(experts, ranks)
    return Placement(_in_blocks(experts, ranks), ranks, "contiguous")


def round_robin(experts: int, ranks: int) -> Placement:
    """Expert e lives on rank e modulo `ranks`: neighbouring (often alike) experts spread out."""
    _check(experts, ranks)
    return Placement(_in_turn(experts, ranks), ranks, "round_robin")


NAMED = {"contiguous": contiguous, "round_robin": round_robin}


def explicit(owners: Sequence[int], ranks: int) -> Placement:
    """Any map: owners[e] is the rank of expert e."""
    return Placement(tuple((_whole(owner, "an owner"),) for owner in owners), ranks, "explicit")


def replicated(homes: Sequence[Sequence[int]], ranks: int) -> Placement:
    """Any map with replicas: homes[e] are the ranks of expert e, at least one, in any order. Without a second home
    anywhere it is an explicit map, and its kind says so."""
    found = tuple(tuple(sorted(_whole(rank, "a home") for rank in held)) for held in homes)
    empty = next((e for e, held in enumerate(found) if not held), None)
    if empty is not None:
        raise InputError(f"expert {empty} is placed nowhere: give it at least one rank")
    return Placement(found, ranks, _kind_of(found))


def parse_placement(text: str, experts: int, ranks: int) -> Placement:
    """contiguous, round_robin, or the map in a file that `epmoe balance --json FILE` wrote.

    Raises:
        InputError: no such name or file, or a map of other experts or ranks.
    """
    if text in NAMED:
        return NAMED[text](experts, ranks)
    if not Path(text).is_file():
        raise InputError(f"placement={text!r}: give {', '.join(NAMED)} or a file that exists")
    try:
        placement = Placement.from_json(read_text(Path(text), "placement"))
    except InputError as error:
        raise InputError(f"placement={text!r}: {error}") from error
    if (placement.experts, placement.ranks) != (experts, ranks):
        raise InputError(
            f"{text} maps {placement.experts} experts on {placement.ranks} ranks, wanted are {experts} on {ranks}"
        )
    return placement


def gone_ranks(gone: Iterable[int], ranks: int) -> tuple[int, ...]:
    """The ranks of `gone`, each once, ascending; uses an iterator up. Raises InputError for an unknown rank, or all."""
    if not isinstance(gone, Iterable):
        raise InputError(f"gone={gone!r}: give the ranks as a collection, such as ({gone!r},)")
    found = tuple(gone)
    for rank in found:
        if not is_whole(rank) or not 0 <= rank < ranks:
            raise InputError(f"rank {rank!r} cannot be gone: ranks are 0 to {ranks - 1}")
    if len(set(found)) == ranks:
        raise InputError(f"all {ranks} ranks are gone: at least one has to be left")
    return tuple(sorted(set(found)))


def serving(homes: Sequence[int], source: int) -> int:
    """Which of the homes (ascending, at least one) answers `source`: its own replica, or one by turns."""
    if source in homes:
        return source
    before = source - sum(rank < source for rank in homes)  # sources without a replica before this
    return homes[before % len(homes)]


def _in_blocks(experts: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    share, extra = divmod(experts, ranks)
    held = (share + (rank < extra) for rank in range(min(experts, ranks)))
    return tuple((rank,) for rank, count in enumerate(held) for _ in range(count))


def _in_turn(experts: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((e % ranks,) for e in range(experts))


def _fits(placement: Placement) -> bool:
    """Whether the homes are what the kind says: stages may compute with a named map instead of reading it."""
    if placement.kind in NAMED:
        return placement == NAMED[placement.kind](placement.experts, placement.ranks)
    return placement.kind == _kind_of(placement.homes)


def _whole(value: object, what: str) -> int:
    """An int, also of numpy or torch; never a fraction cut off, nor a truth value."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        pass
    raise InputError(f"{what} is {value!r}: give the whole number of a rank")


def _kind_of(homes: tuple[tuple[int, ...], ...]) -> str:
    return "replicated" if any(len(held) > 1 for held in homes) else "explicit"


def _check(experts: int, ranks: int) -> None:
    check_whole("experts", experts, 1)
    check_whole("ranks", ranks, 1)
