"""One SGLang server on a CPU, asked over HTTP; storage is attached and detached while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import attrs
import psutil

from tests.integration.processes import STOP_S, environment
from tests.pace import wait_until
from tests.system.nodes import Closing, free_port

PAGE_TOKENS = 64
NEW_TOKENS = 4
DEVICE_TOKENS = 2048
"""Of the engine's own cache; its host memory has one and a half times as much."""

START_S = 900.0
ANSWER_S = 300.0
KEY = "tests"
TIERED = "--enable-hierarchical-cache"


@attrs.frozen(kw_only=True)
class Reply:
    """What the engine said to one prompt. stored: prompt tokens that came out of the store; host:
    of the engine's host memory, or through its linker.

    margin: the least distance of a chosen token's log probability to the second best.
    """

    tokens: list[int]
    logprobs: list[float]
    margin: float
    stored: int
    host: int
    took_s: float


class ServedEngine(Closing):
    """`sglang.launch_server` in a process group of its own, without storage at first."""

    def __init__(
        self, model: Path, *more: str, switches: tuple[str, ...] = (TIERED,), **environs: str
    ) -> None:
        """Start it; `wait` returns when it serves. more, switches: of its command line."""
        self._port = free_port()
        flags = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": self._port,
            "--admin-api-key": KEY,
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--page-size": str(PAGE_TOKENS),
            "--max-total-tokens": str(DEVICE_TOKENS),
            "--max-running-requests": "4",
            "--random-seed": "0",
            "--hicache-ratio": "1.5",
            "--hicache-write-policy": "write_through",
            "--hicache-storage-prefetch-policy": "timeout",
            "--log-level": "warning",
        }
        always = (
            "--disable-overlap-schedule",
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--enable-cache-report",
        )
        parts = (part for flag in flags.items() for part in flag)
        server = (sys.executable, "-W", "ignore", "-m", "sglang.launch_server")
        self._process = subprocess.Popen(
            [*server, *parts, *always, *switches, *more],
            env=environment(
                PEERCACHE_TEST_CPU_ENGINE="1",
                SGLANG_USE_CPU_ENGINE="1",
                HF_HUB_OFFLINE="1",
                **environs,
            ),
            start_new_session=True,
        )

    def wait(self) -> None:
        """Return once it serves."""

        def serves() -> bool:
            assert self._process.poll() is None, "the engine has ended"
            with contextlib.suppress(OSError):
                return self._call("GET", "/model_info")[0] == 200
            return False

        wait_until(serves, "the engine serves", START_S)

    def ask(self, ids: list[int]) -> Reply:
        """Generate greedily."""
        begun = time.monotonic()
        status, body = self._call(
            "POST",
            "/generate",
            {
                "input_ids": ids,
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "top_logprobs_num": 2,
            },
        )
        took_s = time.monotonic() - begun
        assert status == 200, body
        out = json.loads(body)
        meta = out["meta_info"]
        return Reply(
            tokens=out["output_ids"],
            logprobs=[each[0] for each in meta["output_token_logprobs"]],
            margin=min(best[0] - next_[0] for best, next_ in meta["output_top_logprobs"]),
            stored=(meta.get("cached_tokens_details") or {}).get("storage", 0),
            host=(meta.get("cached_tokens_details") or {}).get("host", 0),
            took_s=took_s,
        )

    def attach(self, extra_config: dict[str, Any]) -> tuple[bool, str]:
        """Ask for storage once; return whether the engine did so, and what it said."""
        status, said = self._call(
            "PUT",
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config_json": json.dumps(extra_config),
            },
        )
        return status == 200, said

    def detach(self) -> tuple[bool, str]:
        """Ask for no storage once; return whether the engine did so, and what it said."""
        status, said = self._call("DELETE", "/hicache/storage-backend")
        return status == 200, said

    def clear_storage(self) -> None:
        """Have the store drop the pages of this engine's namespace."""
        status, said = self._call("POST", "/hicache/storage-backend/clear")
        assert status == 200, said

    def flush(self) -> None:
        """Empty the engine's own caches, once nothing is in flight."""
        wait_until(
            lambda: self._call("POST", "/flush_cache?timeout=30")[0] == 200, "the engine is idle"
        )

    def scheduler(self) -> psutil.Process:
        """Return the process in which the store lives."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        return next(each for each in family if "scheduler" in " ".join(each.cmdline()))

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()

    def close(self) -> None:
        """End it and its children."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
