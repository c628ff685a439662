"""The codec under a fuzzer that follows coverage, where Atheris is installed."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.garbage import any_message, enveloped

SECONDS = 20

FUZZ = """
import sys
import atheris
with atheris.instrument_imports(include=["peercache"]):
    from peercache.wire import codec
    from peercache.errors import RemoteProtocolError
    from peercache.fabric.tcp import wire as tcp_wire

CHECKS = (
    (tcp_wire.OPENING_BYTES, lambda raw: tcp_wire.check_opening(raw[:tcp_wire.OPENING_BYTES])),
    (tcp_wire.ANSWER_BYTES, lambda raw: tcp_wire.decode_answer(raw[:tcp_wire.ANSWER_BYTES])),
)

def one(raw):
    try:
        found = codec.encode(codec.decode(raw, cluster="c"), cluster="c")
    except RemoteProtocolError:
        pass
    else:
        # As bytes: a figure that is no number does not equal itself.
        again = codec.decode(found, cluster="c")
        assert codec.encode(again, cluster="c") == found
    for size, check in CHECKS:
        if len(raw) >= size:
            try:
                check(raw)
            except RemoteProtocolError:
                pass

atheris.Setup(sys.argv, one)
atheris.Fuzz()
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="wants pip install atheris")
def test_nothing_that_coverage_leads_to_raises_anything_else(tmp_path: Path) -> None:
    """Begun with real messages of every kind: what decodes encodes again, the rest is refused."""
    rng = random.Random(3)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(200):
        raw = enveloped(any_message(rng), cluster="c", sender=1)
        (corpus / str(number)).write_bytes(raw)

    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(corpus), f"-max_total_time={SECONDS}", "-max_len=4096"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=10 * SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr.splitlines()[-1])
