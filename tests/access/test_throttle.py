"""Patience with failed logins."""

from __future__ import annotations

from rezuscloud.access.throttle import Throttle


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_first_tries_are_free_and_later_ones_wait_twice_as_long_each_time() -> None:
    clock = _Clock()
    throttle = Throttle(free=3, cap_s=10, clock=clock)
    waits = []
    for _ in range(8):
        throttle.charge("a")
        waits.append(throttle.wait_s("a"))
        clock.now += throttle.wait_s("a")
    assert waits == [0, 0, 1, 2, 4, 8, 10, 10]
    assert throttle.wait_s("b") == 0


def test_success_forgives_and_so_does_time() -> None:
    clock = _Clock()
    throttle = Throttle(free=1, cap_s=60, forget_s=100, clock=clock)
    throttle.charge("a")
    assert throttle.wait_s("a") == 1
    throttle.forgive("a")
    assert throttle.wait_s("a") == 0
    for _ in range(5):
        throttle.charge("a")
    clock.now += 101
    throttle.charge("a")
    assert throttle.wait_s("a") == 1


def test_it_remembers_no_more_keys_than_it_may() -> None:
    throttle = Throttle(free=1, cap_s=60, capacity=10)
    for number in range(1000):
        throttle.charge(number)
    assert sum(throttle.wait_s(number) > 0 for number in range(1000)) == 10
