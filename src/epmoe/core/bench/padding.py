"""`epmoe bench padding`: rows sent and computed against rows needed, counted by the ledger in real runs on CPU ranks.

Needed rows: on the wire, (token, other rank) pairs where the token names an expert of that rank; computed, assignments.
What a stage sent is its dispatch collectives' bytes, as the ledger saw them leave, over the bytes of its own dispatch
row (`plan.wire`); so a ratio of 1 means that nothing travelled, or was computed, that nobody asked for.

Legend: T tokens per rank, EP ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from epmoe.core import ledger, registry
from epmoe.core.bench import provenance
from epmoe.core.bench.workload import Routing, layer_weights, make_draw
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.launch import RankPool
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.plan.load import drawn_load
from epmoe.core.plan.wire import wire_bytes
from epmoe.core.shape import named_shape

SCHEMA = 1
# which row of `plan.wire` a stage's dispatch sends
SCHEMES = {
    "reference": "all_gather",
    "variable_a2a": "variable",
    "fixed_capacity": "fixed_capacity",
    "fused_triton": "fixed_capacity",
}


@dataclass(frozen=True, kw_only=True)
class PaddingRow:
    """One stage, one setting; counts are summed over ranks and averaged over draws."""

    stage: str
    tokens: int
    ep: int
    routing: str
    skew: float | None
    rows_sent: float
    rows_sent_needed: float
    rows_computed: float
    rows_computed_needed: float
    wire_bytes: float

    @property
    def sent_ratio(self) -> float | None:
        """Rows sent per row needed; None where none was needed (one rank)."""
        return self.rows_sent / self.rows_sent_needed if self.rows_sent_needed else None

    @property
    def computed_ratio(self) -> float | None:
        """Rows computed per row needed."""
        return self.rows_computed / self.rows_computed_needed if self.rows_computed_needed else None


def count(
    group: EPGroup, stage: str, shape_name: str, tokens: int, routing: Routing, seeds: Sequence[int]
) -> list[dict[str, float]]:
    """One counted call per seed on this rank; a rank program."""
    shape = named_shape(shape_name)
    placement = contiguous(shape.experts, group.size)
    weights = layer_weights(
        shape, placement.experts_of(group.rank), 0, 0, torch.float32, group.device
    )
    layer = build(stage, shape, weights, placement, group, tokens, check=False)
    found = []
    for seed in seeds:
        one = make_draw(shape, placement, tokens, routing, seed, torch.float32, group.device)
        mine = one.sources[group.rank]
        with ledger.record() as book:
            layer(mine.x_TH, mine.ids_TK, mine.weights_TK, max_tokens=tokens)
        load = drawn_load(shape, [s.ids_TK for s in one.sources], placement)
        scheme = SCHEMES[layer.spec.stage.partition("_")[2]]
        wire = wire_bytes(scheme, shape, load, dtype="float32")
        # all collectives but the last: what leads home has rows of its own
        out_bytes = sum(c.wire_bytes for c in book.collectives[:-1])
        counts_bytes = 8 * (group.size - 1) if scheme == "variable" else 0  # int64 row counts
        found.append(
            {
                "rows_sent": (out_bytes - counts_bytes) / wire.dispatch_row_bytes,
                "rows_sent_needed": wire.rows_needed / group.size,
                "rows_computed": float(book.rows_computed),
                "rows_computed_needed": float(load.assignments[group.rank]),
                "wire_bytes": float(sum(c.wire_bytes for c in book.collectives)),
            }
        )
    layer.close()
    return found


def sweep(
    stages: Sequence[str],
    shape: str,
    tokens: Sequence[int],
    eps: Sequence[int],
    routings: Sequence[Routing],
    draws: int,
    timeout: float = 120.0,
) -> list[PaddingRow]:
    """Every stage at every T, EP and routing, on CPU ranks that start once."""
    names = [registry.resolve(stage) for stage in stages]
    unknown = [n for n in names if n.partition("_")[2] not in SCHEMES]
    if unknown:
        raise InputError(
            f"stage {unknown[0]}: no exchange scheme is known for it, choose of {', '.join(SCHEMES)}"
        )
    rows = []
    with RankPool(max(eps), "cpu") as pool:
        for ep in eps:
            for routing in routings:
                for t in tokens:
                    for stage in names:
                        counted = pool.run(
                            count, stage, shape, t, routing, range(draws), ranks=ep, timeout=timeout
                        )
                        rows.append(_row(stage, t, ep, routing, counted))
    return rows


def _row(
    stage: str, tokens: int, ep: int, routing: Routing, counted: list[list[dict[str, float]]]
) -> PaddingRow:
    draws = len(counted[0])
    means = {
        name: sum(one[name] for rank in counted for one in rank) / draws for name in counted[0][0]
    }
    skew = routing.skew if routing.kind == "zipf" else None
    return PaddingRow(stage=stage, tokens=tokens, ep=ep, routing=routing.kind, skew=skew, **means)


def document(rows: Sequence[PaddingRow], shape: str, draws: int, command: str) -> dict[str, Any]:
    """The rows with where they come from, as `load` reads them back from a file."""
    sha, dirty = provenance.git_state()
    return {
        "schema": SCHEMA,
        "kind": "padding",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "git_sha": sha,
        "git_dirty": dirty,
        "shape": shape,
        "draws": draws,
        "rows": [asdict(row) for row in rows],
    }


def load(path: Path) -> tuple[dict, list[PaddingRow]]:
    """The file's head and its rows. Raises InputError for a file that holds none."""
    try:
        data = json.loads(path.read_text())
        rows = [PaddingRow(**row) for row in data.pop("rows")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} holds no padding counts: {error!r}") from error
    if data.get("schema") != SCHEMA or data.get("kind") != "padding" or not rows:
        raise InputError(f"{path} holds no padding counts of schema {SCHEMA}")
    for row in rows:
        if row.rows_computed < row.rows_computed_needed - 1e-6:
            raise InputError(f"{path}: {row} computed fewer rows than were needed")
        if row.rows_sent < row.rows_sent_needed - 1e-6:
            raise InputError(f"{path}: {row} sent fewer rows than were needed")
    return data, rows
