"""What a layer is built from.

Legend: C = max_tokens_per_rank, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from epmoe.core.ambient import building
from epmoe.core.capabilities import Wishes
from epmoe.core.expert_tables import ExpertTables
from epmoe.core.groups import EPGroup
from epmoe.core.placement import Placement
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Everything a stage is built from; checked by `build` before a stage sees it.

    Attributes:
        stage: the registered name.
        shape, placement: global, the same on all ranks.
        weights: of this rank's experts, in slot order.
        group: the expert-parallel group; rank r of it owns `placement.experts_of(r)`.
        max_tokens_per_rank: C, declared, the same on all ranks; a call may bring 0 to C tokens.
        check: exchange a fingerprint of every call's arguments first (debug; costs a round trip).
        overflow: what a call with more than C tokens does, "raise" or "rounds".
        lost: what becomes of assignments to experts that nobody holds any more, "drop" or "renormalise".
        options: the stage's own keyword options.
        wishes: what else the layer must be able to do.
        chosen_by: how the stage was chosen: "name", "ladder order" or "measured: ...".
    """

    stage: str
    shape: MoEShape
    weights: ExpertWeights
    placement: Placement
    group: EPGroup
    max_tokens_per_rank: int
    check: bool = False
    overflow: str = "raise"
    lost: str = "drop"
    options: Mapping[str, object] = field(default_factory=dict)
    wishes: Wishes = field(default_factory=Wishes)
    chosen_by: str = "name"

    @property
    def device(self) -> torch.device:
        return self.group.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @cached_property
    def tables(self) -> ExpertTables:
        """The expert map on the device; one for the whole layer."""
        with building():
            return ExpertTables(self.placement, self.group.rank, self.device)
