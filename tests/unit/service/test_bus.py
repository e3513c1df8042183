"""Wake-ups: nobody who subscribed before a publish sleeps through it, and closing wakes everybody."""

from __future__ import annotations

import asyncio
import threading

from service.events.bus import Bus

LONG = 30.0
"""Far over what a wake-up takes: a test that waits this long has failed."""


def run_waiting(bus: Bus, *topics: str, publish: tuple[str, ...]) -> bool:
    """Subscribe, publish from another thread, wait."""

    async def wait() -> bool:
        with bus.subscribe(*topics) as subscription:
            publisher = threading.Thread(target=bus.publish, args=(publish,))
            publisher.start()
            woken = await subscription.wait(LONG if set(topics) & set(publish) else 0.05)
            publisher.join()
            return woken

    return asyncio.run(wait())


def test_a_coroutine_is_woken_from_another_thread() -> None:
    assert run_waiting(Bus(), "job:1", "log:7", publish=("log:7",))


def test_another_topic_wakes_nobody() -> None:
    assert not run_waiting(Bus(), "job:1", publish=("job:11", "job"))


def test_a_wake_up_between_subscribing_and_waiting_is_kept() -> None:
    async def wait() -> tuple[bool, bool]:
        bus = Bus()
        with bus.subscribe("job:1") as subscription:
            bus.publish({"job:1"})
            return await subscription.wait(LONG), await subscription.wait(0.01)

    assert asyncio.run(wait()) == (True, False)


def test_whoever_has_left_is_forgotten() -> None:
    bus = Bus()
    run_waiting(bus, "job:1", publish=("job:1",))
    assert not bus._coroutines
    bus.publish({"job:1"})  # its event loop is closed by now


def test_a_subscriber_of_a_closed_loop_harms_nobody() -> None:
    bus = Bus()

    async def subscribe() -> None:
        bus.subscribe("job:1").__enter__()

    asyncio.run(subscribe())
    event = bus.thread_event("job:1")
    bus.publish({"job:1"})
    assert event.is_set()


def test_a_thread_is_woken_by_any_of_its_topics() -> None:
    bus = Bus()
    event = bus.thread_event("schedule", "outbox")
    for topic in ("schedule", "outbox"):
        event.clear()
        bus.publish({topic})
        assert event.is_set()


def test_closing_wakes_everybody_for_the_last_time() -> None:
    bus = Bus()
    event = bus.thread_event("schedule")

    async def wait() -> bool:
        with bus.subscribe("job:1") as subscription:
            threading.Thread(target=bus.close).start()
            return await subscription.wait(LONG)

    assert asyncio.run(wait()) is False
    assert event.is_set()
    assert bus.is_closed
