"""Statistics of `epmoe bench` against known answers."""

import numpy as np
import pytest

from epmoe.core.bench.method import (
    Contestant,
    Estimate,
    abba,
    blocks_for,
    measure,
    median_interval,
    over_floor,
    ratio,
    slowest,
)
from epmoe.core.errors import InputError


def test_abba_goes_forward_then_backward():
    assert abba(["a", "b"]) == ["a", "b", "b", "a"]
    assert abba(["a", "b", "c"]) == ["a", "b", "c", "c", "b", "a"]


def test_median_interval_of_equal_values_is_a_point():
    assert median_interval([2.0] * 20) == Estimate(2.0, 2.0, 2.0)


def test_median_interval_is_repeatable_and_ordered():
    values = [1.0, 1.1, 0.9, 1.3, 1.05, 0.98, 1.2]
    first, second = median_interval(values), median_interval(values)
    assert first == second
    assert first.low <= first.median <= first.high
    assert first.median == 1.05


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        sample = rng.lognormal(0.0, 0.2, 20)  # its true median is 1
        found = median_interval(sample.tolist(), seed=trial)
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99, hits / 200


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")]])
def test_median_interval_refuses(bad):
    with pytest.raises(InputError, match="finite"):
        median_interval(bad)


def test_ratio_is_taken_within_blocks():
    drift = np.linspace(1, 3, 20)  # hits both alike, three times as large as the effect
    found = ratio((0.9 * drift).tolist(), drift.tolist())
    assert found.median == pytest.approx(0.9)
    assert found.claim == "faster"
    with pytest.raises(InputError, match="within a block"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("estimate", "claim"),
    [
        (Estimate(0.9, 0.85, 0.95), "faster"),
        (Estimate(0.9, 0.85, 1.01), "no difference"),
        (Estimate(0.99, 0.985, 0.995), "no difference"),
        (Estimate(1.1, 1.05, 1.2), "slower"),
        (Estimate(1.01, 1.005, 1.02), "no difference"),
    ],
)
def test_a_claim_needs_the_interval_and_the_effect(estimate, claim):
    assert estimate.claim == claim


def test_slowest_rank_of_every_sample():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(InputError, match="as many"):
        slowest([[1.0], [1.0, 2.0]])


class FakeClock:
    """Ticks by what ran, plus a drift that grows with every reading."""

    kind = "fake"

    def __init__(self, drift: float = 0.0):
        self.now, self.drift, self.order = 0.0, drift, []
        self._readings = 0
        self._start = self._stop = 0.0

    def start(self):
        self._readings += 1
        self._start = self.now

    def stop(self):
        self.now += self.drift * self._readings
        self._stop = self.now

    def milliseconds(self):
        return self._stop - self._start

    def work(self, name, cost):
        def run(draw):
            self.order.append((name, draw))
            self.now += cost

        return run


def test_measure_gives_every_block_one_time_and_every_draw_its_turn():
    clock = FakeClock()
    contestants = {
        "a": Contestant(run=clock.work("a", 4.0), layers=2, replays=4),
        "b": Contestant(run=clock.work("b", 6.0), layers=2, replays=4),
    }
    samples = measure(clock, contestants, draws=2, blocks=4)
    assert samples == {"a": [2000.0] * 4, "b": [3000.0] * 4}  # ms per chain of 2 -> us per layer
    first_block = clock.order[:8]
    assert first_block == [("a", 0)] * 2 + [("b", 0)] * 4 + [("a", 0)] * 2
    assert {draw for _, draw in clock.order[8:16]} == {1}


def test_linear_drift_cancels_in_a_block():
    clock = FakeClock(drift=0.5)
    same = {n: Contestant(run=clock.work(n, 4.0), layers=1, replays=2) for n in "abc"}
    samples = measure(clock, same, draws=1, blocks=3)
    for block in range(3):
        assert len({round(samples[n][block], 6) for n in "abc"}) == 1


def test_blocks_are_rounded_up_to_whole_rounds_of_draws():
    assert blocks_for(20, 5) == 20
    assert blocks_for(20, 6) == 24
    assert blocks_for(1, 5) == 5


def test_over_floor_is_the_mean_over_draws_of_their_medians():
    # draw 0 has floor 10 and times 11, 12, 30; draw 1 has floor 100 and times 110, 120, 120
    found = over_floor([11, 110, 12, 120, 30, 120], [10, 100])
    assert found.median == pytest.approx((1.2 + 1.2) / 2)
    assert found.low <= found.median <= found.high
    with pytest.raises(InputError, match="as many blocks"):
        over_floor([1.0, 2.0, 3.0], [1.0, 1.0])
    with pytest.raises(InputError, match="above 0"):
        over_floor([1.0], [0.0])
