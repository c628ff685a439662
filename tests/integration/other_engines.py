"""Engines other than SGLang in environments of their own, as processes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.pace import wait_until
from tests.system.nodes import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peercache"
VLLM_FIRST = os.environ.get("PEERCACHE_VLLM_FIRST", "")
"""A folder with another vLLM than the environment's, as `newer_vllm.py` makes it; "" for none."""
VLLM_VERSION = Path(VLLM_FIRST).name or "0.32.0"
START_S = 300.0

_NAMES = {"lmcache": "lmcache-0.5.6", "vllm": "vllm-0.32.0", "dynamo": "dynamo-1.6.1"}


def environment_of(engine: str) -> Path:
    """Return an engine's environment; skip the test, or fail where it was asked for, without it."""
    variable = engine.upper()
    venv = Path(os.environ.get(f"PEERCACHE_{variable}_VENV") or CACHE / _NAMES[engine])
    if (venv / ".peercache-stamp").exists():
        return venv
    reason = f"needs {venv}: run tests/integration/install_engine.sh {engine}"
    if os.environ.get(f"PEERCACHE_TEST_{variable}") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class EngineProcess:
    """One command of an engine's environment, with this checkout's sources on its path.

    leaves: patterns of what it leaves in shared memory.
    """

    leaves: tuple[str, ...] = ()

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        ready: str = "",
    ) -> None:
        """Start it. ready: what it prints when it serves; `wait` waits for that."""
        self.ready = ready
        self.log = tempfile.NamedTemporaryFile("w+", prefix="peercache-engine-")  # noqa: SIM115
        path = os.pathsep.join(filter(None, [VLLM_FIRST, str(ROOT / "src"), str(ROOT)]))
        # Engines open no connection to the outside, and say nothing to anyone about their use.
        quiet = {
            "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": path,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **quiet, **(environment or {})},
            start_new_session=True,
        )

    def said(self) -> str:
        """Return all that it has written."""
        return Path(self.log.name).read_text(errors="replace")

    def wait(self) -> None:
        """Wait until it serves."""

        def serves() -> bool:
            assert self.process.poll() is None, f"it has ended: {self.said()[-4000:]}"
            return self.ready in self.said()

        wait_until(serves, "the engine serves", START_S)

    def finish(self) -> str:
        """Wait for its end; return what it has written."""
        assert self.process.wait(START_S) == 0, self.said()[-4000:]
        return self.said()

    def kill(self) -> None:
        """SIGKILL it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _session(self) -> list[int]:
        """Return the process and its children, which are in a session of their own."""
        found = [self.process.pid]
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(each.name)) == self.process.pid:
                    found.append(int(each.name))
        return found

    def __enter__(self) -> EngineProcess:
        """Return the process."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Ask it to end, then end it; show what it said in a failed test."""
        members = self._session()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()
        if error is not None:
            sys.stderr.write(self.said()[-8000:])
        self.log.close()
        # What LMCache and vLLM leave in shared memory, some of it even when they end by themselves.
        for pattern in (*(f"lmcache_kv_{each}_*" for each in members), *self.leaves):
            for left in Path("/dev/shm").glob(pattern):
                left.unlink(missing_ok=True)


def plugin(home: str, **settings: Any) -> str:
    """Return the JSON of LMCache's `--l2-adapter`."""
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "peercache.lmcache",
            "class_name": "PeerCacheL2Adapter",
            "adapter_params": {"home": home, **settings},
        }
    )


class LMCacheServer(EngineProcess):
    """LMCache's multi-process server with the L2 adapter."""

    def __init__(self, venv: Path, l2: str, *, chunk_tokens: int = 256) -> None:
        """Start it."""
        self.port, self.http = free_port(), free_port()
        self.rpc_url = f"tcp://127.0.0.1:{self.port}"
        self.url = f"http://127.0.0.1:{self.http}"
        super().__init__(
            [
                venv / "bin/lmcache", "server", "--host", "127.0.0.1", "--port", self.port,
                "--http-host", "127.0.0.1", "--http-port", self.http, "--l1-size-gb", "0.25",
                "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", str(chunk_tokens),
                "--supported-transfer-mode", "auto", "--disable-metrics", "--max-workers", "1",
                "--l2-adapter", l2,
            ],
            ready="Uvicorn running",
        )  # fmt: skip

    def adapter(self) -> dict[str, Any]:
        """Return what the L2 adapter reports of itself."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=60) as answer:
            (only,) = json.load(answer)["storage_manager"]["l2_adapters"]
        status: dict[str, Any] = only
        return status

    def listed(self) -> list[dict[str, Any]]:
        """Return the first page of the objects that its L2 lists."""
        with urllib.request.urlopen(f"{self.url}/cache/objects?tier=l2", timeout=60) as answer:
            entries: list[dict[str, Any]] = json.load(answer)["entries"]
        return entries


EVERY_PAGE = slice(None, None, 4096)
"""Where `NodeProcess.flip` flips a bit of every page."""


def tiny_model(venv: Path, folder: Path) -> Path:
    """Return a folder with the tests' Llama, written by an environment that has torch."""
    source = (
        "import sys; from pathlib import Path; "
        "from tests.integration.tiny_llama import write_tiny_llama; "
        "write_tiny_llama(Path(sys.argv[1]))"
    )
    with EngineProcess([venv / "bin/python", "-c", source, folder]) as process:
        process.finish()
    return folder


class VllmServer(EngineProcess):
    """vLLM's server on a CPU, with a KV connector."""

    def __init__(self, venv: Path, model: Path, connector: Mapping[str, Any], *flags: str) -> None:
        """Start it. connector: the JSON of `--kv-transfer-config`."""
        self.port = free_port()
        engine = f"peercache-{os.getpid()}-{self.port}"
        connector = {**connector, "engine_id": engine}
        self.leaves = (f"vllm_offload_{engine}*",)
        super().__init__(
            [
                venv / "bin/vllm", "serve", model, "--host", "127.0.0.1", "--port", self.port,
                "--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", "bfloat16",
                "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager",
                "--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching",
                "--kv-transfer-config", json.dumps(connector), *flags,
            ],
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONHASHSEED": "0",
                "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
            },
            ready="Application startup complete",
        )  # fmt: skip

    def ask(self, prompt: Sequence[int]) -> list[int]:
        """Return the greedy tokens after a prompt."""
        body = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": 16, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return tokens

    def wait(self) -> None:
        """Wait until it serves, in the version that is wanted."""
        super().wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/version", timeout=60) as answer:
            version: str = json.load(answer)["version"]
        assert version.startswith(VLLM_VERSION), version

    def metrics(self) -> list[str]:
        """Return the lines of vLLM's metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return [line for line in lines if not line.startswith("#")]

    def metric(self, name: str) -> float:
        """Return the sum of a counter over its labels."""
        lines = [line for line in self.metrics() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def tier(home: str, **settings: Any) -> dict[str, Any]:
    """Return vLLM's connector configuration with the tier, and the tests' spec for a CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.integration.cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "self_describing_kv_events": True,
            "secondary_tiers": [
                {"type": "PeerCacheTier", "module_path": "peercache.vllm", "home": home, **settings}
            ],
        },
    }
