"""Check the models with spin: what is promised holds, and each planted bug is found.

    python docs/spec/check.py              everything
    python docs/spec/check.py --show NAME  the shortest counterexample of one planted bug

Exits 0 if all is as it must be, 1 if anything is not, 2 if spin or gcc is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SPEC = Path(__file__).parent
READ, HANDOVER, PLACEMENT = "read_protocol", "handover", "placement"
MODELS = (READ, HANDOVER, PLACEMENT)

MEMORY_MIB_MAX = 1500
"""Of one run; the largest takes a fifth of it."""

RUN_S_MAX = 900
"""Of one run; on a loaded machine the longest takes a tenth of it."""

HOLDS = "holds"
NAMES = {
    READ: {
        "1": "promise",
        "2": "own slot",
        "3": "odd word",
        "4": "unreadable",
        "5": "unique value",
        "6": "witness",
        "7": "sealed",
    },
    HANDOVER: {"1": "authority", "2": "found", "3": "removed", "4": "prefix", "6": "witness"},
    PLACEMENT: {"1": "removed", "2": "found", "3": "bytes", "6": "witness"},
}
"""What the CHECK numbers of each model mean."""

# Worlds: how much of everything there is.
SMALLEST = ("PAGES=2", "GRANULES=1")
TWO_SLOTS = ("PAGES=2", "GRANULES=2")
TWO_SIZES = ("PAGES=2", "GRANULES=2", "LARGE=1")
TWO_LIVES = ("PAGES=2", "GRANULES=1", "INCARNATIONS=2")
FORGED = ("FORGED", "KEYS=2")
THREE_PAGES = ("PAGES=3", "GRANULES=1", "CELLS=1")
BYZANTINE = (*TWO_LIVES, *FORGED, "BYZANTINE")

# Of the hand-over: 3 numbers are enough for two messages of a stream.
SWAP = ("STEPS=2", "NUMBERS=3")
JOIN = ("STEPS=2", "NUMBERS=5", "MEMBERS0=1")
TWO_CHANGES = ("STEPS=3", "NUMBERS=3")
AND_BACK = (*TWO_CHANGES, "THIRD=0")
HELD_DEAD = ("STEPS=3", "NUMBERS=5", "THIRD=0", "MEMBERS1=2")
STORED_TWICE = ("STEPS=2", "NUMBERS=4", "PAGES=2", "MEMBERS0=1")

# Of moving pages.
ONE_OFFER = ("OFFERS=1",)
BOTH_OFFER = ("OFFERS=2", "BOTH_HOLD=1")
REMOVED = (*ONE_OFFER, "REMOVAL")
PAUSED = ("OFFERS=2", "REMOVAL", "PAUSES=1")
REVOKED = (*ONE_OFFER, "REVOCATION", "BYZANTINE_GIVER")


@dataclass(frozen=True)
class Case:
    """One question to the checker, and the answer it must give.

    rule: what breaks when only the rules of owner and writer are checked; "" leaves that unasked.
    """

    name: str
    defines: tuple[str, ...]
    answer: str
    rule: str = ""
    model: str = READ


def truth(name: str, *defines: str) -> Case:
    """Make a case in which promise and rules hold."""
    return Case(name, (*defines, "ALL"), HOLDS)


def witness(name: str, world: tuple[str, ...], never: str, model: str = READ) -> Case:
    """Make a case that shows that something happens: its denial is refuted."""
    # spin hands its defines to a shell.
    return Case(name, (*world, f"WITNESS={shlex.quote(never)}"), "witness", model=model)


def bug(name: str, world: tuple[str, ...], rule: str, *more: str) -> Case:
    """Make a case in which a planted bug breaks the promise."""
    return Case(name, (*world, name.partition(" ")[0], *more), "promise", rule)


def truth_of(model: str, name: str, *defines: str) -> Case:
    """Make a case of another model in which all that is promised holds."""
    return Case(name, defines, HOLDS, model=model)


def bug_of(model: str, name: str, world: tuple[str, ...], promise: str) -> Case:
    """Make a case of another model in which a planted bug breaks a promise."""
    return Case(name, (*world, name), promise, model=model)


TRUTHS = (
    truth("one slot, three pages", "PAGES=3", "GRANULES=1"),
    truth("two slots or one, pages of two sizes", "PAGES=3", "GRANULES=2", "LARGE=2", "CELLS=1"),
    truth("the same in smaller steps, a client is killed", *TWO_SIZES, "EXITS"),
    truth("two small slots, a client is killed", *TWO_SLOTS, "EXITS"),
    truth("the node and a client die", *TWO_LIVES, "EXITS"),
    # Two nets below the trapeze: each alone is enough. Numbers that restart do break a rule.
    Case("numbers restart, incarnations are checked", (*TWO_LIVES, "COUNTER_RESTARTS"), HOLDS),
    truth("incarnations unchecked, numbers differ", *TWO_LIVES, "INCARNATION_UNCHECKED"),
    # An attacker makes the records.
    truth("forged records, two pages", *SMALLEST, *FORGED),
    truth("forged records, three pages of two keys", *THREE_PAGES, *FORGED),
    truth("forged records, pages of two sizes", *TWO_SIZES, "CELLS=1", *FORGED),
    truth("forged records, the node dies", *TWO_LIVES, *FORGED),
    truth("forged records, seals come word first", *THREE_PAGES, *FORGED, "LOOKS_WORD_FIRST"),
    truth("forged records, a Byzantine holder", *BYZANTINE),
    # The directory.
    truth_of(HANDOVER, "another node owns the key", *SWAP, "REPAIRS"),
    truth_of(HANDOVER, "answers of owners come late", *SWAP, "LATE_ANSWERS"),
    truth_of(HANDOVER, "a node joins and owns the key", *JOIN),
    truth_of(HANDOVER, "the same, with plain summaries", *JOIN, "SUMMARIES"),
    truth_of(HANDOVER, "the ring changes twice", *TWO_CHANGES),
    truth_of(HANDOVER, "the ring changes, and changes back", *AND_BACK),
    truth_of(HANDOVER, "an owner is held dead, and refutes", *HELD_DEAD),
    truth_of(HANDOVER, "an owner holds the holder dead", *SWAP, "LAPSES=1"),
    truth_of(HANDOVER, "an owner's process stops", *SWAP, "STOPS=1"),
    truth_of(HANDOVER, "pages come and go, messages are lost", *SWAP, "OTHERS"),
    truth_of(HANDOVER, "a page is removed and stored again", *STORED_TWICE, "LAPSES=1"),
    # Pages that move.
    truth_of(PLACEMENT, "two holders offer each other the page", *BOTH_OFFER, "DEATHS=1"),
    truth_of(PLACEMENT, "a removal, a node is paused", *PAUSED),
    truth_of(PLACEMENT, "a removal, one dies and one is paused", *PAUSED, "DEATHS=1"),
    truth_of(PLACEMENT, "a removal, and the page is set again", *REMOVED, "SETS=1", "PAUSES=1"),
    truth_of(PLACEMENT, "a Byzantine taker", "OFFERS=2", "REMOVAL", "BYZANTINE_TAKER"),
    truth_of(PLACEMENT, "a Byzantine giver is revoked", *REVOKED),
    truth_of(PLACEMENT, "the same, its taker has the page", *REVOKED, "BOTH_HOLD=1"),
    truth_of(PLACEMENT, "the other node has wrong bytes", *BOTH_OFFER, "WRONG_COPY"),
)

WITNESSES = (
    witness("a page is hit", SMALLEST, "false"),
    witness("a page is hit in a slot that was another's", SMALLEST, "(!made[1-p])"),
    witness("a large page is hit", TWO_SIZES, "(p!=LARGE)"),
    witness("a small page is hit where a large one was", TWO_SIZES, "(p==LARGE||!made[LARGE])"),
    witness("a page of the successor is hit", TWO_LIVES, "(holder[p]==0)"),
    witness("a page of the dead is hit, still mapped", TWO_LIVES, "(!crashed)"),
    witness("a forged record that is true is hit", (*SMALLEST, *FORGED), "false"),
    witness("a Byzantine holder's bytes are a hit", BYZANTINE, "(from==1||is_right)"),
    witness(
        "a Commit comes again, its slot is another's",
        (*SMALLEST, "REPEATED"),
        "(slot[granted[p]-1]==FREE||who[granted[p]-1]==p)",
    ),
    witness(
        "a newcomer knows that a page is absent",
        JOIN,
        "(!(has_authority(1)&&!page&&!record[1]))",
        HANDOVER,
    ),
    witness(
        "a newcomer has a stored page",
        JOIN,
        "(!(has_authority(1)&&known&&known==record[1]))",
        HANDOVER,
    ),
    witness(
        "an owner is two changes behind, with authority",
        TWO_CHANGES,
        "(!(has_authority(0)&&ring[0]==0&&step==2&&page&&known))",
        HANDOVER,
    ),
    witness(
        "authority comes back after a stop",
        (*SWAP, "STOPS=1"),
        "(!(has_authority(0)&&least[0]))",
        HANDOVER,
    ),
    witness(
        "authority comes back to an owner held dead",
        HELD_DEAD,
        "(!(has_authority(0)&&refuted&&step==2&&record[0]))",
        HANDOVER,
    ),
    witness(
        "a former owner has dropped the record",
        SWAP,
        "(!(page&&step==1&&record[1]&&!record[0]&&number[0]==2))",
        HANDOVER,
    ),
    witness("a page moves", ONE_OFFER, "(!(holds(1)&&!holds(0)&&!excused))", PLACEMENT),
    witness(
        "a page is removed while it is read",
        REMOVED,
        "(!(offer[0]==READ&&is_void[0]&&has_arrived[0]))",
        PLACEMENT,
    ),
    witness(
        "a Byzantine taker loses a page",
        (*ONE_OFFER, "BYZANTINE_TAKER"),
        "(removal!=NO_REMOVAL||excused||is_found(0)||is_found(1))",
        PLACEMENT,
    ),
    witness(
        "a node that was unreachable brings a page back",
        (*REMOVED, "UNREACHABLE"),
        "(!(has_removed[0]&&holds(0)||has_removed[1]&&holds(1)))",
        PLACEMENT,
    ),
)

BUGS = (
    # The reader.
    bug("NO_FENCE", SMALLEST, HOLDS),
    bug("WORD_BEFORE_BYTES", SMALLEST, HOLDS),
    bug("WORD_UNCHECKED", SMALLEST, HOLDS),
    bug("UNFINISHED_JUDGED", SMALLEST, HOLDS),
    bug("STALE_WORD_JUDGED", SMALLEST, HOLDS),
    bug("LATE_TRANSFER", TWO_SLOTS, HOLDS),
    # The reader of forged records.
    bug("NO_FIRST_LOOK", (*SMALLEST, *FORGED), HOLDS),
    bug("FIRST_LOOK_UNFENCED", (*SMALLEST, *FORGED), HOLDS),
    bug("FUTURE_ACCEPTED", (*SMALLEST, *FORGED), HOLDS),
    bug("KEY_UNCOMPARED", (*SMALLEST, *FORGED), HOLDS),
    bug("LENGTH_UNCOMPARED", (*TWO_SIZES, *FORGED), HOLDS),
    bug("KEY_LOADED_LATE", (*SMALLEST, *FORGED), HOLDS),
    bug("SEAL_IN_PIECES", (*THREE_PAGES, *FORGED), HOLDS, "LOOKS_WORD_FIRST"),
    # The owner's words and seals.
    bug("SEALED_AFTER_WORD", (*SMALLEST, *FORGED), "sealed"),
    bug("EVICTED_WITHOUT_ODD", SMALLEST, "odd word"),
    bug("ODD_AFTER_GRANT", SMALLEST, "odd word"),
    bug("GENERATION_REUSED", SMALLEST, "unique value"),
    bug("TABLE_REINDEXED", TWO_SIZES, "unreadable"),
    bug("PUBLISHED_BEFORE_COMMIT", SMALLEST, "odd word"),
    # The owner's slots.
    bug("FREED_BY_TIME", SMALLEST, "own slot"),
    bug("FREED_BY_LOST_CONNECTION", SMALLEST, "own slot"),
    bug("RESERVED_SLOT_EVICTED", SMALLEST, "own slot"),
    bug("RESERVE_NOT_IDEMPOTENT", TWO_SLOTS, "own slot"),
    bug("COMMIT_NOT_IDEMPOTENT", SMALLEST, "odd word"),
    # The writer.
    bug("UNLISTED_WHILE_COPYING", SMALLEST, "own slot"),
    bug("COPY_GOES_ON_AFTER_ABORT", SMALLEST, "own slot"),
    bug("COMMITTED_UNWRITTEN", SMALLEST, HOLDS),
    bug("SOURCE_READ_LATE", SMALLEST, HOLDS),
    # Two lives of one node.
    bug("INCARNATION_UNCHECKED + COUNTER_RESTARTS", TWO_LIVES, "unique value", "COUNTER_RESTARTS"),
    bug("SEGMENT_REOPENED", TWO_LIVES, "odd word"),
    bug("COMMIT_OF_DEAD_ACCEPTED", TWO_LIVES, "own slot"),
    # A Byzantine holder.
    bug("RESUMED", BYZANTINE, HOLDS),
    # The holder of a page, as a publisher.
    bug_of(HANDOVER, "HANDED_OVER_EARLY", JOIN, "authority"),
    bug_of(HANDOVER, "FORMER_UNSENT", SWAP, "authority"),
    bug_of(HANDOVER, "ONE_FORMER_RING", TWO_CHANGES, "authority"),
    bug_of(HANDOVER, "WITHDRAWN_AT_ONCE", SWAP, "authority"),
    bug_of(HANDOVER, "WITHDRAWN_UNACKNOWLEDGED", SWAP, "found"),
    # The owners of its record.
    bug_of(HANDOVER, "NEWCOMER_AT_ONCE", JOIN, "authority"),
    bug_of(HANDOVER, "GAP_UNNOTICED", (*SWAP, "OTHERS"), "prefix"),
    bug_of(HANDOVER, "SUMMARY_COUNTS_AS_HAND_OVER", (*JOIN, "SUMMARIES"), "authority"),
    bug_of(HANDOVER, "SUMMARY_OF_BEFORE_COUNTS", (*SWAP, "STOPS=1"), "authority"),
    bug_of(HANDOVER, "STALL_UNNOTICED", (*SWAP, "STOPS=1"), "authority"),
    bug_of(HANDOVER, "HOLDER_INHERITS", (*SWAP, "LAPSES=1"), "authority"),
    bug_of(HANDOVER, "DEATH_UNNOTICED", HELD_DEAD, "authority"),
    bug_of(HANDOVER, "LATE_APPLIED", STORED_TWICE, "removed"),
    bug_of(HANDOVER, "NUMBER_FORGOTTEN", (*STORED_TWICE, "LAPSES=1"), "removed"),
    # Who gives a page away.
    bug_of(PLACEMENT, "OFFERED_THOUGH_PAUSED", PAUSED, "removed"),
    bug_of(PLACEMENT, "WITHHELD_AT_ONCE", PAUSED, "removed"),
    bug_of(PLACEMENT, "GIVEN_BY_BOTH", BOTH_OFFER, "found"),
    bug_of(PLACEMENT, "GENERATION_IGNORED", (*REMOVED, "SETS=1"), "found"),
    # Who takes it.
    bug_of(PLACEMENT, "REMOVED_BUT_COMMITTED", REMOVED, "removed"),
    bug_of(PLACEMENT, "WAITING_OFFER_TAKEN", (*REMOVED, "PAUSES=1"), "removed"),
    bug_of(PLACEMENT, "VOID_IN_FLIGHT_ONLY", (*REMOVED, "PAUSES=1"), "removed"),
    bug_of(PLACEMENT, "UNVERIFIED", (*REMOVED, "SETS=1"), "bytes"),
    bug_of(PLACEMENT, "ANSWERED_UNKNOWN", ONE_OFFER, "found"),
    bug_of(PLACEMENT, "OTHER_BYTES_COUNT", (*BOTH_OFFER, "WRONG_COPY"), "found"),
    bug_of(PLACEMENT, "ORIGIN_FORGOTTEN", REVOKED, "bytes"),
    bug_of(PLACEMENT, "REVOKED_IN_FLIGHT", REVOKED, "bytes"),
)


class Unanswered(Exception):
    """The checker did not come to an end that means anything."""


@dataclass(frozen=True)
class Answer:
    """What the checker says. broken: which check failed first, or HOLDS."""

    broken: str
    states: int
    steps: int
    seconds: float


def ask(
    folder: Path,
    defines: Sequence[str],
    model: str = READ,
    *,
    thorough: bool = False,
    shortest: bool = False,
) -> Answer:
    """Make a checker for a model with these defines, and run it to its end.

    thorough: there is much to search; shortest: find the shortest way to what breaks.
    """
    began = time.monotonic()
    folder.mkdir()
    shutil.copy(SPEC / f"{model}.pml", folder)
    run(folder, "spin", "-a", *(f"-D{define}" for define in defines), f"{model}.pml")
    # Millions of states pay for a compiler that takes its time, thousands do not.
    flags = ["-O2" if thorough else "-O0", "-w", "-DSAFETY", "-DCOLLAPSE"]
    flags += [f"-DMEMLIM={MEMORY_MIB_MAX}", *(["-DBFS"] if shortest else [])]
    run(folder, "gcc", *flags, "-o", "pan", "pan.c")
    said = run(folder, "./pan", "-m10000", "-n", "-w24" if thorough else "-w18")
    broken = re.search(r"assertion violated \(+0==(\d)\)", said)
    states = re.search(r"(\d+) states, stored", said)
    depth = re.search(r"depth reached (\d+)", said)
    errors = re.search(r"errors: (\d+)", said)
    # A search that ended early is an answer only if it ended with what it looked for.
    incomplete = not broken and "Search not completed" in said
    incomplete |= "max search depth too small" in said
    if not (states and depth and errors) or incomplete or bool(int(errors[1])) != bool(broken):
        raise Unanswered(f"{' '.join(defines)}:\n{said}")
    return Answer(
        NAMES[model][broken[1]] if broken else HOLDS,
        int(states[1]),
        int(depth[1]),
        time.monotonic() - began,
    )


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program to its end and return what it said; it must not fail."""
    try:
        done = subprocess.run(  # noqa: S603 - our own arguments
            [program, *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{program} took more than {RUN_S_MAX} s") from error
    if done.returncode != 0:
        raise Unanswered(f"{program} {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def verdict(folder: Path, case: Case) -> tuple[bool, str]:
    """Ask one case; return whether the answer is right, and a line about it."""
    answer = ask(folder / "promise", case.defines, case.model, thorough=case.answer == HOLDS)
    right = answer.broken == case.answer
    line = f"{case.name:<46} {answer.broken:<9} {answer.states:>9,} {answer.seconds:>6.1f} s"
    if case.rule:
        rules = ask(folder / "rules", (*case.defines, "RULES"))
        right = right and rules.broken == case.rule
        line += f"   {rules.broken}"
    if not right:
        line += f"   WRONG: expected {case.answer} {case.rule}"
    return right, line


def check(folder: Path) -> bool:
    """Ask everything; return whether all answers are right."""
    cases = [*TRUTHS, *WITNESSES, *BUGS]
    heads = {
        TRUTHS[0].name: f"{'What must hold':<46} {'answer':<9} {'states':>9}",
        WITNESSES[0].name: "\nWhat must be able to happen: its denial is refuted",
        BUGS[0].name: f"\n{'Planted bugs: a promise is refuted':<85} and of the rules",
    }
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        verdicts = threads.map(
            lambda place: verdict(made(folder / str(place)), cases[place]), range(len(cases))
        )
        all_right = True
        for case, (right, line) in zip(cases, verdicts, strict=True):
            if case.name in heads:
                say(heads[case.name])
            say(f"  {line}")
            all_right = all_right and right
    return all_right


def made(folder: Path) -> Path:
    """Make a folder and return it."""
    folder.mkdir()
    return folder


def show(folder: Path, name: str) -> bool:
    """Print the shortest way to what one bug breaks."""
    case = next(case for case in BUGS if case.name.startswith(name))
    asked = made(folder / "shown") / "promise"
    answer = ask(asked, case.defines, case.model, shortest=True)
    flags = [f"-D{define}" for define in case.defines]
    say(run(asked, "spin", "-t", "-p", "-g", *flags, f"{case.model}.pml"))
    return answer.broken == case.answer


def say(line: str) -> None:
    """Write one line, at once: the whole takes minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Check what the command line asks for."""
    parser = argparse.ArgumentParser(description="Check the models.")
    parser.add_argument("--show", metavar="NAME", help="print a planted bug's counterexample")
    wanted = parser.parse_args().show
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        sys.stderr.write(f"missing: {', '.join(missing)} (on Debian: apt-get install spin gcc)\n")
        return 2
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            right = show(Path(folder), wanted) if wanted else check(Path(folder))
    except Unanswered as unanswered:
        sys.stderr.write(f"no answer: {unanswered}\n")
        return 1
    say(f"\n{'As it must be' if right else 'NOT as it must be'}, {time.monotonic() - began:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
