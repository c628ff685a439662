"""Check litmus tests of the compiled C parts in the memory model of AArch64.

    python docs/spec/litmus.py             every test, and every planted bug
    python docs/spec/litmus.py --herd      with herd7 as well, which must agree

A test in litmus/ is a few instructions of two or three processors, with the barriers that the C
sources have, and an outcome that must never happen. An instruction with a comment is part of a
planted bug of that name: without that barrier, or with a plain load or store in place of LDAR or
STLR, the outcome must be possible.

All executions of a test are enumerated: each load reads each store, the stores to each word come in
each order. Allowed are those that keep the two axioms of Arm's model (Arm ARM, B2.3; aarch64.cat of
herd7) that these instructions can break: a word is coherent, and what is ordered has no cycle.

Exits 0 if all is as it must be, 1 if anything is not, 2 if herd7 is asked for and missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from pathlib import Path

FOLDER = Path(__file__).with_name("litmus")

NEVER = "Never"
SOMETIMES = "Sometimes"

WEAKER = {"LDAR": "LDR", "STLR": "STR"}
"""What an ordered access is in a planted bug; a barrier is absent there."""

BARRIERS = {"DMB ISH", "DMB ISHLD"}


@dataclass(frozen=True)
class Instruction:
    """One instruction. name: with the barrier's domain; bug: of which it is a part, or ""."""

    name: str
    operands: tuple[str, ...]
    bug: str = ""


@dataclass(frozen=True)
class Litmus:
    """One test: what each processor does, the first values of words, and what must never happen."""

    name: str
    initial: dict[str, int]
    addresses: dict[tuple[int, str], str]
    threads: tuple[tuple[Instruction, ...], ...]
    never: str

    @property
    def bugs(self) -> list[str]:
        """Return the names of the planted bugs."""
        return sorted({each.bug for thread in self.threads for each in thread if each.bug})

    def with_bug(self, bug: str) -> Litmus:
        """Return the test with a bug planted."""
        threads = tuple(
            tuple(
                replace(each, name=WEAKER.get(each.name, each.name)) if each.bug == bug else each
                for each in thread
                if not (each.bug == bug and each.name in BARRIERS)
            )
            for thread in self.threads
        )
        return replace(self, name=f"{self.name}+{bug}", threads=threads)

    def text(self) -> str:
        """Return the test as herd7 reads it."""
        words = [f"{word}={value};" for word, value in self.initial.items()]
        words += [f"{thread}:{name}={to};" for (thread, name), to in self.addresses.items()]
        length = max(len(thread) for thread in self.threads)
        rows = [" | ".join(f"P{number}" for number in range(len(self.threads)))]
        for row in range(length):
            cells = [_cell(thread[row]) if row < len(thread) else "" for thread in self.threads]
            rows.append(" | ".join(cells))
        lines = "".join(f" {row} ;\n" for row in rows)
        return f"AArch64 {self.name}\n{{ {' '.join(words)} }}\n{lines}exists {self.never}\n"


def _cell(each: Instruction) -> str:
    return f"{each.name} {','.join(each.operands)}".strip()


def parse(text: str) -> Litmus:
    """Return the test in a text; only the instructions that our tests have are known."""
    name = re.match(r"AArch64 (\S+)", text)
    body = re.search(r"\n\{(.*?)\}\n(.*)\nexists (.*)", text, re.DOTALL)
    assert name is not None
    assert body is not None
    first, program, never = body.groups()
    initial: dict[str, int] = {}
    addresses: dict[tuple[int, str], str] = {}
    for left, right in re.findall(r"([\w:]+)=(\w+);", first):
        thread, _, register = left.rpartition(":")
        if thread:
            addresses[int(thread), register] = right
        else:
            initial[left] = int(right)
    rows = [line.rstrip(" ;").split("|") for line in program.splitlines()]
    threads = tuple(
        tuple(
            _instruction(row[column].strip())
            for row in rows[1:]
            if column < len(row) and row[column].strip()
        )
        for column in range(len(rows[0]))
    )
    return Litmus(name[1], initial, addresses, threads, never.strip())


def _instruction(cell: str) -> Instruction:
    code, _, comment = cell.partition("(*")
    name, _, rest = code.strip().partition(" ")
    bug = comment.rstrip(" *)").strip()
    if name == "DMB":
        return Instruction(f"DMB {rest}", (), bug)
    return Instruction(name, tuple(rest.split(",")) if rest else (), bug)


@dataclass
class Event:
    """One load, store or barrier of an execution."""

    thread: int
    name: str
    word: str = ""
    value: int = 0
    register: str = ""
    after_branch_on: list[int] = field(default_factory=list)

    @property
    def is_load(self) -> bool:
        """Return whether it reads a word."""
        return self.name in ("LDR", "LDAR")

    @property
    def is_store(self) -> bool:
        """Return whether it writes a word."""
        return self.name in ("STR", "STLR", "INIT")


def runs(test: Litmus) -> Iterator[tuple[list[Event], dict[int, int]]]:
    """Yield each choice of what the loads read: the events, and the store of each load."""
    values = sorted({int(number) for number in re.findall(r"#(\d+)", test.text())})
    values = sorted({*values, *test.initial.values()})
    loads = sum(each.name in ("LDR", "LDAR") for thread in test.threads for each in thread)
    for read in product(values, repeat=loads):
        events = [Event(-1, "INIT", word, value) for word, value in test.initial.items()]
        left = list(read)
        for number, thread in enumerate(test.threads):
            _walk(test, number, thread, left, events)
        if left:
            continue  # A branch skipped a load: no test has one behind a branch.
        sources = [
            [
                at
                for at, store in enumerate(events)
                if store.is_store and (store.word, store.value) == (load.word, load.value)
            ]
            for load in events
            if load.is_load
        ]
        places = [at for at, event in enumerate(events) if event.is_load]
        for chosen in product(*sources):
            yield events, dict(zip(places, chosen, strict=True))


def _walk(
    test: Litmus,
    number: int,
    thread: tuple[Instruction, ...],
    left: list[int],
    events: list[Event],
) -> None:
    registers: dict[str, int] = {}
    origin: dict[str, int] = {}
    branches: list[int] = []
    for each in thread:
        if each.name.endswith(":"):
            continue
        if each.name == "MOV":
            registers[each.operands[0]] = int(each.operands[1].removeprefix("#"))
        elif each.name == "CBZ":
            if registers[each.operands[0]] == 0:
                return  # Every label is at an end.
            branches.append(origin[each.operands[0]])
        elif each.name in BARRIERS:
            events.append(Event(number, each.name))
        else:
            name, place = each.operands
            word = test.addresses[number, place.strip("[]")]
            event = Event(number, each.name, word, 0, name, list(branches))
            if event.is_load:
                registers[name] = left.pop(0)
                origin[name] = len(events)
            event.value = registers[name]
            events.append(event)


def _pairs(events: list[Event]) -> Iterator[tuple[int, int]]:
    """Yield what is earlier and later in one program."""
    for later, event in enumerate(events):
        for earlier in range(later):
            if events[earlier].thread == event.thread >= 0:
                yield earlier, later


def ordered_locally(events: list[Event]) -> set[tuple[int, int]]:
    """Return what a processor keeps in order: lws, dob and bob of Arm's model."""
    edges: set[tuple[int, int]] = set()
    for a, b in _pairs(events):
        first, second = events[a], events[b]
        between = {event.name for event in events[a + 1 : b] if event.thread == first.thread}
        if not (first.word and second.word):
            continue
        if (
            (second.is_store and first.word == second.word)
            or (second.is_store and a in second.after_branch_on)
            or first.name == "LDAR"
            or second.name == "STLR"
            or (first.name == "STLR" and second.name == "LDAR")
            or "DMB ISH" in between
            or (first.is_load and "DMB ISHLD" in between)
        ):
            edges.add((a, b))
    return edges


def is_allowed(events: list[Event], source: dict[int, int]) -> bool:
    """Return whether any order of the stores to each word makes this an execution."""
    stores: dict[str, list[int]] = {}
    for at, event in enumerate(events):
        if event.is_store:
            stores.setdefault(event.word, []).append(at)
    # The first value is before every store.
    orders = [[(each[0], *rest) for rest in permutations(each[1:])] for each in stores.values()]
    local = ordered_locally(events)
    same_word = {(a, b) for a, b in _pairs(events) if events[a].word == events[b].word != ""}
    for order in product(*orders):
        co = {(a, b) for each in order for at, a in enumerate(each) for b in each[at + 1 :]}
        rf = {(store, load) for load, store in source.items()}
        fr = {
            (load, after) for load, store in source.items() for first, after in co if first == store
        }
        if _has_cycle(same_word | rf | co | fr):
            continue
        outside = {(a, b) for a, b in rf | co | fr if events[a].thread != events[b].thread}
        if not _has_cycle(outside | local):
            return True
    return False


def _has_cycle(edges: set[tuple[int, int]]) -> bool:
    left = set(edges)
    while left:
        targets = {b for _, b in left}
        kept = {(a, b) for a, b in left if a in targets}
        if kept == left:
            return True
        left = kept
    return False


def happens(test: Litmus, events: list[Event]) -> bool:
    """Return whether an execution ends with what must never happen."""
    final = {
        f"{event.thread}:X{event.register[1:]}": event.value for event in events if event.is_load
    }

    def holds(match: re.Match[str]) -> str:
        return str(final.get(match[1], 0) == int(match[2]))

    said = re.sub(r"(\d:X\d+)=(\d+)", holds, test.never)
    said = said.replace("/\\", " and ").replace("\\/", " or ")
    assert re.fullmatch(r"(True|False|and|or|[() ])*", said), said
    return bool(eval(said))  # noqa: S307 - words that the line above lists


def verdict(test: Litmus) -> str:
    """Return whether what must never happen does."""
    for events, source in runs(test):
        if happens(test, events) and is_allowed(events, source):
            return SOMETIMES
    return NEVER


def verdict_of_herd(test: Litmus, herd: str) -> str:
    """Ask herd7."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.litmus"
        path.write_text(test.text())
        said = subprocess.run(  # noqa: S603 - a program that the user names
            [*herd.split(), path], capture_output=True, text=True, check=False
        )
    found = re.search(r"^Observation \S+ (\w+)", said.stdout, re.MULTILINE)
    # "Always" is no less possible than "Sometimes".
    return {"Always": SOMETIMES}.get(found[1], found[1]) if found else said.stdout + said.stderr


def tests() -> list[Litmus]:
    """Return all tests, in the order of their names."""
    return [parse(path.read_text()) for path in sorted(FOLDER.glob("*.litmus"))]


def check(herd: str) -> bool:
    """Ask all tests and planted bugs; return whether all answers are right."""
    all_right = True
    for test in tests():
        for case, expected in [
            (test, NEVER),
            *((test.with_bug(bug), SOMETIMES) for bug in test.bugs),
        ]:
            answers = [verdict(case), *([verdict_of_herd(case, herd)] if herd else [])]
            right = all(answer == expected for answer in answers)
            all_right = all_right and right
            line = f"{case.name:<32} {'  '.join(f'{answer:<10}' for answer in answers)}"
            sys.stdout.write(line.rstrip() + ("" if right else f"   WRONG: {expected}") + "\n")
    return all_right


def main() -> int:
    """Check what the command line asks for."""
    parser = argparse.ArgumentParser(description="Check the litmus tests of the C parts.")
    parser.add_argument(
        "--herd", nargs="?", const="herd7", default="", help="ask this program as well: herd7"
    )
    herd = parser.parse_args().herd
    if herd and shutil.which(herd.split()[0]) is None:
        sys.stderr.write(f"missing: {herd.split()[0]}, of herdtools7\n")
        return 2
    right = check(herd)
    sys.stdout.write(f"\n{'As it must be' if right else 'NOT as it must be'}\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
