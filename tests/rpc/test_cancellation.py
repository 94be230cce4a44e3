"""Who ends a request: `cancel` by its name, its client by leaving or by not reading; nobody else's."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import pytest
import trio
import trio.testing

from mzd.messages.requests import GenerateParams
from mzd.rpc.call import Call, Method
from mzd.rpc.limits import Limits
from mzd.rpc.outcome import of_handler
from mzd.rpc.params import GENERATE, STATUS


@dataclass
class Engine:
    """A fake of the daemon's service: one generation at a time, the others wait."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    release: trio.Event = field(default_factory=trio.Event)

    async def generate(self, params, call):
        async with self.lock:
            self.started.append(call.request)
            try:
                call.partial_text = f"said by {call.request}"
                await self.release.wait()
                return {"text": params.prompt}
            finally:
                self.ended.append(call.request)

    async def status(self, _params, _call):
        return {"state": "idle"}

    def methods(self):
        return {"generate": Method(GENERATE, self.generate), "status": Method(STATUS, self.status)}


@pytest.fixture
def engine():
    return Engine()


def request(msgid, name=None):
    return [0, msgid, "generate", [{"prompt": f"p{msgid}", "request": name}]]


async def test_cancel_ends_a_running_request_with_what_was_said(start, engine):
    wire = await (await start(engine.methods())).connect()
    await wire.send(request(1, "mine"))
    await trio.testing.wait_all_tasks_blocked(0.01)
    await wire.send([0, 2, "cancel", [{"request": "mine"}]])
    assert await wire.response(2) == (None, {"cancelled": True})
    error, _ = await wire.response(1)
    assert (error["code"], error["data"]) == ("cancelled", {"text": "said by mine"})
    assert engine.ended == ["mine"]


async def test_cancel_as_a_notification(start, engine):
    wire = await (await start(engine.methods())).connect()
    await wire.send(request(1, "mine"), [2, "cancel", [{"request": "mine"}]])
    assert (await wire.response(1))[0]["code"] == "cancelled"


async def test_case_063_cancelling_a_queued_request_leaves_the_active_one(start, engine):
    running = await start(engine.methods())
    one, two = await running.connect(), await running.connect()
    await one.send(request(1, "a"))
    await running.until(running_requests=1)
    await two.send(request(1, "b"))
    await running.until(running_requests=2)
    assert await two.call("cancel", {"request": "b"}, msgid=2) == (None, {"cancelled": True})
    assert (await two.response(1))[0]["code"] == "cancelled"
    engine.release.set()
    assert await one.response(1) == (None, {"text": "p1"})
    assert engine.started == ["a"]


async def test_a_request_without_a_name_is_called_connection_msgid(start, engine):
    running = await start(engine.methods())
    await running.connect()
    wire = await running.connect()
    await wire.send(request(77))
    await running.until(running_requests=1)
    other = await running.connect()
    assert (await other.call("cancel", {"request": "2:77"}))[1] == {"cancelled": True}
    assert (await wire.response(77))[0]["code"] == "cancelled"


async def test_names_are_unique_among_the_running_and_free_afterwards(start, engine):
    running = await start(engine.methods())
    one, two = await running.connect(), await running.connect()
    await one.send(request(1, "a"))
    await running.until(running_requests=1)
    error, _ = await two.call("generate", {"prompt": "x", "request": "a"})
    assert (error["code"], error["data"]) == ("invalid_params", {"parameter": "request"})
    engine.release.set()
    assert (await one.response(1))[0] is None
    assert (await two.call("generate", {"prompt": "x", "request": "a"}))[1] == {"text": "x"}
    assert (await one.call("cancel", {"request": "a"}))[1] == {"cancelled": False}


async def test_cancel_finds_what_came_before_it_and_nothing_that_comes_after(start, engine):
    wire = await (await start(engine.methods())).connect()
    cancel = [{"request": "a"}]
    await wire.send([0, 1, "cancel", cancel], request(2, "a"), [0, 3, "cancel", cancel], request(4, "b"))
    assert (await wire.response(1))[1] == {"cancelled": False}
    assert (await wire.response(3))[1] == {"cancelled": True}
    engine.release.set()
    assert (await wire.response(4))[0] is None


async def test_a_request_cancelled_before_its_turn_never_starts():
    async def handler(_params, _call):
        raise AssertionError("it started")

    outbox, _outgoing = trio.open_memory_channel(1)
    call = Call("a", 1, trio.current_time(), outbox)
    call.scope.cancel()
    frame = await of_handler(Method(GENERATE, handler), GenerateParams(prompt="x"), call, Limits())
    assert msgpack.unpackb(frame)[2]["code"] == "cancelled"


async def test_case_064_after_a_thousand_cancels_the_next_request_works(start, engine):
    running = await start(engine.methods())
    wire = await running.connect()
    for msgid in range(1000):
        await wire.send(request(msgid, "again"), [2, "cancel", [{"request": "again"}]])
        assert (await wire.response(msgid))[0]["code"] == "cancelled"
    engine.release.set()
    assert (await wire.call("generate", {"prompt": "x"}))[1] == {"text": "x"}
    await running.until(running_requests=0)


async def test_case_061_a_client_that_leaves_takes_its_requests_along(start, engine):
    running = await start(engine.methods())
    gone, stays = await running.connect(), await running.connect()
    await gone.send(request(1, "active"), request(2, "queued"))
    await running.until(running_requests=2)
    await stays.send(request(1, "other"))
    await running.until(running_requests=3)
    await gone.stream.aclose()
    await running.until(running_requests=1)
    engine.release.set()
    assert await stays.response(1) == (None, {"text": "p1"})
    assert set(engine.started) - {"other"} in ({"active"}, {"queued"})  # the one that had the lock, not both
    assert len(engine.started) == 2


async def test_a_client_that_shuts_down_its_sending_side_has_left(start, engine):
    running = await start(engine.methods())
    wire = await running.connect()
    await wire.send(request(1))
    await running.until(running_requests=1)
    await wire.stream.send_eof()
    await running.until(running_requests=0, connections=0)


async def test_a_client_that_leaves_inside_a_frame(start, engine):
    running = await start(engine.methods())
    wire = await running.connect()
    await wire.send(request(1))
    await running.until(running_requests=1)
    await wire.stream.send_all(b"\x94\x00")
    await wire.stream.aclose()
    await running.until(running_requests=0, connections=0)


@dataclass
class Flood:
    """A handler that notifies without end, and counts."""

    sent: dict[str, int] = field(default_factory=dict)

    async def generate(self, _params, call):
        self.sent[call.request] = 0
        while True:
            await call.notify("token", {"text": "x" * 1000, "token": 1})
            self.sent[call.request] += 1

    def methods(self):
        return {"generate": Method(GENERATE, self.generate), "status": Method(STATUS, Engine().status)}


async def test_notifications_carry_the_request_and_arrive_in_order(start):
    async def count(_params, call):
        for number in range(50):
            await call.notify("token", {"text": str(number), "token": number})
        return {"text": "done"}

    wire = await (await start({"generate": Method(GENERATE, count)})).connect()
    await wire.send(request(1, "mine"))
    seen = [await wire.receive() for _ in range(51)]
    assert seen[-1] == [1, 1, None, {"text": "done"}]
    assert [message[2][0] for message in seen[:-1]] == [
        {"request": "mine", "text": str(number), "token": number} for number in range(50)
    ]


async def test_a_client_that_does_not_read_holds_only_itself_back(start):
    flood = Flood()
    running = await start(flood.methods())
    slow, other = await running.connect(), await running.connect()
    await slow.send(request(1, "slow"))
    await running.until(running_requests=1)
    before = -1
    while flood.sent.get("slow", 0) != before:  # until the socket's buffer and the outbox are full
        before = flood.sent.get("slow", 0)
        await trio.testing.wait_all_tasks_blocked(0.02)
    assert flood.sent["slow"] * 1000 < 4_000_000
    for _ in range(20):
        assert (await other.call("status"))[0] is None
    assert flood.sent["slow"] == before
    message = await slow.receive()
    assert message[1] == "token"


async def test_a_client_that_reads_nothing_for_30_s_is_closed(start, autojump_clock):
    flood = Flood()
    running = await start(flood.methods())
    slow = await running.connect()
    began = trio.current_time()
    await slow.send(request(1, "slow"))
    with trio.fail_after(100):
        await running.until(connections=1, running_requests=1)
        await running.until(connections=0, running_requests=0, poll_s=0.1)
    assert 30 <= trio.current_time() - began < 40


async def test_a_client_that_reads_nothing_does_not_hold_up_the_servers_end(start, autojump_clock):
    running = await start(Flood().methods(), farewell_s=5)
    slow = await running.connect()
    await slow.send(request(1, "slow"))
    await running.until(connections=1, running_requests=1)
    began = trio.current_time()
    running.server.stop()
    await running.until(connections=0, running_requests=0, poll_s=0.1)
    assert trio.current_time() - began < 6


async def test_a_client_that_reads_slowly_is_kept(start, autojump_clock):
    flood = Flood()
    running = await start(flood.methods())
    slow = await running.connect()
    await slow.send(request(1, "slow"))
    for _ in range(20):
        await trio.sleep(25)
        received = 0
        while received < 150_000:  # more than a piece, less than what it could
            received += len(await slow.stream.receive_some(50_000))
    assert running.server.statistics().connections == 1


async def test_one_long_answer_read_slowly_is_read_to_its_end(start, autojump_clock):
    async def long(_params, _call):
        return {"text": "x" * 4_000_000}

    slow = await (await start({"status": Method(STATUS, long)})).connect()
    await slow.send([0, 1, "status", []])
    received = 0
    while received < 4_000_000:
        await trio.sleep(8)  # four pieces in 30 s, far less than the answer
        received += len(await slow.stream.receive_some(65_536))


async def test_cancelling_a_request_that_is_held_back_leaves_the_stream_whole(start):
    flood = Flood()
    running = await start(flood.methods())
    wire, other = await running.connect(), await running.connect()
    await wire.send(request(1, "held"))
    await running.until(running_requests=1)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert (await other.call("cancel", {"request": "held"}))[1] == {"cancelled": True}
    error, _ = await wire.response(1)
    assert error["code"] == "cancelled"
    assert (await wire.call("status"))[0] is None


async def test_a_client_that_sends_requests_and_reads_no_answers_is_bounded_and_closed(start, autojump_clock):
    async def large(_params, _call):
        return {"text": "x" * 100_000}

    running = await start({"status": Method(STATUS, large)}, requests_per_connection_max=20)
    wire = await running.connect()
    with trio.fail_after(100):
        try:
            while True:
                await wire.send(*([0, msgid, "status", []] for msgid in range(100)))
                assert running.server.statistics().running_requests <= 20
        except trio.BrokenResourceError:
            pass
        await running.until(connections=0)
