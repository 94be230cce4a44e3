"""Case 144: random and hostile frames by the ten thousand; MZD_HOSTILE_FRAMES sets how many (CI: 1e6)."""

from __future__ import annotations

import contextlib
import os
import random
import struct

import msgpack
import psutil
import trio

from mzd.errors import MzdError
from mzd.rpc.call import Method
from mzd.rpc.framing import FrameReader
from mzd.rpc.limits import Limits
from mzd.rpc.params import GENERATE, SCHEMAS, STATUS
from mzd.rpc.protocol import Request, decode_message

NUM_FRAMES = int(os.environ.get("MZD_HOSTILE_FRAMES", "10000"))
MIB = 1 << 20


async def status(_params, _call):
    return {"state": "idle"}


async def generate(params, call):
    await call.notify("token", {"text": "x", "token": 1})
    return {"text": params.prompt}


METHODS = {"status": Method(STATUS, status), "generate": Method(GENERATE, generate)}
VALID = [
    msgpack.packb(message)
    for message in (
        [0, 1, "status", []],
        [0, 2, "generate", [{"prompt": "hello", "seed": 5, "stream": True, "stop": ["a"]}]],
        [0, 3, "generate", [{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}]],
        [0, 4, "generate", [{"tokens": list(range(50))}]],
        [0, 5, "cancel", [{"request": "x"}]],
        [2, "cancel", [{"request": "1:1"}]],
    )
]


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 120))


def mutated(rng: random.Random) -> bytes:
    frame = bytearray(rng.choice(VALID))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    return bytes(frame)


def truncated(rng: random.Random) -> bytes:
    frame = rng.choice(VALID)
    return frame[: rng.randrange(len(frame))]


def announcing(rng: random.Random) -> bytes:
    header = rng.choice((b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"))
    length = rng.choice((0xFFFFFFFF, 1 << 31, 1 << 24, 1 << 18, 1 << 16))
    return rng.choice((b"", b"\x94\x00\x01\xa6status\x91")) + (
        header + struct.pack(">I", length)
    ) * rng.randrange(1, 9)


def nested(rng: random.Random) -> bytes:
    return rng.choice((b"\x91", b"\x81\xa1k", b"\xdc\x00\x01")) * rng.choice((15, 16, 17, 1000, 20000))


def wrong_value(rng: random.Random) -> bytes:
    value = rng.choice(
        (None, True, -1, 1 << 63, 1e300, float("nan"), "", "\x00", b"\xff", [], {}, [[1]], {"a": 1})
    )
    name = rng.choice([*GENERATE.fields, "x"])
    return msgpack.packb([0, rng.randrange(9), "generate", [{"prompt": "x", name: value}]])


KINDS = (random_bytes, mutated, truncated, announcing, nested, wrong_value)


async def attack(running, rng: random.Random, num_frames: int) -> None:
    """Send hostile frames, over a new connection whenever the server has closed one."""
    wire = await running.connect()
    for _ in range(num_frames):
        try:
            await wire.stream.send_all(rng.choice(KINDS)(rng))
            if rng.random() < 0.2:
                await wire.stream.send_eof()
                await wire.rest()
                raise trio.BrokenResourceError
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(wire.stream)
            running.wires.remove(wire)
            wire = await running.connect()
    await trio.aclose_forcefully(wire.stream)


def test_case_144_hostile_frames_build_nothing_large():
    rng = random.Random(0)
    for _ in range(3 * NUM_FRAMES):
        reader = FrameReader(Limits())
        reader.feed(rng.choice(KINDS)(rng))
        with contextlib.suppress(MzdError):
            while (frame := reader.next_frame()) is not None:
                message = decode_message(frame)
                if isinstance(message, Request):
                    SCHEMAS[message.method if message.method in SCHEMAS else "status"].parse(message.params)
        assert reader.buffered_bytes <= 64 * 1024


async def test_case_144_hostile_frames_harm_nobody(start):
    running = await start(METHODS, linger_s=0.05)
    good = await running.connect()
    await attack(running, random.Random(0), 500)  # what is allocated once, is
    await good.call("status")
    process = psutil.Process()
    before = process.memory_info().rss
    async with trio.open_nursery() as attackers:
        for seed in range(1, 5):
            attackers.start_soon(attack, running, random.Random(seed), NUM_FRAMES // 4)
        while len(attackers.child_tasks):
            assert await good.call("status") == (None, {"state": "idle"})
            await trio.sleep(0.05)
    await running.until(connections=1, running_requests=0, buffered_bytes=0)
    assert process.memory_info().rss - before < 8 * MIB
