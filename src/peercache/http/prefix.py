"""The prefix index over HTTP: how much of a prompt is where, as JSON, described by OpenAPI.

Takes   POST with a prompt as token ids or as page hashes, perhaps with a hint for its pages; GET
        for the engines that are followed.
Sends   a `manager.gpu_blocks.FoundPrefix`, or what became of a hint; in words what is wrong with a
        question; 503 while busy.
Keeps   nothing: an answer is made from the directory and from the engines' events, now.
Limits  QUESTIONS_MAX questions at once, before their bodies are read; BODY_BYTES_MAX, TOKENS_MAX,
        PAGES_MAX each; BODY_S, ANSWER_S.

The types below are the schema: requests are checked against them, and the OpenAPI document is made
from them. A node without the extra `rest` says so at these paths, and serves all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import attrs
import msgspec
import numpy as np
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from peercache.content.chain import (
    DTYPES,
    OTHER_NAMES,
    TOKEN,
    TOKEN_MAX,
    Chain,
    TokenIds,
    in_namespace,
    token_ids,
)
from peercache.errors import InvalidRequest
from peercache.manager.gpu_blocks import FoundPrefix, IndexParts, OnGpu, prefix_of
from peercache.model.keys import DEFAULT_NAME, Namespace, PageKeys, page_keys

QUESTIONS_MAX = 8
"""Bodies of 2 MiB that are held at once."""

TOKENS_MAX = 2**17
"""Of one question. As JSON they are a megabyte, which the loop reads in a few milliseconds."""

PAGES_MAX = 8192
"""Of one question: as many as 2**17 tokens have in pages of 16."""

TEXT_MAX = 1024

BODY_S = 2.0
"""Within which a body has to come: a client that stops in the middle keeps a place for so long."""

ANSWER_S = 3.0

ROOT = "/api/v1/prefix"
HINTS = "/api/v1/hints"

API_VERSION = "1"

Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


_DTYPES = {"enum": sorted({*DTYPES, *OTHER_NAMES})}

# What it says of numbers is checked by `token_ids`, for all of them at once.
_LISTED = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": TOKEN_MAX})]

_BASE64 = "[A-Za-z0-9+/]"
_WHOLE_TOKENS = f"^({_BASE64}{{16}})*({_BASE64}{{6}}==|{_BASE64}{{11}}=)?$"
"""Base64 of a multiple of 4 bytes: three tokens have 16 characters."""


Hint = Literal["retain", "demote", "prefetch", "share"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Space(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The namespace of the pages, as the client that stored them has it."""

    name: Text = DEFAULT_NAME
    geometry: Text = ""
    coordinates: Text = ""
    weights: Text = ""


class TokensAsked(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as token ids, and how its pages are named: as `content.Chain` and `Client` do.

    tokens: a list, or, read eight times as fast, base64 of 4 bytes each, little-endian.
    lora: the adapter, as engines name it in their events; for pages it is a salt.
    """

    tokens: (
        Annotated[list[_LISTED], msgspec.Meta(max_length=TOKENS_MAX)]
        | Annotated[
            bytes,
            msgspec.Meta(
                max_length=TOKENS_MAX * TOKEN.itemsize, extra_json_schema={"pattern": _WHOLE_TOKENS}
            ),
        ]
    )
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_MAX)]
    dtype: Annotated[str, msgspec.Meta(max_length=TEXT_MAX, extra_json_schema=_DTYPES)]
    page_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    salts: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)] = {}
    namespace: Space = Space()
    lora: Text = ""


class HashesAsked(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as page hashes: those of SGLang (64 hexadecimal digits), or a client's keys."""

    hashes: Annotated[list[Text], msgspec.Meta(max_length=PAGES_MAX)]
    namespace: Space = Space()


class TokensHinted(TokensAsked, kw_only=True):
    """A hint for a prompt as token ids. seconds: of a retain; 0 ends it."""

    hint: Hint
    seconds: Seconds = 0.0


class HashesHinted(HashesAsked, kw_only=True):
    """A hint for pages by their hashes. seconds: of a retain; 0 ends it."""

    hint: Hint
    seconds: Seconds = 0.0


class Hinted(msgspec.Struct):
    """What became of the pages: how many there were of each outcome."""

    pages: int
    outcomes: dict[str, int]


class Engines(msgspec.Struct):
    """The engines whose events are followed."""

    engines: tuple[OnGpu, ...]


class Problem(msgspec.Struct):
    """What is wrong, in one sentence."""

    error: str


@attrs.frozen(eq=False)
class PrefixIndex(IndexParts):
    """Answers questions about prompts."""

    limit: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(QUESTIONS_MAX))

    def routes(self) -> Sequence[Route]:
        """Return the routes of a Starlette application."""
        return (
            Route(f"{ROOT}/tokens", self._tokens, methods=["POST"]),
            Route(f"{ROOT}/hashes", self._hashes, methods=["POST"]),
            Route(f"{HINTS}/tokens", self._hint_tokens, methods=["POST"]),
            Route(f"{HINTS}/hashes", self._hint_hashes, methods=["POST"]),
            Route(f"{ROOT}/engines", self._engines, methods=["GET"]),
            Route(f"{ROOT}/openapi.json", _described, methods=["GET"]),
        )

    async def _tokens(self, request: Request) -> Response:
        return await self._answered(request, TokensAsked, self._of_tokens)

    async def _hashes(self, request: Request) -> Response:
        return await self._answered(request, HashesAsked, self._of_hashes)

    async def _hint_tokens(self, request: Request) -> Response:
        return await self._answered(request, TokensHinted, self._hinted_tokens)

    async def _hint_hashes(self, request: Request) -> Response:
        return await self._answered(request, HashesHinted, self._hinted_hashes)

    async def _engines(self, _: Request) -> Response:
        return _respond(200, Engines(tuple(self.gpu.find(np.empty(0, np.uint32)))))

    async def _answered(
        self, request: Request, kind: type[Any], answer: Callable[[Any], Awaitable[Any]]
    ) -> Response:
        """Read a question within the bounds, and answer it."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # A web page of another site cannot send this type without asking first.
            return _respond(415, Problem("a question is sent as application/json"))
        try:
            self.limit.acquire_on_behalf_of_nowait(request)
        except trio.WouldBlock:
            return _respond(
                503, Problem(f"{QUESTIONS_MAX} questions are being answered: ask again")
            )
        try:
            with trio.move_on_after(BODY_S) as until_read:
                body = await request.body()
            if until_read.cancelled_caught:
                return _respond(408, Problem(f"the body did not come within {BODY_S:g} s"))
            await trio.lowlevel.checkpoint()
            with trio.move_on_after(ANSWER_S):
                return _respond(200, await answer(msgspec.json.decode(body, type=kind)))
            return _respond(503, Problem(f"other nodes took longer than {ANSWER_S:g} s: ask again"))
        except msgspec.ValidationError as error:
            return _respond(422, Problem(f"the question is not as the schema has it: {error}"))
        except InvalidRequest as error:
            return _respond(422, Problem(str(error)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _respond(400, Problem(f"the body is not JSON: {error}"))
        finally:
            self.limit.release_on_behalf_of(request)

    async def _of_tokens(self, asked: TokensAsked) -> FoundPrefix:
        ids, keys = await self._keys_of(asked)
        engines = self.gpu.find(ids, asked.lora)
        return prefix_of(
            await self.overlap(keys),
            page_tokens=asked.page_tokens,
            named=self.named,
            engines=engines,
        )

    async def _keys_of(self, asked: TokensAsked) -> tuple[TokenIds, PageKeys]:
        """Return the token ids of a prompt, and the keys of its pages."""
        ids = _ids(asked.tokens)
        await trio.lowlevel.checkpoint()
        pages = len(ids) // asked.page_tokens
        if pages > PAGES_MAX:
            raise InvalidRequest(
                f"{pages} pages in one question, at most {PAGES_MAX} are looked up"
            )
        chain = Chain(asked.model, asked.dtype, asked.page_tokens, asked.salts)
        keys = in_namespace(chain.keys(ids), _digest(asked.namespace))
        await trio.lowlevel.checkpoint()
        return ids, keys

    async def _hinted_tokens(self, asked: TokensHinted) -> Hinted:
        _, keys = await self._keys_of(asked)
        return await self._hinted(asked, keys)

    async def _hinted_hashes(self, asked: HashesHinted) -> Hinted:
        return await self._hinted(asked, page_keys(asked.hashes, _digest(asked.namespace)))

    async def _hinted(self, asked: TokensHinted | HashesHinted, keys: PageKeys) -> Hinted:
        tag = _space(asked.namespace).tag()
        outcomes = await self.hint(asked.hint, keys, tag, asked.seconds)
        return Hinted(len(keys), dict(outcomes))

    async def _of_hashes(self, asked: HashesAsked) -> FoundPrefix:
        keys = page_keys(asked.hashes, _digest(asked.namespace))
        return prefix_of(await self.overlap(keys), page_tokens=0, named=self.named)


def _ids(tokens: list[int] | bytes) -> TokenIds:
    if isinstance(tokens, list):
        return token_ids(tokens)
    if len(tokens) % TOKEN.itemsize:
        raise InvalidRequest(f"{len(tokens)} bytes are no token ids of {TOKEN.itemsize} bytes each")
    return np.frombuffer(tokens, TOKEN)


def _space(space: Space) -> Namespace:
    return Namespace(space.name, space.geometry, space.coordinates, space.weights)


def _digest(space: Space) -> bytes:
    return _space(space).digest()


def _respond(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _described(_: Request) -> Response:
    return _respond(200, openapi())


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of these paths, made from the types above."""
    kinds = [TokensAsked, HashesAsked, FoundPrefix, Engines, Problem]
    kinds += [TokensHinted, HashesHinted, Hinted]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        # Python before 3.13 keeps the indentation of a docstring.
        schema["description"] = inspect.cleandoc(schema["description"])
    problems = {
        "400": "The body is no JSON.",
        "401": "The client has proved no right to ask: a certificate, the token, or its host.",
        "408": "The body did not come in time.",
        "413": "The body is longer than 2 MiB.",
        "415": "The body is not sent as application/json.",
        "422": "The question is not as the schema has it, or asks for what no chain has.",
        "503": "Too many questions at once, or other nodes did not answer in time.",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PeerCache prefix index",
            "version": API_VERSION,
            "description": "How much of a prompt is where: in the memory and on the disks of "
            "nodes, and on the GPUs of engines whose events are followed. Any node answers.",
        },
        "paths": {
            f"{ROOT}/tokens": {
                "post": _asked("findTokens", "A prompt by its token ids", TokensAsked, problems)
            },
            f"{ROOT}/hashes": {
                "post": _asked("findHashes", "A prompt by its page hashes", HashesAsked, problems)
            },
            f"{HINTS}/tokens": {
                "post": _asked("hintTokens", "A hint for a prompt", TokensHinted, problems, Hinted)
            },
            f"{HINTS}/hashes": {
                "post": _asked("hintHashes", "A hint for pages", HashesHinted, problems, Hinted)
            },
            f"{ROOT}/engines": {"get": _shown("listEngines", "The followed engines", Engines)},
        },
        "components": {"schemas": schemas},
    }


def _asked(
    name: str, summary: str, kind: type, problems: dict[str, str], answer: type = FoundPrefix
) -> dict[str, Any]:
    operation = _shown(name, summary, answer)
    operation["requestBody"] = {"required": True, "content": _json(kind)}
    operation["responses"] |= {
        status: {"description": why, "content": _json(Problem)} for status, why in problems.items()
    }
    return operation


def _shown(name: str, summary: str, kind: type) -> dict[str, Any]:
    refused = {"description": "The client has proved no right to ask.", "content": _json(Problem)}
    answer = {"description": "The answer.", "content": _json(kind)}
    return {"operationId": name, "summary": summary, "responses": {"200": answer, "401": refused}}


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
