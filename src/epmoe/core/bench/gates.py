"""What must hold before a time is worth taking: right, the same in a graph, the same again.

| gate   | what is compared                                  | how close                                      |
|--------|---------------------------------------------------|------------------------------------------------|
| oracle | sampled rows of every layer and draw              | `verify.tolerance`, relative to the terms      |
| replay | a graph replay with its eager twin, all rows      | bit for bit where determinism is declared      |
| repeat | two runs of the same chain, all rows              | bit for bit where determinism is declared      |

Elsewhere two results may differ by twice the tolerance of the largest value. Outputs hold NaN before a replay.

In loopback nobody else computes: row t is the sum over all EP sources of what this rank owes their token t.
Legend: T tokens, H hidden, E experts, K experts per token, S sampled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.core.bench.chains import Chain
from epmoe.core.bench.subjects import Setting
from epmoe.core.bench.workload import Tokens, layer_weights
from epmoe.core.errors import EpmoeError
from epmoe.core.loopback import local_share
from epmoe.core.verify import chosen_rows, differ, relative_error, tolerance
from epmoe.core.weights import ExpertWeights
from epmoe.reference.oracle import Answer, oracle

_ROUTER_TOLERANCE = 1e-5  # relative to the largest weight; exp and sigmoid differ in the last bits


class GateError(EpmoeError, RuntimeError):
    """A subject did not pass; the message says which gate and by how much. It gets no time."""


@dataclass(frozen=True)
class Expected:
    """What the sampled rows of one layer on one draw must be. rows_S are places in the output."""

    rows_S: Tensor
    y_SH: Tensor
    terms_S: Tensor


def expectations(setting: Setting, seed: int, limit: int) -> list[list[Expected]]:
    """[draw][layer]: the oracle's answer for the sampled rows, computed on the device.

    Args:
        setting: with its draws and weights.
        seed: of the weights; those of other ranks' experts are drawn again, one token at a time.
        limit: rows per layer and draw.
    """
    rows_S = chosen_rows(setting.tokens, limit).to(setting.device)
    return [
        [_expected(setting, seed, draw, layer, rows_S) for layer in range(len(setting.weights))]
        for draw in range(len(setting.draws))
    ]


def _expected(setting: Setting, seed: int, draw: int, layer: int, rows_S: Tensor) -> Expected:
    sources = setting.draws[draw].sources
    if setting.loopback:
        ranks = range(len(sources))
        answers = [_local_answer(setting, rank, sources[rank], layer, rows_S) for rank in ranks]
        y_SH = torch.stack([answer.y_TH for answer in answers]).sum(dim=0)
        return Expected(
            rows_S, y_SH, torch.stack([answer.terms_T for answer in answers]).sum(dim=0)
        )
    own = sources[setting.rank]
    answers = [_answer_of_row(setting, seed, own, layer, int(row)) for row in rows_S.tolist()]
    y_SH = torch.cat([answer.y_TH for answer in answers])
    return Expected(rows_S, y_SH, torch.cat([answer.terms_T for answer in answers]))


def _local_answer(
    setting: Setting, rank: int, source: Tokens, layer: int, rows_S: Tensor
) -> Answer:
    """What this rank's experts owe the sampled rows of one source, which is `rank`."""
    owners_E = setting.placement.owner_table(setting.device, rank)
    slots_E = setting.placement.slot_table(setting.device, rank)
    mine_SK = local_share(source.ids_TK[rows_S], owners_E, setting.rank)
    slots_SK = torch.where(mine_SK >= 0, slots_E[mine_SK.clamp(min=0).long()], -1)
    weights_SK = source.weights_TK[rows_S]
    return oracle(source.x_TH[rows_S], slots_SK, weights_SK, setting.weights[layer])


def _answer_of_row(setting: Setting, seed: int, own: Tokens, layer: int, row: int) -> Answer:
    """One token with the weights of just the experts that it names, wherever they live."""
    ids_K = own.ids_TK[row]
    named = sorted(set(ids_K.tolist()) - {-1})
    weights = _weights_of(setting, seed, layer, named)
    places = torch.tensor(
        [[named.index(e) if e >= 0 else -1 for e in ids_K.tolist()]], device=setting.device
    )
    return oracle(own.x_TH[row : row + 1], places, own.weights_TK[row : row + 1], weights)


def _weights_of(setting: Setting, seed: int, layer: int, experts: Sequence[int]) -> ExpertWeights:
    return layer_weights(
        setting.shape, experts, seed, layer, setting.dtype, setting.weights[0].device
    )


def check_chain(chain: Chain, expected: Sequence[Expected], dtype: torch.dtype) -> dict[str, float]:
    """Run all gates on one draw of one subject. Collective.

    Returns:
        the worst oracle error and its limit, for the record.

    Raises:
        GateError: the first gate that does not hold.
    """
    exact = chain.subject.deterministic
    worst = _against_oracle(chain.eager, expected, dtype, "eager")
    chain.poison()
    chain.run()
    first = [y_TH.clone() for y_TH in chain.outputs]
    worst = max(worst, _against_oracle(first, expected, dtype, "replay"))
    _same(chain.eager, first, exact, dtype, "replay equals eager")
    chain.poison()
    chain.run()
    _same(first, chain.outputs, exact, dtype, "repeat")
    return {"oracle_error": worst, "oracle_limit": tolerance(dtype)}


def check_router(setting: Setting) -> None:
    """Hold the subjects' common router against the reference, on the own tokens of every draw.

    In loopback nothing downstream would notice a wrong one: what is computed on was recorded before.

    Raises:
        GateError: other ids, or weights that are off by more than rounding.
    """
    for one in setting.draws:
        own = one.sources[setting.rank]
        # by id: two scores that are equal up to rounding may stand in either order
        ids_TK, weights_TK = _by_id(*setting.router(own.logits_TE, one.bias_E))
        wanted_TK, wanted_weights_TK = _by_id(own.ids_TK, own.weights_TK)
        if not torch.equal(ids_TK, wanted_TK):
            raise GateError(f"router {setting.router_name}: other ids than the reference's")
        off = float((weights_TK - wanted_weights_TK).abs().max())
        if not off <= _ROUTER_TOLERANCE * float(own.weights_TK.abs().max()):
            raise GateError(f"router {setting.router_name}: weights are off by {off:.2e}")


def _by_id(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    ids_TK, order_TK = ids_TK.sort(dim=1)
    return ids_TK, weights_TK.gather(1, order_TK)


def _against_oracle(
    outputs: Sequence[Tensor], expected: Sequence[Expected], dtype: torch.dtype, what: str
) -> float:
    worst = 0.0
    for layer, (y_TH, wanted) in enumerate(zip(outputs, expected, strict=True)):
        error_S = relative_error(y_TH[wanted.rows_S], wanted.y_SH, wanted.terms_S)
        error, place = error_S.max(dim=0)
        if float(error) > tolerance(dtype):
            row = int(wanted.rows_S[place])
            raise GateError(
                f"oracle ({what}): layer {layer}, row {row} is off by {float(error):.2e} of its terms, "
                f"allowed {tolerance(dtype):.2e}"
            )
        worst = max(worst, float(error))
    return worst


def _same(
    a: Sequence[Tensor], b: Sequence[Tensor], exact: bool, dtype: torch.dtype, gate: str
) -> None:
    for layer, (one, other) in enumerate(zip(a, b, strict=True)):
        if exact and differ(one, other):
            raise GateError(f"{gate}: layer {layer} has other bits, and determinism is declared")
        off = torch.nan_to_num((one.float() - other.float()).abs(), nan=float("inf"))
        limit = 2 * tolerance(dtype) * float(one.float().abs().max())
        if not exact and off.numel() and float(off.max()) > limit:
            raise GateError(
                f"{gate}: layer {layer} differs by {float(off.max()):.2e}, allowed {limit:.2e}"
            )
