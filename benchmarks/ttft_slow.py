"""Time to first token of SGLang over a slow link: with `decline` off, and with cost.

    PYTHONPATH=src ~/.cache/peercache/sglang-0.5.23/bin/python -m benchmarks.ttft_slow \
        [--json] [--rounds 3]

Two SGLang engines on the CPU, each with a home node of its own, as in `benchmarks.ttft_sglang`. The
first one computes prompts and stores their pages. The second one reads them over tcp through a
relay that limits the rate, so that a page takes a multiple of the time to compute it. For each rate
and setting it attaches a new store, which knows nothing of the link. It answers in turns a prompt
that is stored nowhere (`cold`), and one that the first engine has stored; the result is the time of
the latter as a multiple of the median cold one of that rate. Each prompt is asked once: a computed
one is stored at the home node.

The model is small, and the second engine sleeps for each token that it computes: as with a GPU, the
time to compute hardly depends on how busy the processors are. All tokens must equal those of the
first engine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from benchmarks.ttft_engine import COMPUTE_SLEEP, PAGE_TOKENS
from benchmarks.ttft_sglang import QUICK, Case, Engine, Reply, median, warm_up
from tests.integration.processes import StandaloneNode
from tests.integration.tiny_llama import write_tiny_llama
from tests.system.relay import SlowLink

CASE = attrs.evolve(QUICK, prompt_tokens=512)
TOKEN_S = 0.008

TIMES = (0.1, 0.3, 1.5, 4.0)
"""How long the link takes for a page, in times to compute it."""

SETTINGS = ("off", "cost")


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Run the engines; return the figures."""
    count = len(TIMES) * len(SETTINGS) * rounds
    prompts = [case.prompt(number) for number in range(2 * count + rounds)]
    stored, unknown = prompts[:count], prompts[count:]
    pages = case.prompt_tokens // PAGE_TOKENS
    pool = str(2 * (len(prompts) + 1) * pages * case.page_bytes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-ttft-")))
        model = write_tiny_llama(folder / "model", case.sizes)
        link = stack.enter_context(SlowLink.open())
        for name in "ab":
            (folder / name).mkdir()
        holder = StandaloneNode(folder / "a", pool_size=pool, more=link.flags)
        stack.enter_context(holder)
        near = StandaloneNode(folder / "b", pool_size=pool, discovery=holder.control)
        stack.enter_context(near)
        with Engine(model, case, holder, "tcp") as writer:
            writer.wait(warm_up(prompts))
            computed: list[Reply] = []
            for prompt in stored:
                computed.append(writer.ask(prompt))
                writer.wait_until_stored(len(computed) * pages)
        left = list(zip(stored, computed, strict=True))
        os.environ[COMPUTE_SLEEP] = str(TOKEN_S / case.shape["num_hidden_layers"])
        reader = stack.enter_context(Engine(model, case, near, "tcp"))
        reader.wait(warm_up(prompts))
        first = [reader.ask(unknown.pop()) for _ in range(rounds)]
        page_s = median(each.first_s for each in first) / pages
        links = []
        for times in TIMES:
            link.data.byte_s = times * page_s / case.page_bytes
            cold: list[Reply] = []
            replies: dict[str, list[Reply]] = {decline: [] for decline in SETTINGS}
            for decline, answers in replies.items():
                reader.attach("tcp", decline=decline, page_compute_ms=1000 * page_s)
                for _ in range(rounds):
                    cold.append(reader.ask(unknown.pop()))
                    prompt, expected = left.pop()
                    answers.append(reader.ask(prompt))
                    assert answers[-1].tokens == expected.tokens, "other tokens than computed"
            mb_s = round(case.page_bytes / times / page_s / 1e6, 2)
            links.append({"times": times, "mb_s": mb_s, **figures(cold, replies)})
    return {
        "prompt_tokens": case.prompt_tokens,
        "page_bytes": case.page_bytes,
        "page_ms": round(1000 * page_s, 1),
        "processors": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "links": links,
    }


def figures(cold: list[Reply], replies: dict[str, list[Reply]]) -> dict[str, Any]:
    """Return the figures of a link: times to the first token, as multiples of the median cold."""
    assert not any(sum(each.cached.values()) for each in cold)
    cold_s = median(each.first_s for each in cold)

    def shown(answers: list[Reply]) -> dict[str, list[float]]:
        return {
            "ratio": [round(each.first_s / cold_s, 2) for each in answers],
            "exists_ratio": [round(each.steps["exists_s"] / cold_s, 3) for each in answers],
            "get_ratio": [round(each.steps.get("get_s", 0.0) / cold_s, 2) for each in answers],
            "read_tokens": [each.cached.get("storage") or 0 for each in answers],
        }

    return {
        "cold_s": cold_s,
        "cold": [round(each.first_s / cold_s, 2) for each in cold],
        **{decline: shown(answers) for decline, answers in replies.items()},
    }


def text(measured: dict[str, Any]) -> str:
    """Return the table of the documentation."""
    lines = [
        "a page takes {page_ms} ms to compute; load average {load_average}".format(**measured),
        "",
        "| to read a page, in times to compute it | link, MB/s | cold | `off` | `cost` |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in measured["links"]:
        cells = [", ".join(f"{ratio:.2f}" for ratio in each[name]["ratio"]) for name in SETTINGS]
        cold = f"{min(each['cold']):.2f} to {max(each['cold']):.2f}"
        lines.append(f"| {each['times']} | {each['mb_s']} | {cold} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--rounds", type=int, default=3, help="prompts of each store")
    options = arguments.parse_args()
    measured = measure(CASE, options.rounds)
    print(json.dumps(measured, indent=1) if options.json else text(measured))


if __name__ == "__main__":
    main()
