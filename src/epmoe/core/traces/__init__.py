"""What a stage does with a few tokens, row by row, as JSON that a page can play.

    trace = trace_stage(pool, "variable_a2a", Scenario(ranks=2, experts=4, topk=2, routing="uniform"))

A trace is made of what the real layer carried (`traces.spy`): its messages are read off send buffers, its deliveries
off the `Rows` that the experts got, its results off what came back. Token t is the row t, t + 0.1, t + 0.2, ..., so
that every row shows which token it is. The routing of a scenario depends on nothing but the scenario: two stages play
the same tokens.

Legend: T tokens of a rank, C capacity, EP ranks, K experts per token, E experts, H hidden, R received rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.draws import draw
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.launch import RankPool
from epmoe.core.layer import build
from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.core.registry import resolve
from epmoe.core.shape import MoEShape
from epmoe.core.toy import TOY, Toy
from epmoe.core.traces.spy import Carried, Message, Watched, messages, watch
from epmoe.reference.oracle import oracle

FORMAT = 1
TOKENS = {2: (3, 2), 3: (3, 1, 2), 4: (3, 1, 2, 2)}  # T of every rank: unequal, as batches are
ROUTINGS = ("uniform", "hot_expert", "one_rank")
STAGES = ("00_reference", "01_variable_a2a", "02_fixed_capacity", "03_fused_triton")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Which tokens are played; `routing="toy"` is the routing of all pages and fixes the rest."""

    ranks: int = 2
    experts: int = 4
    topk: int = 2
    routing: str = "toy"
    seed: int = 3

    @property
    def name(self) -> str:
        """Part of a file name."""
        if self.routing == "toy":
            return "toy"
        return f"{self.routing}-r{self.ranks}-e{self.experts}-k{self.topk}"


def scenarios() -> Iterator[Scenario]:
    """The toy, and every combination that the page offers."""
    yield Scenario()
    for routing in ROUTINGS:
        for ranks in TOKENS:
            for experts in (4, 8):
                for topk in (1, 2):
                    yield Scenario(ranks=ranks, experts=experts, topk=topk, routing=routing)


def tokens_of(scenario: Scenario) -> Toy:
    """The scenario's tokens, placement and routing."""
    if scenario.routing == "toy":
        return TOY
    if scenario.ranks not in TOKENS:
        raise InputError(
            f"ranks={scenario.ranks}: traces are drawn for {', '.join(map(str, TOKENS))}"
        )
    shape = MoEShape(
        name="trace", hidden=4, intermediate=2, experts=scenario.experts, topk=scenario.topk
    )
    placement = contiguous(scenario.experts, scenario.ranks)
    ids = tuple(
        _ids(draw(scenario.routing, tokens, scenario.topk, placement, scenario.seed + rank)[0])
        for rank, tokens in enumerate(TOKENS[scenario.ranks])
    )
    gates = (1.0,) if scenario.topk == 1 else TOY.gates
    return Toy(shape=shape, placement=placement, ids=ids, gates=gates)


def _ids(ids_TK: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids_TK.tolist())


def trace_stage(pool: RankPool, stage: str, scenario: Scenario) -> dict:
    """Run `stage` on the scenario's ranks and join what every rank saw; see `trace_stages`."""
    return trace_stages(pool, stage, [scenario])[0]


def trace_stages(pool: RankPool, stage: str, played: Sequence[Scenario]) -> list[dict]:
    """A trace of every scenario, all with the same number of ranks, in one run.

    Raises whatever the layer raises, and AssertionError where a trace does not add up to the layer's own result.
    """
    toys = [tokens_of(scenario) for scenario in played]
    by_rank = pool.run(watch_ranks, stage, toys, ranks=toys[0].ranks, timeout=600)
    joined = zip(played, toys, zip(*by_rank, strict=True), strict=True)
    return [_join(stage, scenario, toy, parts) for scenario, toy, parts in joined]


def _join(stage: str, scenario: Scenario, toy: Toy, parts: Sequence[dict]) -> dict:
    ranks = range(toy.ranks)
    trace = {
        "format": FORMAT,
        "stage": resolve(stage),
        "scenario": asdict(scenario) | {"name": scenario.name},
        "ranks": toy.ranks,
        "capacity": toy.capacity,
        "owners": list(toy.placement.owners),
        "topk": toy.shape.topk,
        "tokens": [_token(toy, token, rank) for rank in ranks for token in toy.tokens_of(rank)],
        "counts": _joined_counts(parts),
        "out": [m for part in parts for m in part["out"]],
        "delivered": [part["delivered"] for part in parts],
        "home": [m for part in parts for m in part["home"]],
        "results": [r for part in parts for r in part["results"]],
        "ledger": [part["ledger"] for part in parts],
        "collectives": [part["collectives"] for part in parts],
        "row_bytes": parts[0]["row_bytes"],
    }
    _name_deliveries(trace)
    verify(trace)
    return trace


def watch_ranks(group: EPGroup, stage: str, toys: Sequence[Toy]) -> list[dict]:
    """One rank's share of several traces; a rank program."""
    return [watch_rank(group, stage, toy) for toy in toys]


def _token(toy: Toy, token: int, rank: int) -> dict:
    return {
        "token": token,
        "rank": rank,
        "experts": list(toy.named_by(token)),
        "gates": list(toy.gates),
    }


def watch_rank(group: EPGroup, stage: str, toy: Toy) -> dict:
    """One rank's share of a trace; a rank program."""
    rank = group.rank
    layer = build(
        stage, toy.shape, toy.weights(rank).to(group.device), toy.placement, group, toy.capacity
    )
    x_TH, ids_TK, gates_TK = toy.x_TH(rank), toy.ids_TK(rank), toy.gates_TK(rank)
    with ledger.record() as book:
        layer(x_TH, ids_TK, gates_TK, max_tokens=toy.capacity)
    with watch(layer) as seen:  # the same call again: what watching costs is not the layer's
        y_TH = layer(x_TH, ids_TK, gates_TK, max_tokens=toy.capacity)
    layer.close()
    layout = RowLayout(toy.shape.hidden, toy.shape.topk, x_TH.dtype)
    out, home = seen.hidden(toy.shape.hidden, layout.row_bytes)
    wanted_TH = oracle(x_TH, ids_TK, gates_TK, toy.weights()).y_TH
    return {
        "counts": _counts(seen),
        "out": [_out(m, rank) for m in messages(out, group.size, layout)],
        "delivered": _delivered(seen, toy, rank),
        "home": [_home(m, rank) for m in messages(home, group.size, layout)],
        "results": [
            {"token": t, "rank": rank, "y": _values(y), "worst": float((y - wanted).abs().max())}
            for t, y, wanted in zip(toy.tokens_of(rank), y_TH, wanted_TH, strict=True)
        ],
        "ledger": book.summary(),
        "collectives": [{"name": c.name, "bytes": c.wire_bytes} for c in book.collectives],
        "row_bytes": {"out": _row_bytes(seen, out), "home": _row_bytes(seen, home, home=True)},
    }


def _counts(seen: Watched) -> list[int] | None:
    """Rows for every rank, where the stage sends such numbers ahead."""
    whole = [c for c in seen.carried if c.name == "all_to_all" and c.sent.dtype is torch.int64]
    return whole[0].sent.tolist() if whole else None


def _row_bytes(seen: Watched, carried: Carried, home: bool = False) -> int:
    """Bytes of one row; where slots and weights travel in exchanges of their own, theirs too."""
    beside = [carried]
    if not home and carried.sent.dtype is not torch.uint8:
        beside += [
            c for c in seen.carried if c.sent.dtype is torch.int32 or _is_weights(c, carried)
        ]
    return sum((c.sent.shape[-1] if c.sent.dim() > 1 else 1) * c.sent.itemsize for c in beside)


def _is_weights(other: Carried, carried: Carried) -> bool:
    floats = other.sent.is_floating_point() and len(other.sent) == len(carried.sent)
    return floats and other.sent.shape[1:] != carried.sent.shape[1:]


def _out(message: Message, rank: int) -> dict:
    first, second = message.x_H[:2].tolist()
    padding = message.padding if message.padding is not None else first == second
    token = None if padding else round(first)
    return {"from": rank, "to": message.to, "index": message.index, "token": token}


def _home(message: Message, rank: int) -> dict:
    return {"from": rank, "to": message.to, "index": message.index, "y": _values(message.x_H)}


def _delivered(seen: Watched, toy: Toy, rank: int) -> list[dict]:
    """The rows that the experts of this rank got, in their order, and what each came to."""
    assert seen.rows is not None
    assert seen.y_RH is not None
    experts = toy.placement.experts_of(rank)
    return [
        {
            "row": row,
            "experts": [experts[s] for s in slots if 0 <= s < len(experts)],
            "gates": [
                round(g, 6) for s, g in zip(slots, gates, strict=True) if 0 <= s < len(experts)
            ],
            "x0": float(x[0]),
            "y": _values(y),
        }
        for row, (slots, gates, x, y) in enumerate(
            zip(
                seen.rows.slots_RJ.tolist(),
                seen.rows.weights_RJ.tolist(),
                seen.rows.x_RH,
                seen.y_RH,
                strict=True,
            )
        )
    ]


def _values(row: Tensor) -> list[float]:
    return [float(f"{v:.5g}") for v in row.tolist()]


def _joined_counts(parts: Sequence[dict]) -> list[list[int]] | None:
    return None if parts[0]["counts"] is None else [part["counts"] for part in parts]


def _name_deliveries(trace: dict) -> None:
    """Say of every delivered row who sent it: rows arrive by source rank, then in the order of its block."""
    for rank, rows in enumerate(trace["delivered"]):
        arrivals = sorted(
            (m for m in trace["out"] if m["to"] == rank), key=lambda m: (m["from"], m["index"])
        )
        for row, message in zip(rows, arrivals, strict=True):
            row |= {"from": message["from"], "index": message["index"], "token": message["token"]}


def verify(trace: dict) -> None:
    """Hold a trace against itself: what came home adds up to what the layer returned, and the oracle agrees.

    Raises:
        AssertionError: naming the token or row that does not fit.
    """
    came = {(m["from"], m["to"], m["index"]): m["y"] for m in trace["home"]}
    sums = {t["token"]: [0.0] * len(trace["results"][0]["y"]) for t in trace["tokens"]}
    for rank, rows in enumerate(trace["delivered"]):
        for row in rows:
            where = f"rank {rank} row {row['row']}"
            assert came[rank, row["from"], row["index"]] == row["y"], f"{where}: changed on its way"
            if row["token"] is None:
                assert not row["experts"], f"{where}: padding has work"
                continue
            assert round(row["x0"]) == row["token"], f"{where}: not its token"
            sums[row["token"]] = [a + b for a, b in zip(sums[row["token"]], row["y"], strict=True)]
    for result in trace["results"]:
        token, scale = result["token"], 1.0 + max(map(abs, result["y"]))
        apart = max(abs(a - b) for a, b in zip(result["y"], sums[token], strict=True))
        assert apart < 1e-3 * scale, f"token {token}: the trace is {apart} away from the layer"
        assert result["worst"] < 1e-4 * scale, f"token {token}: the layer is wrong"


def small(trace: dict) -> dict:
    """The trace without what only `verify` needs."""
    delivered = [
        [{k: v for k, v in row.items() if k != "x0"} for row in rows] for rows in trace["delivered"]
    ]
    home = [{k: v for k, v in message.items() if k != "y"} for message in trace["home"]]
    return trace | {"delivered": delivered, "home": home}


def trace_everything() -> dict[str, dict]:
    """ "STAGE/SCENARIO.json" -> trace, of every stage and scenario."""
    found = {}
    with RankPool(4, "cpu") as pool:
        for stage in STAGES:
            for ranks in TOKENS:
                played = [s for s in scenarios() if s.ranks == ranks]
                for scenario, trace in zip(played, trace_stages(pool, stage, played), strict=True):
                    found[f"{stage}/{scenario.name}.json"] = small(trace)
    return found
