"""When a tenant is due, in numbers."""

from __future__ import annotations

import pytest

from rezuscloud.reconcile.schedule import BACKOFF_LAST_S, Schedule


def make(quiet_s: float = 5, cap_s: float = 30) -> Schedule:
    return Schedule(quiet_s=quiet_s, cap_s=cap_s, jitter=lambda: 0.5)


def test_nothing_is_due_before_a_change() -> None:
    assert make().due is None


def test_a_change_is_due_once_it_has_been_quiet() -> None:
    schedule = make()
    schedule.changed(100)
    assert schedule.due == 105


def test_each_further_change_puts_it_off_but_not_beyond_the_cap() -> None:
    schedule = make()
    for now in range(100, 140, 2):
        schedule.changed(now)
    assert schedule.due == 130


def test_taking_the_turn_serves_all_changes_so_far() -> None:
    schedule = make()
    schedule.changed(100)
    schedule.take()
    assert schedule.due is None
    schedule.changed(106)
    assert schedule.due == 111


@pytest.mark.parametrize(("failures", "delay"), [(1, 5), (2, 10), (3, 20), (4, 40), (20, BACKOFF_LAST_S)])
def test_failures_wait_longer_each_time_up_to_a_limit(failures: int, delay: float) -> None:
    schedule = make()
    delays = [schedule.failed(0) for _ in range(failures)]
    assert delays[-1] == delay


def test_jitter_keeps_a_fleet_from_trying_all_at_once() -> None:
    least = Schedule(quiet_s=5, cap_s=30, jitter=lambda: 0.0).failed(0)
    most = Schedule(quiet_s=5, cap_s=30, jitter=lambda: 1.0).failed(0)
    assert (least, most) == pytest.approx((4.0, 6.0))


def test_a_change_ends_a_backoff_because_it_may_be_the_cure() -> None:
    schedule = make()
    for _ in range(6):
        schedule.failed(0)
    schedule.changed(10)
    assert (schedule.due, schedule.failures) == (15, 0)


def test_a_person_who_asks_does_not_wait_for_the_debounce() -> None:
    schedule = make()
    schedule.changed(100)
    schedule.wake(101)
    assert schedule.due == 101


def test_looking_again_never_puts_off_what_is_due_before() -> None:
    schedule = make()
    schedule.look_again(50)
    schedule.look_again(80)
    assert schedule.due == 50
