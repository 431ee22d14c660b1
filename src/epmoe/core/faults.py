"""When a rank dies: the others make a smaller group and go on with the weights that they hold.

    try:
        y_TH = layer(x_TH, topk_ids_TK, topk_weights_TK)
    except RuntimeError as error:
        if not is_consequence(error):  # it says more than that a peer has gone
            raise
        gone = ask_the_supervisor()                     # such as [1]: ranks of `group`
        group = regroup(group, gone, "/shared/after-1")
        layer = rebuild(layer, gone, group)

Who has died, a transport cannot say: a rank that fails in an exchange closes its connections, which looks like a death
to the next one. So whoever started the ranks has to tell. Ranks that wait in an exchange with the dead one are woken by
an error: gloo at once, NCCL at the group's time limit (https://docs.pytorch.org/docs/stable/distributed.html).

For ranks that still live and shall hold no experts any more, `MoELayer.mask_ranks` is enough: no new group is needed.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from epmoe.core import groups
from epmoe.core.errors import DisagreementError, InputError, RankFailedError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.placement import gone_ranks
from epmoe.core.ranks.rank_worker import is_consequence

__all__ = ["is_consequence", "rebuild", "regroup"]


def regroup(
    group: EPGroup,
    gone: Iterable[int],
    rendezvous: str | os.PathLike,
    timeout: float = 120.0,
) -> EPGroup:
    """The group of those that are left, in their order. Every survivor calls it, and nobody else.

    The old group is abandoned: its layers can be closed, and called no more.

    Args:
        group: made by `groups.init` or `groups.from_torchrun`, so torch's default group.
        gone: ranks of `group` that have died.
        rendezvous: where the survivors meet: a new file or url, never that of the old group.
        timeout: seconds to meet in, and the new group's limit for each exchange.

    Raises:
        InputError: unknown ranks, all of them, this one among them, or a group that somebody else made.
        DisagreementError: another survivor says that others have died.
        RankFailedError: they did not all come within `timeout`; the same group may be regrouped again.
    """
    gone = gone_ranks(gone, group.size)
    if group.rank in gone:
        raise InputError(f"this is rank {group.rank}, which is said to be gone: {list(gone)}")
    if group.size > 1 and not group.owns_process_group:
        raise InputError(
            "this group was joined: let its maker make a new one, and use groups.join again"
        )
    left = [rank for rank in range(group.size) if rank not in gone]
    group.abandon()
    number, who = left.index(group.rank), partial(_claim, group.rank, left, list(gone), timeout)
    try:
        return groups.init(number, len(left), group.device, rendezvous, timeout, first=who)
    except RuntimeError as error:
        raise RankFailedError(
            f"ranks {left} did not all meet at {os.fspath(rendezvous)} within {timeout:g} s: {error}. Is another one "
            "gone? Regroup at a new place"
        ) from error


def _claim(rank: int, left: list[int], gone: list[int], timeout: float, store: Any) -> None:
    """Wait until all that are left have said who is gone, and raise where one says something else.

    On the store, before torch makes a group: one that failed half way would count, and name the next one otherwise than
    on ranks where it did not.
    """
    store.set(f"gone/{rank}", str(gone))
    keys = [f"gone/{other}" for other in left]
    store.wait(keys, timedelta(seconds=timeout))
    for other, key in zip(left, keys, strict=True):
        said = store.get(key).decode()
        if said != str(gone):
            raise DisagreementError(
                f"ranks disagree about who is gone: {other} says {said}, {rank} says {gone}"
            )


def rebuild(layer: MoELayer, gone: Iterable[int], group: EPGroup) -> MoELayer:
    """The same layer on the group of those left: same weights, options, rules and wishes. Collective on `group`.

    Experts whose homes have all died are lost; the layer's `lost` says what becomes of their assignments. A mask that
    was set holds for the ranks that are still there. CUDA graphs of the old layer must be captured again, and
    counting (`MoELayer.counter`) has to be set up again, since counts of another map would not add up.

    Args:
        layer: of the old group; it is closed.
        gone: ranks of the old group, as for `regroup`.
        group: what `regroup` returned.

    Raises:
        InputError: unknown ranks or no expert is left (the old layer stays open then), or the stage cannot serve a map
            with lost experts; the same on every rank.
    """
    spec = layer.spec
    gone = gone_ranks(gone, spec.group.size)
    placement = spec.placement.without(gone)
    how: dict[str, Any] = {"check": spec.check, "overflow": spec.overflow, "lost": spec.lost}
    how |= {"wishes": spec.wishes, **spec.options}
    layer.close()
    rebuilt = build(
        spec.stage,
        spec.shape,
        spec.weights,
        placement,
        group,
        spec.max_tokens_per_rank,
        **how,
    )
    left = [rank for rank in range(spec.group.size) if rank not in gone]
    masked = [left.index(rank) for rank in spec.tables.gone if rank in left]
    if masked:
        rebuilt.mask_ranks(masked)
    return rebuilt
