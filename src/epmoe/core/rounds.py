"""How many rounds a call runs, and how large each is: the same on all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epmoe.core.layer import LayerSpec


@dataclass(frozen=True)
class Rounds:
    """`count` rounds of at most `capacity` tokens per rank. A rank that has run out of tokens joins with none."""

    count: int
    capacity: int

    def slices(self) -> Iterator[slice]:
        """The tokens of each round; beyond the last token they are empty."""
        for start in range(0, self.count * self.capacity, self.capacity):
            yield slice(start, start + self.capacity)


def plan_rounds(spec: "LayerSpec", tokens: int, max_tokens: int | None, capturing: bool) -> Rounds:
    """Agree on rounds. Worked: C = 16, ranks bring 26 and 3 tokens: two rounds of 16, of 16 + 10 and of 3 + 0 tokens.

    Collective over the control plane only where overflow="rounds", nothing is declared and nothing is being captured.

    Args:
        spec: of the layer.
        tokens: T of this rank.
        max_tokens: the most tokens of any rank, where the caller declares it.
        capturing: a CUDA graph is being captured: one round of the declared size.
    """
    limit, most = spec.max_tokens_per_rank, max_tokens
    if most is None and spec.overflow == "rounds" and not capturing and spec.group.size > 1:
        most = max(row[0] for row in spec.group.all_gather_ints([tokens]))
    elif most is None:
        most = tokens if spec.group.size == 1 else limit
    most = max(
        1, most
    )  # nobody has a token: the exchanges still run, so that all ranks count the same ones
    return Rounds(count=-(-most // limit), capacity=min(most, limit))
