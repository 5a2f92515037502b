"""Learning rates against the text of each schedule, at every step of many runs and at the edges."""

import itertools
import math

import pytest

from dflash.drafter.schedule import learning_rate

SCHEDULES = [("cosine", None), ("linear", None), ("wsd", 0.2), ("wsd", 0.5), ("wsd", 0.0), ("wsd", 1.0)]
TOTALS = (1, 2, 3, 7, 50, 1001)
WARMUPS = (0.0, 0.04, 0.3, 0.999, 1.0)


def _rates(total_steps: int, warmup_ratio: float, schedule: str, decay_ratio: float | None, peak: float = 3e-4):
    settings = dict(peak=peak, total_steps=total_steps, warmup_ratio=warmup_ratio)
    return [
        learning_rate(step, schedule=schedule, decay_ratio=decay_ratio, **settings)
        for step in range(1, total_steps + 1)
    ]


def _by_the_text(step: int, total_steps: int, num_warmup: int, schedule: str, num_decay: int) -> float:
    """Share of the peak, by cases."""
    if step <= num_warmup:
        return step / num_warmup
    done = step - 1 - num_warmup  # steps since the warm-up
    if schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * done / (total_steps - num_warmup))
    if schedule == "linear":
        return 1 - done / (total_steps - num_warmup)
    first_decaying = max(total_steps - num_decay, num_warmup) + 1
    if step < first_decaying:
        return 1.0
    return 1 - (step - first_decaying) / (total_steps - first_decaying + 1)


@pytest.mark.parametrize(("schedule", "decay_ratio"), SCHEDULES)
def test_rates_follow_the_text_at_every_step(schedule, decay_ratio):
    for total_steps, warmup_ratio in itertools.product(TOTALS, WARMUPS):
        num_warmup, num_decay = int(warmup_ratio * total_steps), int((decay_ratio or 0.0) * total_steps)
        rates = _rates(total_steps, warmup_ratio, schedule, decay_ratio)
        shares = [_by_the_text(s, total_steps, num_warmup, schedule, num_decay) for s in range(1, total_steps + 1)]
        assert rates == pytest.approx([3e-4 * share for share in shares], rel=1e-9, abs=0)


@pytest.mark.parametrize(("schedule", "decay_ratio"), SCHEDULES)
def test_edges_are_exact(schedule, decay_ratio):
    for total_steps, warmup_ratio in itertools.product(TOTALS, WARMUPS):
        rates = _rates(total_steps, warmup_ratio, schedule, decay_ratio)
        assert min(rates) > 0, "every step learns, the first and the last too"
        assert max(rates) == 3e-4, "the peak is reached, to the bit"
        top = rates.index(3e-4)
        assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
        if warmup_ratio == 0.0:
            assert rates[0] == 3e-4
        if int(warmup_ratio * total_steps) > 0:
            assert rates[int(warmup_ratio * total_steps) - 1] == 3e-4


def test_known_numbers():
    assert _rates(6, 0.34, "linear", None, peak=4.0) == [2.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    assert _rates(8, 0.25, "wsd", 0.5, peak=4.0) == [2.0, 4.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    assert _rates(5, 0.2, "cosine", None, peak=4.0) == pytest.approx([4.0, 4.0, 2 + 2**0.5, 2.0, 2 - 2**0.5])
    assert _rates(20, 0.25, "cosine", None)[5:] == pytest.approx(
        [1.5e-4 * (1 + math.cos(math.pi * k / 15)) for k in range(15)]
    )
    for schedule, decay_ratio in SCHEDULES:
        assert _rates(1, 0.0, schedule, decay_ratio) == _rates(1, 1.0, schedule, decay_ratio) == [3e-4]


def test_a_decay_over_all_steps_after_the_warm_up_is_the_linear_schedule():
    for total_steps, warmup_ratio in itertools.product(TOTALS, WARMUPS):
        linear = _rates(total_steps, warmup_ratio, "linear", None)
        assert _rates(total_steps, warmup_ratio, "wsd", 1.0) == linear


def test_runs_of_different_length_share_their_stable_steps():
    """What WSD is for: a run is prolonged from any checkpoint of its stable phase."""
    short, long = (_rates(total, warmup, "wsd", 0.2) for total, warmup in ((100, 0.1), (1000, 0.01)))
    assert short[:80] == long[:80] and short[81] < long[81] == 3e-4


@pytest.mark.parametrize("ratio", [0.07, 0.29, 0.57, 0.58, 1.15 / 100, 1 / 3])
def test_whole_products_are_not_rounded_down(ratio):
    """0.29 * 100 is 28.999999999999996: the warm-up, or decay, is of 29 steps all the same."""
    for total_steps in (100, 600, 30_000):
        wanted = round(ratio * total_steps, 6)
        rates = _rates(total_steps, ratio, "linear", None)
        assert rates.index(3e-4) + 1 == math.floor(wanted)
        stable = _rates(total_steps, 0.0, "wsd", ratio)
        assert sum(rate < 3e-4 for rate in stable) + 1 == math.floor(wanted)


def test_learning_rate_scales_with_its_peak_alone():
    for schedule, decay_ratio in SCHEDULES:
        small, large = (_rates(37, 0.1, schedule, decay_ratio, peak) for peak in (1.0, 1024.0))
        assert [1024.0 * rate for rate in small] == large
