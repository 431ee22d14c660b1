"""What a result looks like in the terminal."""

import dataclasses

from rich.console import Console
from tests.bench_example import changed, example, with_subject

from epmoe.core.bench.profile import Kernel, summarise
from epmoe.core.bench.streaming import rate_words
from epmoe.core.bench.view import render


def shown(result) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(result))
    return capture.get()


def test_a_profile_is_split_as_on_the_page():
    result = example(tokens=(1,))
    assert "where the time goes" not in shown(result), "nobody looked"
    kernels = [Kernel("gate_up_kernel", 0, 30), Kernel("pack", 30, 3), Kernel("ncclSend", 33, 12)]
    with_subject(result, profile=dataclasses.asdict(summarise([kernels], layers=1)))
    lines = [line.split() for line in shown(result).splitlines()]
    assert ["1", "02_fixed_capacity", "45.0", "12.0", "0.0", "30.0", "3.0"] in lines


def test_one_subject_has_no_table_of_ratios():
    result = example(tokens=(1,))
    assert "ratio of times" in shown(result)
    result.points[0] = changed(result.points[0], ratios=[])
    assert "ratio of times" not in shown(result)


def test_the_speed_of_a_cpu_has_digits_that_count():
    result = example(tokens=(1,))
    result.ceiling["read_bytes_per_second"] = 3.24e9
    assert "at 4.40 TB/s and at the 3.2 GB/s that this run streamed" in " ".join(
        shown(result).split()
    )
    assert [rate_words(rate) for rate in (1e11, 9.99e10)] == ["0.10 TB/s", "99.9 GB/s"]
