"""The one seam: every stage is a `MoELayer`, made by `build`.

    layer = build(stage, shape, weights, placement, group, max_tokens_per_rank)      # collective
    y_TH = layer(x_TH, topk_ids_TK, topk_weights_TK)                                 # collective
    layer.close()                                                                    # collective

Legend: T tokens on this rank, H hidden, K experts per token, E experts, EP ranks, C = max_tokens_per_rank.

More tokens than C? With overflow="raise" that is an error; with "rounds" the call runs as several, as many on every
rank as the fullest rank needs. How full that is, all ranks must know: the caller declares it (`max_tokens=`), or the
ranks tell each other over the control plane, outside captured code.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from epmoe.core import ambient, choosing, ledger, registry
from epmoe.core.agreement import agree, together
from epmoe.core.ambient import building, calling, no_autocast
from epmoe.core.bound import BoundToGroup
from epmoe.core.capabilities import Capabilities, Wishes
from epmoe.core.checks import (
    bad_id,
    check_capturable,
    check_spec,
    fingerprint_of,
    problem_with_call,
    problem_with_logits,
    ranks_to_mask,
)
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.ids import clamped
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.phases import phase, phased
from epmoe.core.placement import Placement
from epmoe.core.rounds import plan_rounds
from epmoe.core.routing import route
from epmoe.core.routing_stats import RoutingCounter
from epmoe.core.shape import MoEShape
from epmoe.core.values import dtype_name
from epmoe.core.warming import warm_up
from epmoe.core.weights import ExpertWeights


class MoELayer(BoundToGroup, ABC):
    """One complete expert-parallel layer of routed experts.

    A call takes this rank's tokens and returns their outputs: y[t] = sum over k of w[t, k] * f_{ids[t, k]}(x[t]), added
    up in float32. Ids outside [0, E) name no expert and contribute zero; an expert named twice counts twice.

    Attributes:
        counter: counts where the tokens of every call go, None (the default) for not at all.
    """

    def __init__(self, spec: LayerSpec):
        self.spec = spec
        self.closed = False
        self.counter: RoutingCounter | None = None

    @property
    def capabilities(self) -> Capabilities:
        return registry.load(self.spec.stage).capabilities_with(self.spec.options)

    @phased("call")
    def __call__(
        self,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        *,
        max_tokens: int | None = None,
    ) -> Tensor:
        """Run the layer. Collective: every rank calls it equally often, with 0 or more tokens.

        Args:
            x_TH: [T, H] in the weights' dtype, any strides.
            topk_ids_TK: [T, K] int32 or int64 global expert ids, -1 for none.
            topk_weights_TK: [T, K] float32.
            max_tokens: the most tokens that any rank brings to this call, where the caller knows it (the same number
                on all ranks): buffers shrink to it, and no rank has to ask the others.

        Returns:
            y_TH: [T, H], contiguous, in x's dtype; never an alias of an input.

        Raises:
            InputError: before any communication. With `check` on (EPMOE_CHECK=1) the same on all ranks.
            NotCapturableError: in a CUDA graph capture, by stages that wait for the host.
        """
        self._refuse_capture()
        self._check(x_TH, topk_ids_TK, topk_weights_TK, max_tokens)
        topk_ids_TK = clamped(topk_ids_TK, self.spec.shape.experts).to(torch.int32)
        rounds = plan_rounds(self.spec, len(x_TH), max_tokens, ambient.capturing(self.spec.device))
        with calling(x_TH.device, self):
            if self.counter is not None:
                self.counter.add(topk_ids_TK)
            if self.spec.lost == "renormalise":
                topk_weights_TK = self.spec.tables.renormalise(topk_ids_TK, topk_weights_TK)
            if rounds.count == 1:
                return self.forward(x_TH, topk_ids_TK, topk_weights_TK, rounds.capacity)
            # whole from the start: parts and their concatenation would hold a long prompt twice
            y_TH = x_TH.new_empty(x_TH.shape)
            for part in rounds.slices():
                y_TH[part] = self.forward(
                    x_TH[part], topk_ids_TK[part], topk_weights_TK[part], rounds.capacity
                )
            return y_TH

    def from_logits(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Tensor:
        """Route, then run: logits_TE [T, E] become ids and weights by the shape's router. A stage may fuse the two.

        Args and errors as in `__call__` and `epmoe.core.routing.route`. Collective.
        """
        self._raise(problem_with_logits(self.spec, x_TH, logits_TE, bias_E), {})
        shape = self.spec.shape
        with phase("route"), no_autocast(self.spec.device):
            ids_TK, weights_TK = route(logits_TE, shape.router, shape.topk, bias_E)
        return self(x_TH, ids_TK, weights_TK, max_tokens=max_tokens)

    @property
    def fuses_router(self) -> bool:
        """Whether `from_logits` routes inside the layer's own exchange, where one round will do."""
        return False

    @abstractmethod
    def forward(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, capacity: int
    ) -> Tensor:
        """The stage's own work, one round of it.

        Arguments are checked, ids are int32, T <= capacity <= C, and capacity is the same on all ranks.
        """

    def mask_ranks(self, gone: Iterable[int]) -> None:
        """From the next call on the ranks `gone` hold no expert; () takes them all back. For a group that still lives.

        Every rank calls it with the same ranks; nothing is sent, except in checked mode, which compares them. Replicas
        on other ranks take over; what `lost` in `build` says happens to the rest. Masked ranks still take part in every
        call, with tokens if they have any. Tables change in place, on the current stream: captured CUDA graphs follow.

        Raises:
            InputError: an unknown rank, all ranks, a closed layer, or inside a capture. UnsupportedError: the stage is
                not maskable.
        """
        problem, ranks = self._problem_if_closed(), ()
        try:
            ranks = ranks_to_mask(self.spec, gone, ambient.capturing(self.spec.device))
        except InputError as error:
            problem = problem or error
        self._raise(problem, {"gone": ranks})
        self.spec.tables.mask(ranks)

    def warmup(self) -> None:
        """Run once at every one of `warmup_capacities`, so that nothing is compiled or allocated later. Collective.

        From logits too, where `fuses_router`. `counter` does not see these tokens.
        """
        warm_up(self)

    def warmup_capacities(self) -> tuple[int, ...]:
        """The most tokens of any rank in calls that together use every kernel that a call of 0 to C tokens may use."""
        return (1, self.spec.max_tokens_per_rank)

    def close(self) -> None:
        """Give back what the layer holds. Collective, explicit, may be called twice; the group stays open."""
        self.closed = True

    def describe(self) -> dict[str, object]:
        """What this layer is and chose, for reports."""
        spec = self.spec
        return {
            "stage": spec.stage,
            "chosen_by": spec.chosen_by,
            "shape": spec.shape.name,
            "ranks": spec.group.size,
            "placement": spec.placement.kind,
            "gone": list(spec.tables.gone),
            "dtype": dtype_name(spec.dtype),
            "device": spec.device.type,
            "transport": spec.group.transport,
            "max_tokens_per_rank": spec.max_tokens_per_rank,
        }

    def _check(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, max_tokens: int | None
    ) -> None:
        """Raise what is wrong with the arguments: of this rank, or, in checked mode, of any rank on all of them."""
        capturing = ambient.capturing(self.spec.device)
        problem = problem_with_call(self.spec, x_TH, ids_TK, weights_TK, max_tokens, capturing)
        problem = self._problem_if_closed() or problem
        if problem is None and self.spec.check and not capturing:
            with ledger.paused():  # the check is not the layer
                problem = bad_id(ids_TK, self.spec.shape.experts)
        self._raise(problem, {"max_tokens": max_tokens})

    def _problem_if_closed(self) -> InputError | None:
        text = f"this {self.spec.stage} layer is closed: build a new one"
        return InputError(text) if self.closed else None

    def _raise(self, problem: InputError | None, fingerprint: dict[str, object]) -> None:
        """Raise this rank's problem; in checked mode anybody's, or what differs, on all ranks."""
        if self.spec.check and not ambient.capturing(self.spec.device):
            agree(self.spec.group, fingerprint, problem)
        elif problem is not None:
            raise problem

    def _refuse_capture(self) -> None:
        if ambient.capturing(self.spec.device):
            check_capturable(self.spec.stage, self.capabilities)


def build(
    stage: str,
    shape: MoEShape,
    weights: ExpertWeights,
    placement: Placement,
    group: EPGroup,
    max_tokens_per_rank: int,
    *,
    check: bool | None = None,
    overflow: str | None = None,
    lost: str = "drop",
    wishes: Wishes | None = None,
    **options: object,
) -> MoELayer:
    """Build a layer. Collective: all ranks call it with the same stage, shape, placement, capacity and options.

    Args:
        stage: a registered name, its bare name or its number, or a pair of parts; or "auto", for what
            `choosing.select` takes: `describe()["chosen_by"]` says by what.
        shape: sizes of the layer.
        weights: this rank's experts, in slot order (`placement.experts_of(group.rank)`).
        placement: which rank owns which expert.
        group: the expert-parallel group.
        max_tokens_per_rank: C, the tokens of a rank that the layer holds at once.
        check: compare arguments across ranks at every call; EPMOE_CHECK=1 by default.
        overflow: "raise" or "rounds" for calls with more than C tokens; the stage's own default.
        lost: "drop" or "renormalise": what becomes of assignments to experts that no rank holds (any more), because of
            `mask_ranks` or `Placement.without`: they contribute zero, or a token's remaining weights are scaled to add
            up to what all of them did (zeros where none remains).
        wishes: what else the layer must be able to do; a stage that cannot is refused with the reasons.
        options: the stage's own; an unknown one is refused with the list.

    Raises:
        InputError: the same on every rank, before any data moves.
    """
    if not isinstance(group, EPGroup):  # nobody to tell
        raise InputError(
            f"group={group!r:.80}: give an EPGroup, such as epmoe.core.groups.single()"
        )
    spec, fingerprint, problem = None, {}, None
    try:
        spec = LayerSpec(
            stage=stage if stage == choosing.AUTO else registry.resolve(stage),
            shape=shape,
            weights=weights,
            placement=placement,
            group=group,
            max_tokens_per_rank=max_tokens_per_rank,
            check=os.environ.get("EPMOE_CHECK") == "1" if check is None else check,
            overflow=choosing.overflow_of(stage) if overflow is None else overflow,
            lost=lost,
            options=options,
            wishes=Wishes() if wishes is None else wishes,
        )
        check_spec(spec)
        fingerprint = fingerprint_of(spec)
    except InputError as error:
        problem = error
    except Exception as error:  # raised here alone, it would leave the other ranks waiting
        problem = InputError(f"the layer cannot be built: {error!r}")
        problem.__cause__ = error
    agree(group, fingerprint, problem)
    assert spec is not None
    if spec.stage == choosing.AUTO:
        spec = choosing.settle(spec, overflow)

    def make() -> MoELayer:
        with building():
            return registry.load(spec.stage).factory(spec)

    return together(group, make)  # a stage may refuse what only it can judge
