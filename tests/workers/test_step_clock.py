from pageray.workers.ranks.step_clock import StepClock


def test_nothing_is_known_at_first() -> None:
    assert StepClock(300.0).timeout_s(1) == 300.0


def test_a_stuck_decode_step_is_noticed_soon_and_a_long_prefill_is_not() -> None:
    clock = StepClock(300.0)
    for _ in range(10):
        clock.observe(4, 0.2)
        clock.observe(2048, 9.0)
    assert clock.timeout_s(4) == 20.0
    assert 100.0 < clock.timeout_s(2048) <= 300.0


def test_the_slowest_is_remembered_for_a_while() -> None:
    clock = StepClock(300.0)
    clock.observe(1, 4.0)
    clock.observe(1, 0.01)
    assert clock.timeout_s(1) > 60.0
    for _ in range(200):
        clock.observe(1, 0.01)
    assert clock.timeout_s(1) == 20.0


def test_the_limit_is_never_exceeded() -> None:
    clock = StepClock(5.0)
    clock.observe(1, 4.0)
    assert clock.timeout_s(1) == 5.0
