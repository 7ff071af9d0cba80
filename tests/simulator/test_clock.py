"""Order of time, then order of scheduling."""

from dora_rl.simulator.clock import Clock


def test_actions_run_in_order_of_time_then_of_scheduling() -> None:
    clock, done = Clock(), []
    clock.at(2.0, done.append, "c")
    clock.at(1.0, done.append, "a")
    clock.at(1.0, done.append, "b")
    while clock.next_time() is not None:
        clock.step()
    assert done == ["a", "b", "c"]
    assert clock.now == 2.0
    assert len(clock) == 0


def test_what_is_scheduled_in_the_past_happens_now() -> None:
    clock, done = Clock(), []
    clock.at(5.0, lambda _: clock.at(1.0, lambda _: done.append(clock.now)))
    clock.step()
    clock.step()
    assert done == [5.0]


def test_an_action_may_schedule_at_its_own_time() -> None:
    clock, done = Clock(), []
    clock.at(1.0, lambda _: clock.after(0.0, done.append, "again"))
    clock.at(1.0, done.append, "first")
    for _ in range(3):
        clock.step()
    assert done == ["first", "again"]
