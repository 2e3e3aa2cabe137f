"""A rate is of the last seconds, or of the last round where that took longer."""

import threading

from notepad_jax.telemetry.meter import Meter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def metered():
    clock = Clock()
    return Meter(clock), clock


def test_a_rate_by_hand():
    meter, clock = metered()
    assert (meter(), meter.turns) == ("", 0)
    meter.work(30, 1, 2.0)  # from 98 to 100
    assert meter() == "15 tokens/s"
    clock.now = 104.0
    meter.work(3000, 2, 1.0)
    assert meter() == "505 tokens/s"  # 3,030 tokens in the six seconds since 98
    clock.now = 106.0  # the first round ended six seconds ago; the second began at 103
    assert meter() == "1,000 tokens/s" and meter.turns == 3
    clock.now = 109.5
    assert (meter(), meter.turns) == ("", 3)


def test_a_long_round_is_not_forgotten_while_the_next_one_runs():
    meter, clock = metered()
    meter.work(100, 0, 40.0)
    clock.now += 40.0
    assert meter() == "1.2 tokens/s"  # 100 in 80 seconds
    clock.now += 1.0
    assert meter() == ""


def test_engines_in_threads_lose_no_count():
    meter, _ = metered()

    def engine():
        for _ in range(500):
            meter.work(2, 1, 0.5)

    threads = [threading.Thread(target=engine) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.turns == 2000 and meter.rate() == 4000 / 0.5
