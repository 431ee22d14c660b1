"""Whether weights fit into a machine's memory: asked before they are drawn.

A system that runs out of memory ends programs without a word, and maybe those of others.
"""

import socket
from collections import defaultdict

import torch

from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.machine import available_memory_gib
from epmoe.core.placement import Placement
from epmoe.core.shape import MoEShape

_BESIDES_WEIGHTS = 1.25  # times the weights: a quarter more for buffers, answers and libraries


def rank_weight_bytes(shape: MoEShape, placement: Placement, dtype: torch.dtype) -> int:
    """Bytes of one layer's experts on the fullest rank."""
    return max(placement.counts()) * shape.expert_parameters() * dtype.itemsize


def check_room(
    group: EPGroup, shape: str, layers: int, layer_bytes: int, option: str | None = None
) -> None:
    """Refuse weights that do not fit into the memory of a CPU's machine, on every rank. Collective.

    Ranks that share a machine share its memory. On a GPU, and where nobody can tell what is free, nothing is refused.

    Args:
        group: the ranks that are about to draw weights, each its own.
        shape: its name, for the message.
        layers: how many layers each rank draws.
        layer_bytes: as `rank_weight_bytes`.
        option: what sets the number of layers, where the user can; the message says how many fit.

    Raises:
        InputError: on some machine they need more than is free; the same on every rank.
    """
    if group.device.type != "cpu":
        return
    free_by_host = defaultdict(list)
    for host, free in group.all_gather_objects((socket.gethostname(), available_memory_gib())):
        free_by_host[host].append(free)
    for frees in free_by_host.values():
        known = [free for free in frees if free is not None]
        need = len(frees) * layers * layer_bytes * _BESIDES_WEIGHTS / 2**30
        if known and need > min(known):
            fitting = int(layers * min(known) / need)
            fewer = f"use {option} {fitting} or " if option and fitting else "use "
            raise InputError(
                f"needs {need:.1f} GiB for {counted(layers, 'layer')} of {shape} on "
                f"{counted(len(frees), 'rank')} of this machine, {min(known):.1f} are free: {fewer}--shape tiny"
            )


def counted(number: int, what: str) -> str:
    """A number of things in words: 1 rank, 2 ranks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
