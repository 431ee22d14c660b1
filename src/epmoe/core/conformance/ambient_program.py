"""A layer under modes of torch that its caller has set for other reasons."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from epmoe.core.cases import Case
from epmoe.core.conformance.program import logits_of
from epmoe.core.groups import EPGroup
from epmoe.core.verify import bring, build_case, differ


@contextmanager
def another_default() -> Iterator[None]:
    """As vLLM sets it while it loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def under_modes(group: EPGroup, case: Case) -> dict[str, bool]:
    """Whether a call has the bits of a plain one: under each mode, and of a layer that was built in it."""
    plain = build_case(group, case)
    arguments, logits_TE = bring(group, case, 0), logits_of(group, case)
    wanted_TH = plain(*arguments)
    routed_TH = plain.from_logits(arguments[0], logits_TE)
    modes: dict[str, Callable] = {
        "another default dtype": another_default,
        "autocast": lambda: torch.autocast(group.device.type, dtype=torch.bfloat16),
        "another default device": lambda: torch.device("meta"),  # what is made there holds nothing
        "inference mode": torch.inference_mode,
    }
    same = {}
    for name, mode in modes.items():
        with mode():
            same[f"called under {name}"] = not differ(plain(*arguments), wanted_TH)
            found_TH = plain.from_logits(arguments[0], logits_TE)
            same[f"routed under {name}"] = not differ(found_TH, routed_TH)
            built = build_case(group, case)
            built.warmup()
        same[f"built under {name}"] = not differ(built(*arguments), wanted_TH)
        built.close()
    plain.close()
    return same
