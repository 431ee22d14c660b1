"""How many rounds a call runs, and how large each is: the same on all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epmoe.core.errors import CapacityError

if TYPE_CHECKING:
    from epmoe.core.layer_spec import LayerSpec


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

    Collective over the control plane where nothing is declared and nothing is being captured: then no rank can know by
    itself that another one brings too many.

    Args:
        spec: of the layer.
        tokens: T of this rank.
        max_tokens: the most tokens of any rank, where the caller declares it.
        capturing: a CUDA graph is being captured: one round of the declared size.

    Raises:
        CapacityError: on every rank, when one brings more than C tokens and overflow="raise".
    """
    limit, most, who = spec.max_tokens_per_rank, max_tokens, ""
    if most is None and capturing:
        most = limit
    elif most is None:
        most, rank = _fullest_rank(spec, tokens)
        who = f"rank {rank}: "
    if most > limit and spec.overflow == "raise":
        raise CapacityError(
            f"{who}{most} tokens on a rank, the layer was built for max_tokens_per_rank={limit}: "
            'build it larger, or with overflow="rounds"'
        )
    most = max(
        1, most
    )  # nobody has a token: the exchanges still run, all ranks count the same ones
    return Rounds(count=-(-most // limit), capacity=min(most, limit))


def _fullest_rank(spec: "LayerSpec", tokens: int) -> tuple[int, int]:
    """The most tokens of any rank, and which rank brings them."""
    if spec.group.size == 1:
        return tokens, 0
    brought = [row[0] for row in spec.group.all_gather_ints([tokens])]
    return max(brought), brought.index(max(brought))
