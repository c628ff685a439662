"""Print the cost of passing a message from one actor to the next, in three ways (ADR 0010).

Through a mailbox, like a node; encoded and decoded; over an inproc nng socket.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import numpy as np
import pynng

from peercache.actors.runtime import SELF, Mailbox
from peercache.model.member import ALIVE, Member
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Lookup, Put
from peercache.wire.messages.membership import ShareView

RUNS = 2000
REPEATS = 5


def microseconds(step: Callable[[], object]) -> float:
    """Return the time of one step: the best of some rounds, so that other work counts little."""
    return min(timeit.repeat(step, number=RUNS, repeat=REPEATS)) / RUNS * 1e6


def main() -> None:
    """Measure and print."""
    member = Member(7, 1, ALIVE, 0, "host-7", "host-7:31998", "host-7:31999", "boot", "/segment")
    messages: dict[str, Message] = {
        "Lookup of 32 keys": Lookup(1, bytes(32 * 16)),
        "Put of 64 records": Put(1, np.zeros(64 * 56, np.uint8).tobytes()),
        "view of 100 members": ShareView(0, (member,) * 100),
    }
    with pynng.Pair0(listen="inproc://handover") as near, pynng.Pair0() as far:
        far.dial("inproc://handover")
        print(f"{'message':<22}{'mailbox':>12}{'encoded':>12}{'socket':>12}   microseconds")
        for name, message in messages.items():
            mailbox = Mailbox[Message]()

            def hand_over(message: Message = message, mailbox: Mailbox[Message] = mailbox) -> None:
                mailbox.put(SELF, message)
                mailbox.take()

            def encoded(message: Message = message) -> None:
                decode(encode(Envelope(1, 1, message), cluster="c"), cluster="c")

            def over_a_socket(message: Message = message) -> None:
                near.send(encode(Envelope(1, 1, message), cluster="c"))
                decode(far.recv(), cluster="c")

            figures = [microseconds(step) for step in (hand_over, encoded, over_a_socket)]
            print(f"{name:<22}" + "".join(f"{figure:>12.2f}" for figure in figures))


if __name__ == "__main__":
    main()
