"""What addresses of a source are kept, and how foreign text is shown."""

from __future__ import annotations

from peercache.discovery.port import ADDRESSES_MAX, cleaned, printable


def test_addresses_are_kept_as_every_node_writes_them() -> None:
    """Doubles count once, and what cannot be dialled not at all."""
    good = ["10.0.0.1:1", "[::1]:2", "gpu-7.cluster.local:3", "10.0.0.1:1"]
    bad = [
        "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":5", "a b:5", "tcp://a:5", "a/b:5", "é:5",
        "x" * 300 + ":5", "", "a\nb:5", "[::1", 7, None, b"a:5",
    ]  # fmt: skip

    found = cleaned([*good, *bad])  # type: ignore[list-item]

    assert found.addresses == {"10.0.0.1:1", "[::1]:2", "gpu-7.cluster.local:3"}
    assert found.dropped == len(bad)


def test_a_source_cannot_fill_the_memory() -> None:
    """What is beyond the largest cluster is dropped, and counted."""
    found = cleaned(f"host-{number}:1" for number in range(ADDRESSES_MAX + 5))

    assert len(found.addresses) == ADDRESSES_MAX
    assert found.dropped == 5


def test_foreign_text_is_a_short_line() -> None:
    """No line break and no control character reaches the log."""
    assert printable("a\n\x1b[31mb" + "x" * 9999) == ("a [31mb" + "x" * 9999)[:200]
    assert printable(KeyError()) == "KeyError"
