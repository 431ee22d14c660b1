"""Tile sizes of the grouped GEMMs: what may be chosen, what fits a GPU, and what to take when nothing was measured.

Pure Python, no GPU. A pipeline of `num_stages` holds that many copies of the A tile and of the B tiles in shared
memory; gate_up has TWO B tiles (gate and up). 128 x 128 x 64 bfloat16 in 4 stages: 4 * (128 + 2 * 128) * 64 * 2 =
196608 bytes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from epmoe.fused_triton.kernels._checks import need

LEAST_SHARED = 16384


@dataclass(frozen=True)
class GemmConfig:
    """Tiles and schedule of one grouped GEMM.

    Attributes:
        block_m, block_n, block_k: tile of rows, of output columns, of the summed dimension; powers of two, at least 16.
        num_stages, num_warps: software pipeline depth, warps of a program.
        group_m: row tiles that share a column of weights while it is in L2.
        swap_ab: weights are the left operand, so the tensor core's 64-row side is never empty at tiny M.
        tma: weights come through the tensor memory accelerator (needs 16-byte row strides).
        tma_rows: so do the rows: in `down` they lie side by side already, in `gate_up` they are copied so first.
        block_r: rows of a second, smaller tile below the first: 128 + 64 covers 192 rows, which is no power of two
            (needs tma_rows).
        waves: programs per multiprocessor of a persistent grid; 0 starts one program per tile.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    num_stages: int = 3
    num_warps: int = 4
    group_m: int = 1
    swap_ab: bool = False
    tma: bool = False
    tma_rows: bool = False
    waves: int = 0
    block_r: int = 0

    def __post_init__(self):
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            need(
                value >= 16 and value & (value - 1) == 0,
                f"{name}={value}: use a power of two, at least 16",
            )
        need(self.num_stages >= 1, f"num_stages={self.num_stages}: at least 1")
        need(
            self.num_warps in (1, 2, 4, 8, 16), f"num_warps={self.num_warps}: use 1, 2, 4, 8 or 16"
        )
        need(
            self.block_r == 0 or (self.tma_rows and self.block_r in (16, 32, 64, 128)),
            f"block_r={self.block_r}: use 0, or with tma_rows one of 16, 32, 64, 128",
        )
        need(self.group_m >= 1, f"group_m={self.group_m}: at least 1")

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: block_m and block_r."""
        return self.block_m + self.block_r

    def shared_bytes(self, weight_tiles: int, itemsize: int) -> int:
        """Shared memory of the pipeline, in bytes; weight_tiles is 2 for gate_up and 1 for down."""
        rows = self.tile_rows + weight_tiles * self.block_n
        return self.num_stages * rows * self.block_k * itemsize

    def to_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LayerConfig:
    """The two GEMMs of a layer. They share one list of row tiles, so a tile has as many rows in both."""

    gate_up: GemmConfig
    down: GemmConfig

    def __post_init__(self):
        need(
            self.gate_up.tile_rows == self.down.tile_rows,
            f"gate_up.tile_rows={self.gate_up.tile_rows} but down.tile_rows={self.down.tile_rows} "
            "(block_m + block_r): use one value",
        )

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: what the tile list is made with."""
        return self.gate_up.tile_rows


@dataclass(frozen=True)
class DeviceLimits:
    """What the chooser must know about a GPU: shared memory of one block, in bytes, and TMA (Hopper and later)."""

    shared_memory: int
    tma: bool = False

    def __post_init__(self):
        need(
            self.shared_memory >= LEAST_SHARED,
            f"shared_memory={self.shared_memory}: the smallest tiles need {LEAST_SHARED} bytes",
        )


_PLAIN = {"tma": False, "tma_rows": False, "block_r": 0}


def fit(config: GemmConfig, limits: DeviceLimits, weight_tiles: int, itemsize: int) -> GemmConfig:
    """Shrink `config` until it fits: fewer stages first (down to 2), then a narrower K, N and M tile."""
    while config.shared_bytes(weight_tiles, itemsize) > limits.shared_memory:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 32:
            config = replace(config, block_k=config.block_k // 2)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_r:
            config = replace(config, block_r=0)
        elif config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        else:
            config = replace(config, num_stages=1, block_k=16)
    return config if limits.tma else replace(config, **_PLAIN)


def _wish(rows_per_expert: float, itemsize: int, tma: bool) -> tuple[GemmConfig, GemmConfig]:
    """gate_up and down before fitting. Few rows per expert: stream weights; many: keep the tensor cores full.

    Measured on one H200 (H 4096, I 2048, 72 experts, bfloat16). With few rows the weights are the left operand: the
    tensor core's 64-row side is then always full. With many, rows are copied into expert-major order so that both
    operands come by TMA, and a tile has 128 or 192 rows, whichever leaves fewer rows empty.
    """
    if itemsize == 4:  # float32 multiplies on the plain units: small tiles, or registers spill
        tile = GemmConfig(16 if rows_per_expert < 32 else 32, 32, 32, 2, 4)
        return tile, tile
    if rows_per_expert <= 8:
        left = {"swap_ab": True, "tma": tma}
        return GemmConfig(16, 64, 128, 4, 4, **left), GemmConfig(16, 64, 128, 3, 4, **left)
    if rows_per_expert <= 24:
        left = {"swap_ab": True, "tma": tma}
        return GemmConfig(32, 64, 128, 4, 4, **left), GemmConfig(32, 128, 64, 3, 4, **left)
    if rows_per_expert <= 96:
        return GemmConfig(64, 64, 128, 4, 4, 4, tma=tma), GemmConfig(64, 128, 64, 3, 4, 4, tma=tma)
    if not tma:
        return GemmConfig(128, 128, 64, 3, 8, 8), GemmConfig(128, 256, 64, 3, 8, 8)
    both = {"tma": True, "tma_rows": True}
    if _computed(rows_per_expert, 192) < 0.98 * _computed(rows_per_expert, 128):
        gate_up = GemmConfig(128, 128, 64, 3, 8, 8, block_r=64, **both)
        return gate_up, GemmConfig(128, 256, 64, 3, 8, 4, block_r=64, waves=1, **both)
    gate_up = GemmConfig(128, 128, 64, 4, 8, 4, waves=1, **both)
    return gate_up, GemmConfig(128, 256, 64, 4, 8, 4, waves=1, **both)


def _computed(rows: float, tile: int) -> float:
    """Rows that tiles of `tile` rows compute: 227 rows are 256 with tiles of 128 and 384 with tiles of 192."""
    return -(-rows // tile) * tile


def choose(
    limits: DeviceLimits,
    *,
    hidden: int,
    intermediate: int,
    local_experts: int,
    itemsize: int,
    rows: int,
) -> LayerConfig:
    """A configuration that fits, for any legal shape; never raises for want of shared memory.

    Args:
        limits: of the GPU.
        hidden, intermediate, local_experts: H, I, E_local.
        itemsize: bytes of a weight.
        rows: assignments expected on this rank (T * K with a uniform routing).
    """
    gate_up, down = _wish(rows / max(1, local_experts), itemsize, limits.tma)
    if hidden * itemsize % 16 or intermediate * itemsize % 16:
        gate_up, down = (replace(config, **_PLAIN) for config in (gate_up, down))
    gate_up = fit(_clip(gate_up, intermediate, hidden), limits, 2, itemsize)
    down = fit(_clip(down, hidden, intermediate), limits, 1, itemsize)
    if gate_up.tile_rows != down.tile_rows:  # one of them had to shrink
        gate_up, down = replace(gate_up, block_r=0), replace(down, block_r=0)
    block_m = min(gate_up.block_m, down.block_m)
    return LayerConfig(replace(gate_up, block_m=block_m), replace(down, block_m=block_m))


def _clip(config: GemmConfig, columns: int, summed: int) -> GemmConfig:
    """No tile much larger than the matrix: a 64-wide layer needs no 256-wide block."""

    def cover(block: int, size: int) -> int:
        while block > 16 and block // 2 >= size:
            block //= 2
        return block

    return replace(
        config, block_n=cover(config.block_n, columns), block_k=cover(config.block_k, summed)
    )


def config_space(
    limits: DeviceLimits, block_m: int, weight_tiles: int, itemsize: int = 2
) -> Iterator[GemmConfig]:
    """Candidates for a tuner at one block_m: those that fit and keep at least 24 KB in flight."""
    for block_n in (32, 64, 128, 256):
        for block_k in (64, 128, 256):
            for num_stages in (2, 3, 4, 5):
                for num_warps in (4, 8):
                    config = GemmConfig(block_m, block_n, block_k, num_stages, num_warps)
                    used = config.shared_bytes(weight_tiles, itemsize)
                    accumulators = block_m * block_n * weight_tiles // (32 * num_warps)
                    if 24576 <= used <= limits.shared_memory and accumulators <= 192:
                        yield config
