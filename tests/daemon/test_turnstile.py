"""The turnstile: one at a time, in order of arrival, and no more waiting than said."""

import pytest
import trio

from mzd.daemon.turnstile import Turnstile
from mzd.errors import MzdError


async def visit(turnstile, log, name, stay_s=1.0):
    async with turnstile.turn():
        log.append(name)
        await trio.sleep(stay_s)
        log.append(name)


async def test_turns_come_in_order_of_arrival_and_never_overlap(autojump_clock):
    turnstile, log = Turnstile(8), []
    async with trio.open_nursery() as nursery:
        for name in "abcde":
            nursery.start_soon(visit, turnstile, log, name)
            await trio.sleep(0.01)
        assert turnstile.occupied
        assert turnstile.waiting == 4
    assert "".join(log) == "aabbccddee"
    assert not turnstile.occupied


async def test_one_more_than_may_wait_is_busy(autojump_clock, nursery):
    turnstile, log = Turnstile(2), []
    for name in "abc":
        nursery.start_soon(visit, turnstile, log, name)
        await trio.sleep(0.01)
    with pytest.raises(MzdError) as raised:
        await visit(turnstile, log, "d")
    assert (raised.value.code, raised.value.data["waiting"]) == ("busy", 2)
    await trio.sleep(1.5)
    nursery.start_soon(visit, turnstile, log, "e")
    await trio.sleep(5)
    assert "".join(log) == "aabbccee"


async def test_one_that_is_cancelled_while_it_waits_gives_its_place_up(autojump_clock, nursery):
    turnstile, log = Turnstile(1), []
    nursery.start_soon(visit, turnstile, log, "a")
    await trio.sleep(0.01)
    with trio.move_on_after(0.1):
        await visit(turnstile, log, "b")
    assert turnstile.waiting == 0
    await visit(turnstile, log, "c")
    assert "".join(log) == "aacc"


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_the_turn_is_over_however_its_holder_ends(autojump_clock, how):
    turnstile, log = Turnstile(1), []
    if how == "cancelled":
        with trio.move_on_after(0.5):
            await visit(turnstile, log, "a")
    else:
        with pytest.raises(ZeroDivisionError):
            async with turnstile.turn():
                raise ZeroDivisionError
    assert not turnstile.occupied
    await visit(turnstile, log, "b")
