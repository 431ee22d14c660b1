"""The sizes of one MoE layer, and the named ones that everything else refers to.

H hidden, I intermediate (of one routed expert), E routed experts, K experts per token, I_shared of the shared expert.
"""

from dataclasses import dataclass, field, replace

from epmoe.core.errors import InputError
from epmoe.core.routing import RouterConfig
from epmoe.core.values import check_whole


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """What a routed-experts layer is made of; the same on all ranks.

    Attributes:
        hidden: H, the width of a token.
        intermediate: I, the width inside one routed expert (SwiGLU: w13 has 2I rows).
        experts: E, the number of routed experts over all ranks.
        topk: K, the number of experts that each token names, 1 <= K <= E.
        shared_intermediate: the width of the shared expert, 0 for none.
        router: how logits become expert ids and weights.
        layers: MoE layers of the model that this shape is taken from (for whole-model estimates).
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared_intermediate: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    layers: int = 1
    name: str = "custom"

    def __post_init__(self):
        for field_name in ("hidden", "intermediate", "experts", "topk", "layers"):
            check_whole(field_name, getattr(self, field_name), 1)
        check_whole("shared_intermediate", self.shared_intermediate, 0)  # 0 for no shared expert
        if self.topk > self.experts:
            raise InputError(
                f"topk={self.topk} is more than experts={self.experts}: a token cannot name more experts than exist"
            )
        self.router.check(self.experts, self.topk)

    def expert_parameters(self) -> int:
        """Parameters of one routed expert: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    def with_(self, **changes) -> "MoEShape":
        """A copy with some sizes changed."""
        return replace(self, **changes)


def _softmax(renormalize: bool) -> RouterConfig:
    return RouterConfig(scoring="softmax", renormalize=renormalize)


_GLM = RouterConfig(scoring="sigmoid", renormalize=True, scale=2.5)

SHAPES: dict[str, MoEShape] = {
    shape.name: shape
    for shape in (
        # 2 ranks, 4 experts, 4 tokens: small enough to follow every number by hand
        MoEShape(name="toy", hidden=4, intermediate=2, experts=4, topk=2),
        MoEShape(
            name="tiny",
            hidden=128,
            intermediate=64,
            experts=32,
            topk=4,
            shared_intermediate=64,
            router=RouterConfig(scoring="sigmoid", renormalize=True, scale=1.5),
            layers=4,
        ),
        MoEShape(
            name="glm-5.3-flash",
            hidden=4096,
            intermediate=2048,
            experts=288,
            topk=8,
            shared_intermediate=2048,
            router=_GLM,
            layers=42,
        ),
        MoEShape(
            name="qwen3-moe-30b",
            hidden=2048,
            intermediate=768,
            experts=128,
            topk=8,
            router=_softmax(True),
            layers=48,
        ),
        MoEShape(
            name="mixtral",
            hidden=4096,
            intermediate=14336,
            experts=8,
            topk=2,
            router=_softmax(True),
            layers=32,
        ),
        MoEShape(
            name="deepseek-v3",
            hidden=7168,
            intermediate=2048,
            experts=256,
            topk=8,
            shared_intermediate=2048,
            router=RouterConfig(
                scoring="sigmoid", renormalize=True, groups=8, topk_groups=4, scale=2.5
            ),
            layers=58,
        ),
    )
}


def named_shape(name: str) -> MoEShape:
    """The shape of that name. Raises InputError with the list of names."""
    if name not in SHAPES:
        raise InputError(f"no shape is called {name!r}: choose one of {', '.join(SHAPES)}")
    return SHAPES[name]
