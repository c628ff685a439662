"""Time to first token of SGLang: cold, from PeerCache, and from the engine's own host memory.

    PYTHONPATH=src ~/.cache/peercache/sglang-0.5.23/bin/python -m benchmarks.ttft_sglang \
        [--json] [--quick] [--rounds 3]

Two SGLang engines on the CPU, each with a home node of its own. The first one computes prompts and
stores their pages: `cold`. It ends, and the second one answers the same prompts, which it has never
seen, from the first one's node: `warm`, over tcp and then, with a store that is attached again,
over shared memory. Its device holds one prompt, so each prompt evicts the one before it to the
engine's own host memory, and asking for that one again gives `host memory`. Then two engines
without a host tier do the same through the linker, over two new nodes: `linked`. The memory of the
engine's processes and of the nodes is shown with and without a host tier.

A time is measured from the request to the first streamed token. All tokens must be equal in all
cases, and all cached tokens must come from the expected source. At the end pages are zeroed as they
are read: the tokens must change, otherwise their equality would be meaningless. Needs the
environment of tests/integration/install_sglang.sh. `make ttft` updates the documentation with this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from benchmarks import ttft_report
from benchmarks.ttft_engine import CALLS_FILE, PAGE_TOKENS, ZERO_SUFFIX
from tests.integration.processes import Child, StandaloneNode
from tests.integration.tiny_llama import CONFIG, write_tiny_llama

VALUE_BYTES = 2
"""Bytes of one number of the KV, in bfloat16."""

START_S = 900.0
STORED_WITHIN_S = 120.0
WARM_UP_TOKENS = 200
"""Tokens of a first prompt that is not timed. SGLang stores none of less than 256."""

FABRICS = ("tcp", "shm")

Nodes = tuple[StandaloneNode, StandaloneNode]
Memory = dict[str, int]
"""Bytes of an engine's processes and of the nodes, by name."""


@attrs.frozen
class Case:
    """A benchmark case.

    sizes:         fields of the model's config.json that replace those of the small one.
    prompt_tokens: all but the last page can be cached.
    """

    sizes: dict[str, int]
    prompt_tokens: int

    @property
    def shape(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**CONFIG, **self.sizes}

    @property
    def cached_tokens(self) -> int:
        """Tokens of a prompt that SGLang takes from a cache; it computes at least one."""
        return (self.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        shape = self.shape
        heads: int = shape["num_hidden_layers"] * shape["num_key_value_heads"]
        return PAGE_TOKENS * heads * int(shape["head_dim"]) * 2 * VALUE_BYTES

    @property
    def device_tokens(self) -> int:
        """Room of the engine's device pool: one prompt and its generated tokens, not two."""
        return self.prompt_tokens + 4 * PAGE_TOKENS

    def prompt(self, number: int) -> list[int]:
        """Return token ids without special tokens."""
        return random.Random(number).choices(  # noqa: S311 - equal every time
            range(3, self.shape["vocab_size"]), k=self.prompt_tokens
        )


FULL = Case(
    {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    prompt_tokens=4096,
)
"""The proportions of Llama 3: four query heads a KV head, of 128. Pages of 512 KiB.

They determine the ratio of bytes to move to work to compute: with one KV head per query head, as in
few models, it is four times as much.
"""

QUICK = Case({}, prompt_tokens=1024)
"""For tests: small, with meaningless figures."""


@attrs.frozen
class Reply:
    """The answer of an engine.

    first_s: from the request to the first token. steps: the seconds of each step in that time.
    """

    first_s: float
    tokens: list[int]
    cached: dict[str, int]
    steps: dict[str, float]

    @classmethod
    def of(cls, answer: dict[str, Any], calls: list[dict[str, Any]]) -> Reply:
        """Read an engine's answer, and the calls of its store."""
        asked_s, first_s = answer["asked_s"], answer["first_s"]
        steps: dict[str, float] = {}
        last_s = asked_s
        for call in calls:
            if call["call"] != "set" and asked_s <= call["begun_s"] < first_s:
                # A linker is asked each time that SGLang looks at the request.
                for step, took_s in (
                    (f"until_{call['call']}_s", call["begun_s"] - last_s),
                    (f"{call['call']}_s", call["ended_s"] - call["begun_s"]),
                ):
                    steps[step] = steps.get(step, 0.0) + took_s
                last_s = call["ended_s"]
        steps["rest_s"] = first_s - last_s
        return cls(first_s - asked_s, answer["tokens"], answer["cached"] or {}, steps)


class Engine:
    """One engine with a home node."""

    def __init__(
        self, model: Path, case: Case, node: StandaloneNode, fabric: str, *, is_linked: bool = False
    ) -> None:
        """Start it; `wait` returns when it answers. is_linked: without a host tier."""
        self._home = node.home
        self._is_linked = is_linked
        name = f"{Path(node.home).parent.name}{'-linked-' + fabric if is_linked else ''}"
        self._calls = model.parent / f"{name}.calls"
        self._child = Child(
            "-m", "benchmarks.ttft_engine", str(model), json.dumps(self._storage(fabric)),
            str(case.device_tokens),
            PEERCACHE_TEST_CPU_ENGINE="1", SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1",
            **{CALLS_FILE: str(self._calls)},
        )  # fmt: skip

    def _storage(self, fabric: str, **settings: Any) -> dict[str, Any]:
        if self._is_linked:
            return {
                "linker": "TimedLinker",
                "linker_module_path": "benchmarks.ttft_scheduler",
                "linker_extra_config": {"home": self._home, "fabric": fabric},
            }
        return {
            "backend_name": "peercache",
            "module_path": "benchmarks.ttft_scheduler",
            "class_name": "TimedStore",
            "interface_v1": 1,
            "home": self._home,
            "fabric": fabric,
            **settings,
        }

    def __enter__(self) -> Engine:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._child.close()

    def wait(self, warm_up: list[int]) -> None:
        """Wait until it answers, and let it compute a first, short prompt."""
        self._child.receive(START_S)
        self.ask(warm_up)

    def attach(self, fabric: str, **settings: Any) -> None:
        """Forget all prompts, and attach a new store."""
        self._child.ask({"flush": True})
        self._child.ask({"attach": self._storage(fabric, **settings)})

    def memory(self) -> int:
        """Return the bytes of its processes."""
        return memory_of(self._child.pid)

    def zero_what_is_read(self) -> None:
        """Forget all prompts, and zero every page that is read from now on."""
        self._child.ask({"flush": True})
        self._calls.with_name(self._calls.name + ZERO_SUFFIX).touch()

    def ask(self, prompt: list[int]) -> Reply:
        """Return its answer to a prompt."""
        answer = self._child.ask({"input_ids": prompt})
        return Reply.of(answer, self._noted())

    def wait_until_stored(self, pages: int) -> None:
        """Wait until its store holds this many pages of it."""
        until = time.monotonic() + STORED_WITHIN_S
        while sum(call["hits"] for call in self._noted() if call["call"] == "set") < pages:
            assert time.monotonic() < until, "the first engine's pages were not stored"
            time.sleep(0.1)

    def _noted(self) -> list[dict[str, Any]]:
        if not self._calls.exists():
            return []
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


def memory_of(process: int) -> int:
    """Return the bytes of memory that a process and its descendants have.

    Pages that several processes have mapped are divided among them, so that sums are right. Files,
    such as those of libraries, are not counted: all programs of a host share them.
    """
    import psutil  # noqa: PLC0415 - in SGLang's environment only

    root = psutil.Process(process)
    kilobytes = 0
    for each in (root, *root.children(recursive=True)):
        rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        sizes = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
        kilobytes += sum(int(sizes[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return kilobytes << 10


def memory(engine: Engine, nodes: Nodes) -> Memory:
    """Return the bytes of an engine, and of all nodes."""
    return {"engine": engine.memory(), "nodes": sum(memory_of(node.pid) for node in nodes)}


@contextmanager
def nodes_in(folder: Path, pool: str) -> Iterator[Nodes]:
    """Start two nodes of one cluster."""
    for name in "ab":
        (folder / name).mkdir(parents=True)
    with (
        StandaloneNode(folder / "a", pool_size=pool) as first,
        StandaloneNode(folder / "b", pool_size=pool, discovery=first.control) as second,
    ):
        yield first, second


def median(values: Iterable[float]) -> float:
    """Return the median, in seconds to the microsecond."""
    return round(statistics.median(values), 6)


def require_source(reply: Reply, source: str, case: Case) -> None:
    """End the benchmark unless all tokens that can be cached came from one source."""
    whole = {"device": 0, "host": 0, "storage": 0} | {source: case.cached_tokens}
    came = {name: reply.cached.get(name) or 0 for name in whole}
    if came != whole:
        sys.exit(f"cached were {came}, not {whole}: this machine did not keep up, run it again")


def answered(reply: Reply, cold: Reply, source: str, case: Case) -> Reply:
    """Return a reply after checking its source, and that its tokens equal those of the cold one."""
    require_source(reply, source, case)
    assert reply.tokens == cold.tokens, f"{source}: {reply.tokens}, computed were {cold.tokens}"
    return reply


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Run the engines; return the figures."""
    prompts = [case.prompt(number) for number in range(rounds + 1)]
    pages = case.prompt_tokens // PAGE_TOKENS
    pool = str(2 * (len(prompts) + 1) * pages * case.page_bytes)
    with tempfile.TemporaryDirectory(prefix="peercache-ttft-") as name:
        folder = Path(name)
        model = write_tiny_llama(folder / "model", case.sizes)
        # Each with new nodes, which then hold the same number of pages.
        with nodes_in(folder / "tiered", pool) as nodes:
            cold, warm, host, tiered = with_host_tier(model, case, nodes, prompts)
        with nodes_in(folder / "linked", pool) as nodes:
            linked, linker = without_host_tier(model, case, nodes, prompts, cold)
    held = {"host_tier": tiered, "linker": linker}
    return figures(case, cold[1:], warm, host, linked, held)


def warm_up(prompts: list[list[int]]) -> list[int]:
    """Return a first, short prompt."""
    return prompts[0][:-WARM_UP_TOKENS:-1]


def with_host_tier(
    model: Path,
    case: Case,
    nodes: Nodes,
    prompts: list[list[int]],
) -> tuple[list[Reply], dict[str, list[Reply]], list[Reply], Memory]:
    """Return the replies: cold, warm by fabric, from host memory; and the memory at the end."""
    pages = case.prompt_tokens // PAGE_TOKENS
    with ExitStack() as stack:
        with Engine(model, case, nodes[0], "tcp") as writer:
            reader = stack.enter_context(Engine(model, case, nodes[1], FABRICS[0]))
            writer.wait(warm_up(prompts))
            reader.wait(warm_up(prompts))
            cold = []
            for prompt in prompts:
                cold.append(writer.ask(prompt))
                assert not any(cold[-1].cached.values())
                # The next prompt must have the processors for itself.
                writer.wait_until_stored(len(cold) * pages)
        warm: dict[str, list[Reply]] = {fabric: [] for fabric in FABRICS}
        host: list[Reply] = []
        for fabric, replies in warm.items():
            if fabric != FABRICS[0]:
                reader.attach(fabric)
            for number, prompt in enumerate(prompts):
                reply = answered(reader.ask(prompt), cold[number], "storage", case)
                replies.append(reply)
                if number:
                    again = reader.ask(prompts[number - 1])
                    host.append(answered(again, cold[number - 1], "host", case))
        held = memory(reader, nodes)
        require_other_tokens(reader, prompts[0], cold[0], "storage", case)
    return cold, warm, host, held


def without_host_tier(
    model: Path,
    case: Case,
    nodes: Nodes,
    prompts: list[list[int]],
    cold: list[Reply],
) -> tuple[dict[str, list[Reply]], Memory]:
    """Return the replies over each fabric, and the memory at the end.

    SGLang counts the tokens that a linker brings as those of host memory.
    """
    with Engine(model, case, nodes[0], "tcp", is_linked=True) as writer:
        writer.wait(warm_up(prompts))
        for prompt in prompts:
            writer.ask(prompt)
        for prompt, computed in zip(prompts, cold, strict=True):
            answered(writer.ask(prompt), computed, "host", case)
    linked: dict[str, list[Reply]] = {}
    held: Memory = {}
    for fabric in FABRICS:
        with Engine(model, case, nodes[1], fabric, is_linked=True) as reader:
            reader.wait(warm_up(prompts))
            linked[fabric] = [
                answered(reader.ask(prompt), computed, "host", case)
                for prompt, computed in zip(prompts, cold, strict=True)
            ]
            held = memory(reader, nodes)
            require_other_tokens(reader, prompts[0], cold[0], "host", case)
    return linked, held


def require_other_tokens(
    reader: Engine, prompt: list[int], cold: Reply, source: str, case: Case
) -> None:
    """End the benchmark unless pages of zeros make an engine answer with other tokens."""
    reader.zero_what_is_read()
    zeroed = reader.ask(prompt)
    require_source(zeroed, source, case)
    assert zeroed.tokens != cold.tokens, "pages of zeros give the same tokens"


def figures(
    case: Case,
    cold: list[Reply],
    warm: dict[str, list[Reply]],
    host: list[Reply],
    linked: dict[str, list[Reply]],
    held: dict[str, Memory],
) -> dict[str, Any]:
    """Return the JSON object. The first prompt of each store is in addition to the medians."""
    cold_s = median(each.first_s for each in cold)
    host_s = median(each.first_s for each in host)
    later = {fabric: replies[1:] for fabric, replies in warm.items()}
    warm_s = {fabric: median(each.first_s for each in later[fabric]) for fabric in later}
    worst_s = max(warm_s.values())
    later |= {f"linked_{fabric}": replies[1:] for fabric, replies in linked.items()}
    linked_s = {fabric: median(each.first_s for each in linked[fabric][1:]) for fabric in linked}
    return {
        "prompt_tokens": case.prompt_tokens,
        "cached_tokens": case.cached_tokens,
        "page_tokens": PAGE_TOKENS,
        "page_bytes": case.page_bytes,
        "shape": {name: case.shape[name] for name in (*FULL.sizes, "head_dim", "torch_dtype")},
        "rounds": len(cold),
        "processors": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "cold_s": cold_s,
        **{f"warm_{fabric}_s": seconds for fabric, seconds in warm_s.items()},
        **{f"linked_{fabric}_s": seconds for fabric, seconds in linked_s.items()},
        "host_memory_s": host_s,
        "memory_bytes": held,
        "ratio_linked": round(max(linked_s.values()) / host_s, 3),
        "ratio": round(worst_s / host_s, 3),
        "ratio_to_cold": round(cold_s / worst_s, 2),
        "first": {
            f"warm_{fabric}_s": round(replies[0].first_s, 6) for fabric, replies in warm.items()
        },
        "samples": {
            name: [round(each.first_s, 6) for each in replies]
            for name, replies in {"cold": cold, **later, "host_memory": host}.items()
        },
        "steps": {
            source: {
                step: median(each.steps[step] for each in replies) for step in replies[0].steps
            }
            for source, replies in later.items()
        }
        | {
            f"first_{fabric}": {name: round(took, 6) for name, took in replies[0].steps.items()}
            for fabric, replies in warm.items()
        },
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--quick", action="store_true", help="a small model, for tests")
    arguments.add_argument("--rounds", type=int, default=3, help="prompts of each median")
    options = arguments.parse_args()
    measured = measure(QUICK if options.quick else FULL, options.rounds)
    print(json.dumps(measured, indent=1) if options.json else ttft_report.text(measured))


if __name__ == "__main__":
    main()
