"""What committed runs could read from memory with a kernel that does nothing else, beside what floors are quoted at."""

from docs_hooks.fact_tables import fact, measured_results

from epmoe.core.plan.gpus import GPUS


def _rates(gpu: str) -> tuple[float, float]:
    """The least and the most bytes/s of all committed runs on that GPU."""
    rates = [
        run.ceiling["read_bytes_per_second"]
        for run in measured_results().values()
        if gpu in run.machine["device"].lower()
    ]
    return min(rates), max(rates)


@fact
def reading_tb(gpu: str) -> str:
    least, most = _rates(gpu)
    return f"{least / 1e12:.2f} to {most / 1e12:.2f} TB/s"


@fact
def reading_percent(gpu: str) -> str:
    """How much higher time / floor is against that, where the floor is reading."""
    least, most = (rate / GPUS[gpu].streaming_bandwidth - 1 for rate in _rates(gpu))
    return f"{100 * least:.0f} to {100 * most:.0f} %"
