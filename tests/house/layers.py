"""Which folder of the package may import which, and where each foreign library is used."""

from __future__ import annotations

from collections.abc import Mapping

# Every folder of the package, from the bottom up, with the folders that it may import. A folder
# imports only what stands above its own line in this table, so folders form no circle. `errors`
# is free to all, and so are files of the same folder; among files, circles are looked for apart.
LAYERS: dict[str, str] = {
    # What pip installed: the compiled library, and the distribution's name.
    "installation": "",
    # Plain values, settings, the wire, and what is reported.
    "model": "installation",
    "content": "model",
    "config": "model",
    "wire.messages": "model",
    "wire": "model wire.messages",
    "observability": "model wire.messages",
    # Who may do what: everything below that opens a socket or a file asks it.
    "trust": "model config wire wire.messages observability",
    # The actors of a node: state machines without I/O, and the loop that runs them.
    "actors": "model observability wire wire.messages",
    "actors.membership": "model observability wire.messages actors",
    "actors.ring": "model actors",
    "actors.directory": "model observability installation wire.messages actors",
    "actors.publisher": "model observability installation wire.messages actors",
    "actors.pool": "model observability installation wire.messages actors",
    "actors.disk": "model observability wire.messages actors",
    "actors.removal": "model wire.messages actors",
    "actors.placement": "model observability wire.messages actors",
    "actors.promote": "model observability wire.messages actors",
    "actors.channels": "",
    "actors.rdma": "wire.messages actors",
    # One foreign library or kernel facility each.
    "memory": "trust model observability installation",
    "storage": "trust model observability installation actors actors.disk",
    "net": "trust model config observability installation wire wire.messages",
    # The read and write paths, without I/O: of `net` they know the circuit breakers.
    "paths": "model config observability installation wire wire.messages net",
    "fabric": "trust model observability actors.channels memory",
    "fabric.tcp": "trust model config observability installation actors.channels fabric",
    "rdma": "trust model config observability wire wire.messages actors actors.channels memory "
    "fabric",
    # What routers are notified.
    "events": "model observability content wire wire.messages",
    # How much of a prompt is where.
    "manager": "model config observability content events",
    "http": "trust model config observability content manager",
    "discovery": "config observability",
    # A node is put together from all of them, then the blocking client.
    "node": "trust model config wire wire.messages observability installation actors "
    "actors.membership actors.ring actors.directory actors.publisher actors.pool actors.disk "
    "actors.promote actors.removal actors.rdma actors.placement paths memory storage net fabric "
    "fabric.tcp rdma http discovery manager",
    "client": "trust model config wire wire.messages observability paths memory net events fabric "
    "fabric.tcp rdma node",
    # The names that programs import from the package itself.
    "": "model config content events client",
    # What people and engines start.
    "engines": "model config observability client",
    "sglang": "model config observability events client engines",
    "lmcache": "model config observability client engines",
    "vllm": "model observability events client engines",
    "connector": "model content config observability memory events client engines",
    "cli": "trust config observability installation wire storage node",
    "cli.operate": "model trust config observability wire wire.messages net events node client cli",
    "cli.demo": "config observability '' cli",
    "cli.bench": "model config observability actors actors.disk storage client cli",
    "cli.doctor": "trust config observability installation memory rdma discovery node cli "
    "cli.bench",
}

# A foreign library is known to few places, so that a change of it has few places to be made.
# docs/explanation/dependencies.md explains why each is there; attrs and numpy are free to all.
HOMES: dict[str, frozenset[str]] = {
    "blake3": frozenset({"content"}),
    "pynng": frozenset({"net"}),
    "pyverbs": frozenset({"rdma"}),
    "huggingface_hub": frozenset({"engines"}),
    "lmcache": frozenset({"lmcache"}),
    "sglang": frozenset({"sglang"}),
    "torch": frozenset({"sglang"}),
    "vllm": frozenset({"vllm"}),
    "cbor2": frozenset({"wire"}),
    "click": frozenset({"cli"}),
    "cryptography": frozenset({"trust"}),
    "msgspec": frozenset({"events", "http"}),
    "opentelemetry": frozenset({"client"}),
    "zmq": frozenset({"events", "manager"}),
    "h11": frozenset({"discovery", "http"}),
    "jinja2": frozenset({"http"}),
    "starlette": frozenset({"http"}),
    "rich": frozenset({"cli"}),
    "structlog": frozenset({"observability"}),
    "prometheus_client": frozenset({"observability", "http"}),
    "trio": frozenset({"actors", "discovery", "fabric", "http", "net", "node", "rdma"}),
    "xxhash": frozenset({"client", "connector", "storage"}),
    "zstandard": frozenset({"connector"}),
    "tomli": frozenset({"config"}),
    "typing_extensions": frozenset({"actors", "node", "rdma"}),
    "sqlite3": frozenset({"storage"}),
    "asyncio": frozenset(),
}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of names that reach each other, over whatever other names."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return sorted(sorted(one) for one in found)


def _reached(graph: Mapping[str, set[str]], name: str) -> set[str]:
    reached: set[str] = set()
    ahead = list(graph[name])
    while ahead:
        if (one := ahead.pop()) not in reached:
            reached.add(one)
            ahead += graph[one]
    return reached
