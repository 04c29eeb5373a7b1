from pageray.cluster.measured_rate import MeasuredRate


def test_nothing_is_known_at_first_and_a_sample_without_time_says_nothing() -> None:
    rate = MeasuredRate()
    assert rate.per_s() == 0.0
    rate.observe(5.0, 0.0)
    assert rate.per_s() == 0.0


def test_one_odd_sample_is_forgiven_and_change_is_followed() -> None:
    rate = MeasuredRate()
    rate.observe(100.0, 1.0)
    rate.observe(0.0, 1.0)
    assert rate.per_s() == 80.0
    for _ in range(40):
        rate.observe(10.0, 1.0)
    assert 10.0 <= rate.per_s() < 10.1


def test_an_old_rate_is_forgotten() -> None:
    rate = MeasuredRate(life_s=10.0)
    rate.observe(1.0, 1.0, now_s=0.0)
    assert rate.per_s(now_s=10.0) == 1.0
    assert rate.per_s(now_s=10.1) == 0.0
    rate.observe(8.0, 1.0, now_s=20.0)
    assert rate.per_s(now_s=20.0) == 8.0
