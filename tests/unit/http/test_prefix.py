"""The prefix index over HTTP: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from peercache.config.quantities import parse_address
from peercache.content.chain import Chain, in_namespace
from peercache.events.blocks import BlockStored
from peercache.http import pages
from peercache.http.pages import Pages
from peercache.http.prefix import (
    BODY_S,
    PAGES_MAX,
    QUESTIONS_MAX,
    TOKENS_MAX,
    PrefixIndex,
    openapi,
)
from peercache.http.server import BODY_BYTES_MAX, LONG_BODIES, PAGE_FAILED
from peercache.manager.gpu_blocks import GpuBlocks, IndexParts
from peercache.model.keys import Namespace, PageKeys, page_keys
from peercache.model.prefix import Overlap
from peercache.model.records import ON_DISK, RESIDENT
from peercache.trust.rights import CHANGING_PAGES
from tests.system.nodes import capture_logs
from tests.unit.http.http_node import served

TOKENS = "/api/v1/prefix/tokens"
HASHES = "/api/v1/prefix/hashes"
SPACE = Namespace("team", "bf16", "tp0")
CHAIN = Chain("llama", "bfloat16", 4, {"tenant": "t"})
PROMPT = list(range(100, 118))

QUESTION: dict[str, Any] = {
    "tokens": PROMPT, "model": "llama", "dtype": "bf16", "page_tokens": 4,
    "salts": {"tenant": "t"},
    "namespace": {"name": "team", "geometry": "bf16", "coordinates": "tp0"},
}  # fmt: skip


def packed(tokens: list[int]) -> str:
    return base64.b64encode(np.array(tokens, "<u4").tobytes()).decode()


class Nodes:
    """Two nodes: one has the first two pages of the prompt in memory, one the third on its disk."""

    def __init__(self) -> None:
        self.keys = in_namespace(CHAIN.keys(PROMPT), SPACE.digest())
        self.gate: trio.Event | None = None
        self.gpu = GpuBlocks(["gpu-0"])
        self.gpu.begin("gpu-0")
        self.gpu.store("gpu-0", BlockStored((1, 2), None, tuple(PROMPT[:12]), 6))

    async def overlap(self, keys: PageKeys) -> Overlap:
        if self.gate is not None:
            await self.gate.wait()
        flags = np.zeros((2, len(keys)), np.uint8)
        flags[0, np.isin(keys, self.keys[:2])] = RESIDENT
        flags[1, np.isin(keys, self.keys[2:3])] = ON_DISK
        return Overlap((7, 8), flags, whole=True)

    def index(self) -> PrefixIndex:
        return PrefixIndex(overlap=self.overlap, named={7: "n7:1"}.get, gpu=self.gpu)  # type: ignore[arg-type]

    def application(self) -> Starlette:
        return Starlette(routes=self.index().routes())


async def ask(
    application: Any, path: str, body: bytes | dict[str, Any] = b"", *, method: str = "POST",
    media_type: str = "application/json", is_whole: bool = True,
    headers: dict[bytes, bytes] | None = None,
) -> tuple[int, Any]:  # fmt: skip
    """Ask an ASGI application; return the status and the answer.

    is_whole: nothing more comes. headers: takes those of the answer.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []

    parts = [{"type": "http.request", "body": raw, "more_body": not is_whole}]

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return parts.pop() if parts else await trio.sleep_forever()

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"content-type", media_type.encode())], "server": ("h", 1), "client": ("c", 1),
    }  # fmt: skip
    await application(scope, receive, send)
    if headers is not None:
        headers |= dict(sent[0]["headers"])
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent))


async def test_a_prompt_is_found_by_its_tokens() -> None:
    """On nodes, by tier, and on GPUs; keys are those that a client of the namespace has."""
    status, answer = await ask(Nodes().application(), TOKENS, QUESTION)

    assert status == 200
    assert answer == {
        "pages": 4, "page_tokens": 4, "stored_pages": 3, "stored_tokens": 12, "memory_pages": 2,
        "whole": True,
        "nodes": [
            {
                "node": "n7:1", "incarnation": f"{7:016x}", "prefix_pages": 2, "prefix_tokens": 8,
                "memory_prefix_pages": 2, "memory_pages": 2, "disk_pages": 0,
            },
            {
                "node": f"{8:016x}", "incarnation": f"{8:016x}", "prefix_pages": 0,
                "prefix_tokens": 0, "memory_prefix_pages": 0, "memory_pages": 0, "disk_pages": 1,
            },
        ],
        "engines": [
            {
                "engine": "gpu-0", "state": "known", "why": "", "prefix_tokens": 12,
                "block_tokens": 6, "blocks": 2,
            }
        ],
    }  # fmt: skip


async def test_a_prompt_is_found_by_its_hashes() -> None:
    """Page hashes of SGLang, and any keys, in their namespace."""
    nodes = Nodes()
    hashes = ["0" * 63 + "1", "prompt-2", "prompt-3"]
    nodes.keys = page_keys(hashes, SPACE.digest())
    question = {"hashes": hashes, "namespace": QUESTION["namespace"]}

    status, answer = await ask(nodes.application(), HASHES, question)
    assert (status, answer["stored_pages"], answer["stored_tokens"]) == (200, 3, 0)
    assert answer["engines"] == []
    status, answer = await ask(nodes.application(), HASHES, {"hashes": hashes})
    assert (status, answer["stored_pages"], answer["nodes"]) == (200, 0, [])


async def test_packed_tokens_are_those_of_a_list() -> None:
    """Base64 of little-endian numbers gets the same answer, also for the largest token id."""
    application = Nodes().application()
    answer = await ask(application, TOKENS, QUESTION)
    assert answer[1]["stored_tokens"] == 12
    assert await ask(application, TOKENS, QUESTION | {"tokens": packed(PROMPT)}) == answer
    assert (await ask(application, TOKENS, QUESTION | {"tokens": ""}))[1]["pages"] == 0
    largest = [2**32 - 1] * 4
    for tokens in (largest, packed(largest)):
        assert (await ask(application, TOKENS, QUESTION | {"tokens": tokens}))[1]["pages"] == 1


def test_the_description_names_packed_tokens() -> None:
    """Its pattern takes what is a multiple of four bytes, and nothing else."""
    tokens = openapi()["components"]["schemas"]["TokensAsked"]["properties"]["tokens"]
    (text,) = [each for each in tokens["anyOf"] if each["type"] == "string"]
    (listed,) = [each for each in tokens["anyOf"] if each["type"] == "array"]
    assert listed["items"] == {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    for size in range(40):
        encoded = base64.b64encode(bytes(size)).decode()
        assert bool(re.search(text["pattern"], encoded)) == (size % 4 == 0), size


@pytest.mark.parametrize(
    ("change", "status", "error"),
    [
        ({"tokens": [1, -2]}, 422, "token 1 is -2"),
        ({"tokens": [1, 2**32]}, 422, f"token 1 is {2**32}"),
        ({"tokens": [1, 10**300]}, 422, "token 1 is 1000"),
        ({"tokens": [1.5]}, 422, "float"),
        ({"tokens": [True]}, 422, "bool"),
        ({"tokens": {}}, 422, "array"),
        ({"tokens": "1,2"}, 422, "base64"),
        ({"tokens": "AAAAAAA="}, 422, "5 bytes are no token ids"),
        ({"tokens": packed([1] * (TOKENS_MAX + 1))}, 422, str(4 * TOKENS_MAX)),
        ({"tokens": [1] * (TOKENS_MAX + 1)}, 422, str(TOKENS_MAX)),
        ({"tokens": [1] * TOKENS_MAX, "page_tokens": 1}, 422, str(PAGES_MAX)),
        ({"dtype": "bf17"}, 422, "no dtype"),
        ({"page_tokens": 0}, 422, "page_tokens"),
        ({"model": ""}, 422, "model"),
        ({"model": None}, 422, "model"),
        ({"salts": {"a": 1}}, 422, "salts"),
        ({"namespace": {"nmae": "x"}}, 422, "nmae"),
        ({"toknes": []}, 422, "toknes"),
    ],
)
async def test_questions_that_make_no_sense(
    change: dict[str, Any], status: int, error: str
) -> None:
    """Each is refused in a sentence that names what is wrong."""
    found, answer = await ask(Nodes().application(), TOKENS, QUESTION | change)
    assert found == status
    assert error in answer["error"]
    assert len(answer["error"]) < 300


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5000, b'{"tokens": [1,]}'])
async def test_bodies_that_are_no_json(body: bytes) -> None:
    status, answer = await ask(Nodes().application(), TOKENS, body)
    assert status in (400, 422)
    assert answer["error"]


async def test_a_body_of_another_type_is_refused() -> None:
    """So no web page of another site can ask with a browser's rights."""
    body = json.dumps(QUESTION).encode()
    assert (await ask(Nodes().application(), TOKENS, body, media_type="text/plain"))[0] == 415
    media_type = "Application/JSON; charset=utf-8"
    assert (await ask(Nodes().application(), TOKENS, body, media_type=media_type))[0] == 200


async def test_questions_at_once_are_bounded() -> None:
    """One more than may be under way is refused until later; afterwards it is answered."""
    nodes = Nodes()
    application, nodes.gate = nodes.application(), trio.Event()
    answers: list[int] = []

    async def one() -> None:
        answers.append((await ask(application, TOKENS, QUESTION))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(QUESTIONS_MAX):
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        status, answer = await ask(application, TOKENS, QUESTION)
        assert (status, "ask again" in answer["error"]) == (503, True)
        nodes.gate.set()
    assert answers == [200] * QUESTIONS_MAX
    assert (await ask(application, TOKENS, QUESTION))[0] == 200


async def test_half_sent_questions_keep_others_out_for_two_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A client that stops in the middle of a body gives its place back."""
    del autojump_clock
    application = Nodes().application()
    answers: list[tuple[int, Any]] = []

    async def half() -> None:
        answers.append(await ask(application, TOKENS, b'{"tokens": [', is_whole=False))

    async with trio.open_nursery() as nursery:
        for _ in range(QUESTIONS_MAX):
            nursery.start_soon(half)
        await trio.testing.wait_all_tasks_blocked()
        assert (await ask(application, TOKENS, QUESTION))[0] == 503
        await trio.sleep(BODY_S + 0.1)
        assert (await ask(application, TOKENS, QUESTION))[0] == 200
    assert answers == [(408, {"error": "the body did not come within 2 s"})] * QUESTIONS_MAX


async def test_nodes_that_never_answer_cost_no_question_its_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    nodes = Nodes()
    nodes.gate = trio.Event()
    status, answer = await ask(nodes.application(), TOKENS, QUESTION)
    assert (status, "ask again" in answer["error"]) == (503, True)


async def test_engines_are_listed() -> None:
    nodes = Nodes()
    nodes.gpu.lose("gpu-0", "it cannot be reached", is_away=True)
    status, answer = await ask(nodes.application(), "/api/v1/prefix/engines", method="GET")
    assert status == 200
    assert [(one["state"], one["why"]) for one in answer["engines"]] == [
        ("away", "it cannot be reached")
    ]


async def test_a_node_without_the_extra_names_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves everything else."""
    monkeypatch.delitem(sys.modules, "peercache.http.prefix")
    monkeypatch.setitem(sys.modules, "msgspec", None)
    application = _pages().application()
    for method in ("GET", "POST"):
        status, answer = await ask(application, TOKENS, QUESTION, method=method)
        assert (status, "pip install msgspec" in answer["error"]) == (501, True)
    assert (await ask(application, "/healthz", method="GET"))[0] == 200


async def test_a_method_that_a_path_has_not_is_refused_with_those_that_it_has() -> None:
    """As HTTP has it: generators of clients read `Allow`."""
    application = _pages().application()
    for path, method, allowed in (
        (TOKENS, "PUT", "POST"),
        ("/api/v1/prefix/engines", "POST", "GET, HEAD"),
        ("/healthz", "DELETE", "GET, HEAD"),
    ):
        headers: dict[bytes, bytes] = {}
        status, answer = await ask(application, path, method=method, headers=headers)
        assert (status, headers[b"allow"].decode()) == (405, allowed)
        assert answer == {"error": f"only {allowed.replace(', ', ' and ')}"}


async def test_pages_route_the_index() -> None:
    application = _pages().application()
    assert (await ask(application, TOKENS, QUESTION))[1]["stored_pages"] == 3
    status, answer = await ask(application, TOKENS, method="GET")
    assert (status, answer) == (405, {"error": "only POST"})
    status, answer = await ask(application, "/api/v1/prefix/openapi.json", method="GET")
    assert (status, answer) == (200, json.loads(json.dumps(openapi())))


@pytest.mark.parametrize(
    ("lines", "body", "status", "expected"),
    [
        ("Content-Length: 3000000", b"x" * 3_000_000, 413, f"at most {LONG_BODIES[TOKENS]} bytes"),
        ("Transfer-Encoding: chunked", b"nonsense\r\n", 400, "chunk"),
    ],
    ids=["too long", "no chunks"],
)
async def test_a_body_that_is_refused_is_no_error_of_the_node(
    lines: str, body: bytes, status: int, expected: str
) -> None:
    """Starlette answers 500 to whatever the reading of a body raises; the gateway knows better."""
    head = f"POST {TOKENS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with capture_logs() as logged:
        async with served(application=_pages().application()) as address:
            stream = await trio.open_tcp_stream(*parse_address(address))
            async with stream:
                answer = b""
                # The node closes before all of it was sent, which may be a reset.
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(f"{head}{lines}\r\n\r\n".encode() + body)
                with suppress(trio.BrokenResourceError):
                    async for chunk in stream:
                        answer += chunk

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert expected.encode() in answer
    assert not [line for line in logged if line["event"] == PAGE_FAILED]


def _pages() -> Pages:
    nodes = Nodes()
    index = IndexParts(nodes.overlap, {7: "n7:1"}.get, nodes.gpu)  # type: ignore[arg-type]
    unused: Any = None
    health = lambda: pages.Health(serving=True)  # noqa: E731
    return Pages(unused, health, lambda: "own", unused, index)


def test_long_bodies_are_those_of_the_questions() -> None:
    """The gateway knows the paths, and the longest question fits."""
    assert set(LONG_BODIES) == {TOKENS, HASHES, *CHANGING_PAGES}
    longest = len(json.dumps({**QUESTION, "tokens": [2**32 - 1] * TOKENS_MAX}))
    assert BODY_BYTES_MAX < longest <= min(LONG_BODIES.values())
