"""The last stage against vLLM, and where the time goes."""

import dataclasses

from tests.bench_example import changed, example, with_subject

from epmoe.core.bench import headline, pages
from epmoe.core.bench.profile import Kernel
from epmoe.core.bench.profile import summarise as summarise_profile
from epmoe.core.bench.results import Ratio


def test_the_page_says_where_the_time_goes_if_somebody_looked():
    result = example()
    assert (
        "Where the time goes"
        not in pages.result_pages("r", result, "docs/ladder")["docs/ladder/r.md"]
    )
    kernels = [Kernel("gate_up_kernel", 0, 30), Kernel("ncclSendRecv", 30, 12)]
    with_subject(result, profile=dataclasses.asdict(summarise_profile([kernels], layers=1)))
    page = pages.result_pages("r", result, "docs/ladder")["docs/ladder/r.md"]
    assert (
        "| 1 | 02_fixed_capacity | 42.0 | 12.0 | 0.0 | 30.0 | 13 | 2 | gate_up_kernel 30.0 |"
        in page
    )


def test_the_last_stage_is_held_against_vllm_wherever_both_ran():
    result = example()
    ours = "02_fixed_capacity"
    point = result.points[0]
    others = {"vllm-agrs": (1.25, 1.2, 1.3), "vllm-agrs-tuned": (1.01, 0.99, 1.02)}
    ratios = [
        Ratio(of=o, to=ours, median=m, low=a, high=b, claim="") for o, (m, a, b) in others.items()
    ]
    result.points[0] = changed(point, ratios=ratios)
    head, rows = headline.against_vllm({"r": result}, ours)
    assert head[:4] == ["on", "against", "T=1", "T=2"]
    assert [row[2] for row in rows] == [
        "**0.80**",
        "0.99",
    ]  # bold only where the interval excludes 1
    assert all(cell == "-" for row in rows for cell in row[3:])
    assert headline.against_vllm({}, ours)[1] == []


def test_the_split_adds_up_what_the_profile_saw():
    result = example()
    kernels = [Kernel("gate_up_kernel", 0, 30), Kernel("pack", 30, 3), Kernel("ncclSend", 33, 12)]
    with_subject(result, profile=dataclasses.asdict(summarise_profile([kernels], layers=1)))
    _, rows = headline.time_split({"r": result}, "02_fixed_capacity")
    assert [row[1:] for row in rows] == [["1", "02_fixed_capacity", "45", "12", "0", "30", "3"]]
