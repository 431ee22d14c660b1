"""The tour's work: one real MoE layer, real text, every stage, every rank held against the oracle.

`measure` runs on every rank; `TourReport` is what comes home, as plain data. The terminal's tables are in `tour.view`.

Legend: T tokens on this rank, H hidden, E experts, K experts per token.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from epmoe.core import ledger, registry
from epmoe.core.checkpoints import inspect, load_layer
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.verify import relative_error, tolerance
from epmoe.reference.oracle import oracle

TEXT = '''\
def dispatch(tokens, experts):
    """Send every token to the ranks that own its experts."""
    for token in tokens:
        for expert in token.route(experts):
            yield expert.rank, token
'''

CALLS = 5  # timed calls per stage; the tour shows their median
PATIENCE = 1.0  # seconds: of a slower stage (interpreted kernels) only the first call is timed


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """What one stage did on one rank.

    Attributes:
        stage, rank, tokens: which, where, and T there.
        error: the largest |y - oracle| of any row, relative to the terms that were added.
        tolerance: the largest error that a correct layer shows.
        ledger: see `Ledger.summary`; of one call.
        rows_needed: assignments whose expert lives on this rank.
        seconds: of one call, the median of `CALLS`.
        graph_capturable: as the stage declares.
    """

    stage: str
    rank: int
    tokens: int
    error: float
    tolerance: float
    ledger: dict
    rows_needed: int
    seconds: float
    graph_capturable: bool

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class TourReport:
    """All stages on all ranks, and where the tokens went.

    Attributes:
        where: one sentence about ranks, device and transport.
        device, dtype: of the layer.
        layer: what the layer is, in one sentence.
        rows: by stage, then rank.
        visits: [ranks][E], how often rank r's tokens name expert e.
        owners: [E], the owner rank of every expert.
        refused: stages that cannot run here, with the reason.
    """

    where: str
    device: str
    dtype: str
    layer: str
    rows: list[StageRow]
    visits: list[list[int]]
    owners: list[int]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Every row of every stage is within its tolerance, and nothing that was asked for is missing."""
        return bool(self.rows) and all(row.right for row in self.rows) and not self.refused

    def stages(self) -> dict[str, list[StageRow]]:
        """Rows by stage, in ladder order."""
        grouped: dict[str, list[StageRow]] = {}
        for row in self.rows:
            grouped.setdefault(row.stage, []).append(row)
        return grouped


def share_out(tokens: int, ranks: int) -> list[int]:
    """How many tokens each rank takes: unequal on purpose, the first rank most, as batches are in life."""
    weights = [ranks - rank for rank in range(ranks)]
    shares = [tokens * weight // sum(weights) for weight in weights]
    shares[0] += tokens - sum(shares)
    return shares


def measure(
    group: EPGroup, stage: str, model: Path, layer: int, x_TH: Tensor, dtype: torch.dtype
) -> tuple[StageRow, list[int]]:
    """Run one stage on this rank's share of the text; a rank program.

    Args:
        group: the ranks.
        stage: a registered name.
        model, layer: the checkpoint and which of its MoE layers.
        x_TH: the hidden states of the whole text; every rank takes its share.
        dtype: of weights and tokens.

    Returns:
        this rank's row, and how often its tokens name each expert.
    """
    info = inspect(model)
    placement = contiguous(info.shape.experts, group.size)
    mine = load_layer(model, layer, placement.experts_of(group.rank), dtype, group.device)
    everything = load_layer(model, layer, None, dtype, group.device)
    shares = share_out(len(x_TH), group.size)
    x_TH = x_TH.split(shares)[group.rank].to(group.device, dtype)
    ids_TK, weights_TK = mine.router(x_TH)
    moe = build(stage, info.shape, mine.experts, placement, group, max(shares))
    with ledger.record() as book:
        y_TH = moe(x_TH, ids_TK, weights_TK, max_tokens=max(shares))
    answer = oracle(x_TH, ids_TK, weights_TK, everything.experts)
    error_T = relative_error(y_TH, answer.y_TH, answer.terms_T)
    visits_E = torch.bincount(ids_TK.flatten(), minlength=info.shape.experts).tolist()
    needed_E = [sum(n) for n in zip(*group.all_gather_objects(visits_E), strict=True)]
    row = StageRow(
        stage=registry.resolve(stage),
        rank=group.rank,
        tokens=len(x_TH),
        error=max(error_T.tolist(), default=0.0),
        tolerance=tolerance(dtype),
        ledger=book.summary(),
        rows_needed=sum(needed_E[e] for e in placement.experts_of(group.rank)),
        seconds=_time(group, lambda: moe(x_TH, ids_TK, weights_TK, max_tokens=max(shares))),
        graph_capturable=moe.capabilities.graph_capturable,
    )
    moe.close()
    return row, visits_E


def _time(group: EPGroup, call) -> float:
    """Seconds of one call, from a common start to its end on this rank; the median of several."""
    samples = []
    for _ in range(CALLS):
        group.barrier()
        start = time.perf_counter()
        call()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        samples.append(time.perf_counter() - start)
        if max(took for (took,) in group.all_gather_objects((samples[-1],))) > PATIENCE:
            break  # decided by all ranks together: they must call equally often
    return statistics.median(samples)


def runnable_stages(asked: Sequence[str]) -> list[str]:
    """Registered names of the stages that were asked for, each once, or of all.

    Args:
        asked: names or numbers, each item one or several with commas.

    Raises:
        InputError: an unknown one.
    """
    named = [stage.strip() for words in asked for stage in words.split(",")]
    return list(dict.fromkeys(map(registry.resolve, named))) or registry.names()


def find_model(path: Path | None) -> Path:
    """The checkpoint to tour: `path`, or the one that lies in this repository's models folder."""
    candidates = [path] if path else [p / "models/tiny-glm-moe" for p in _places()]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    if path:
        raise InputError(f"no checkpoint at {path}: name a folder that holds a config.json")
    looked = ", ".join(map(str, candidates))
    raise InputError(
        f"no checkpoint at {looked}: give --model, or run inside a clone of the repository"
    )


def _places() -> list[Path]:
    here = [Path.cwd(), *Path.cwd().parents]
    return here + list(Path(__file__).resolve().parents)
