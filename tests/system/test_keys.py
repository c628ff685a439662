"""`peercache keys`: a namespace of a whole cluster is listed, a part with each command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peercache.cli import main as cli
from peercache.model.keys import Namespace, page_keys
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, keys_of, pages_of

pytestmark = pytest.mark.slow

NAME = Namespace("listed", "of tests")


def part(capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    """Return what one command prints."""
    assert cli.main(["keys", "--namespace", NAME.name, "--json", *flags]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_namespace_is_listed_by_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Over any node, by commands that share nothing but the cursor, while a node is paused too."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        stored: dict[str, str] = {}
        for place, node in enumerate(nodes):
            keys = keys_of(f"node {place}", 5)
            with cluster.client(node, namespace=NAME) as client:
                assert all(client.batch_set(keys, pages_of(keys)))
            hexed = [key.hex() for key in page_keys(keys, NAME.digest()).tolist()]
            stored |= dict.fromkeys(hexed, node.ready["control"])
        with cluster.client(nodes[0], namespace="another") as client:
            assert all(client.batch_set(keys_of("other", 3), pages_of(keys_of("other", 3))))

        listed, cursor, calls = [], "", 0
        while calls == 0 or cursor:
            at = nodes[calls % 2].ready["home" if calls else "control"]
            found = part(capsys, "--at", at, "--limit", "3", "--cursor", cursor)
            assert not found["missed"]
            listed += found["pages"]
            cursor, calls = found["cursor"], calls + 1
        assert calls >= 4
        assert {page["key"]: page["node"] for page in listed} == stored
        assert len(listed) == len(stored)
        assert {(page["bytes"], page["tier"]) for page in listed} == {(128 * 1024, "memory")}

        at = ["--at", nodes[0].ready["control"]]
        assert cli.main(["keys", *at, "--namespace", NAME.name, "--limit", "4"]) == 0
        shown = capsys.readouterr()
        assert sum(key in shown.out for key in stored) == 4
        assert "more with --cursor " in shown.err
        # The cursor is of a node that has gone: the scan goes on with the next one.
        gone = part(capsys, *at, "--cursor", "1.2.3.4:1@ab:7:8")
        assert len(gone["pages"]) == len(stored)
        assert cli.main(["keys", *at, "--cursor", "7"]) == 2
        assert "'7' is no cursor of an earlier scan" in capsys.readouterr().err

        nodes[1].pause()
        name = nodes[1].ready["control"]

        def misses() -> bool:
            assert cli.main(["keys", *at, "--namespace", NAME.name, "--json"]) in (0, 1)
            found = json.loads(capsys.readouterr().out)
            return found["missed"] == [name] and len(found["pages"]) == 5

        wait_until(misses)
        assert cli.main(["keys", *at, "--namespace", NAME.name]) == 1
        assert f"! {name} does not answer: its pages are missing" in capsys.readouterr().err
        nodes[1].resume()
