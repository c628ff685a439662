"""The checker of removals: what is removed everywhere is not there again, and what may be, may."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.effects import NotifyDirectory, Send
from peercache.actors.mailboxes import ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.removal.actor import Remover
from peercache.model.member import ALIVE, Member
from peercache.wire.messages.pool import Clear, Remove, Removed
from sims.removals import Removals, Stay
from sims.trace import Violation

KEY, OTHER = bytes(16), bytes([1] * 16)
CLIENT = Origin(9, 3)


def member(number: int) -> Member:
    return Member(
        incarnation=number,
        counter=1,
        state=ALIVE,
        head_rank=0,
        host_name="h",
        control="c:1",
        data="d:1",
        boot_id="h",
        segment="/s",
    )


@attrs.define(eq=False)
class Scene:
    """One node's removals, of members 1 and 2."""

    seen: Removals = attrs.field(factory=Removals)
    actor: Remover = attrs.field(factory=lambda: Remover(dead_s=6.0))

    def __attrs_post_init__(self) -> None:
        self.say(Origin(0), ViewChanged((member(1), member(2))), 0.0)

    def say(self, sender: Origin, message: object, now: float) -> None:
        before = dict(self.actor._pending)
        effects = self.actor.on_message(sender, message, now)  # type: ignore[arg-type]
        assert all(isinstance(effect, Send | NotifyDirectory) for effect in effects)
        self.seen.look(sender, message, before, self.actor._pending, now)

    def remove(self, message: Remove | Clear, *answers: int) -> None:
        """Begin at 10 s; members answer at 11 s."""
        self.say(CLIENT, message, 10.0)
        for number in answers:
            self.say(Origin(number), Removed(1, 1), 11.0)


def stay(at: int, since: float, until: float = 10.5) -> Stay:
    return Stay(at, 1, since, until)


@pytest.mark.parametrize("message", [Remove(5, 1, KEY, 2.0), Clear(5, 1, 2.0)])
def test_a_page_that_is_at_a_member_again_is_found(message: Remove | Clear) -> None:
    """It was at member 1 before, and both have answered."""
    scene = Scene()
    scene.remove(message, 1, 2)

    with pytest.raises(Violation, match="came-back"):
        scene.seen.judge(KEY, [stay(1, 5.0), stay(2, 12.0)], 12.0)


@pytest.mark.parametrize(
    ("answers", "stays"),
    [
        pytest.param((1,), [stay(1, 5.0), stay(2, 12.0)], id="one has not answered"),
        pytest.param((1, 2), [stay(1, 10.2), stay(2, 12.0)], id="set after the removal began"),
        pytest.param((1, 2), [stay(7, 5.0), stay(2, 12.0)], id="at a node that was not asked"),
        pytest.param((1, 2), [stay(1, 5.0), stay(7, 12.0)], id="comes to one that was not"),
        pytest.param((1, 2), [stay(1, 12.0)], id="a version of its own"),
    ],
)
def test_what_a_removal_does_not_promise_is_no_fault(
    answers: tuple[int, ...], stays: list[Stay]
) -> None:
    """Nothing is raised."""
    scene = Scene()
    scene.remove(Remove(5, 1, KEY, 2.0), *answers)

    scene.seen.judge(KEY, stays, 12.0)
    assert len(scene.seen.complete) == (len(answers) == 2)


def test_another_key_and_an_earlier_moment_are_no_fault() -> None:
    """The removal names its keys, and counts from its answer."""
    scene = Scene()
    scene.remove(Remove(5, 1, KEY, 2.0), 1, 2)

    scene.seen.judge(OTHER, [stay(1, 5.0), stay(2, 12.0)], 12.0)
    scene.seen.judge(KEY, [stay(1, 5.0), stay(2, 10.9)], 10.9)
