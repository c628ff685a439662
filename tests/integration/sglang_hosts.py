"""Hosts of their own on which a user types a page's commands, with SGLang's servers on a CPU.

Commands run as they stand. What a CPU and this machine demand is added at their end, where the
last of two flags of one name counts: `FOR_A_NODE`, and `Site.for_a_server`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs

from tests.integration.engines import START_S, installed
from tests.integration.processes import environment
from tests.integration.tiny_llama import write_tiny_llama, write_tokenizer
from tests.pace import wait_until
from tests.system.nodes import CALL_S
from tests.system.separate_hosts import Host

FOR_A_NODE = "--pool-size 64MiB"
"""In place of a pool as large as a server's."""

FOR_A_CPU = (
    "--tp 1 --device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--max-total-tokens 4096 --max-running-requests 4 --disable-overlap-schedule "
    "--skip-server-warmup --hicache-ratio 2 --log-level warning"
)
"""One rank, on a device without kernels of its own, with little memory, and hosts whose memory
SGLang cannot measure."""

SERVES = "curl -sf -o /dev/null http://127.0.0.1:30000/model_info"


@attrs.define
class Site:
    """What is installed on all hosts: PeerCache, SGLang and a model of a few megabytes."""

    folder: Path
    model: Path = attrs.field(init=False)
    variables: dict[str, str] = attrs.field(init=False)
    _started: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Write the model, and the programs that commands begin with."""
        self.model = write_tiny_llama(self.folder / "model")
        write_tokenizer(self.model)
        programs = self.folder / "bin"
        programs.mkdir()
        for name, more in (("python", ""), ("peercache", "-m peercache")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {more} "$@"\n')
            (programs / name).chmod(0o755)
        self.variables = environment(
            PYTHONPATH_FIRST=str(installed(self.folder / "installed")),
            PATH=f"{programs}:{os.environ['PATH']}",
            PEERCACHE_TEST_CPU_ENGINE="1",
            SGLANG_USE_CPU_ENGINE="1",
            HF_HUB_OFFLINE="1",
            PEERCACHE_OP_TIMEOUT_S=str(CALL_S),
            PEERCACHE_EXISTS_TIMEOUT_S=str(CALL_S),
        )

    @property
    def for_a_server(self) -> str:
        """Return what a server's command needs here: flags for a CPU, and the model."""
        return f"{FOR_A_CPU} --model-path {self.model}"

    def types(self, host: Host, text: str) -> str:
        """Run a block of a page on a host to its end; return what it prints."""
        done = subprocess.run(
            host.wrapped(["bash", "-c", text]),
            env=self.variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            check=False, timeout=START_S,
        )  # fmt: skip
        return done.stdout

    def starts(self, host: Host, command: str) -> None:
        """Start a command of a page on a host; `end` ends it and all its children."""
        with self.log_of(host, len(self._started)).open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    host.wrapped(["bash", "-c", command]),
                    env=self.variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip

    def serves(self, host: Host) -> None:
        """Wait until the server of a host serves."""

        def is_there() -> bool:
            for process in self._started:
                assert process.poll() is None, f"{process.args} has ended:\n{self.logs()}"
            return host.run(SERVES).returncode == 0

        wait_until(is_there, f"the server of {host.name} serves", START_S)

    def log_of(self, host: Host, number: int) -> Path:
        """Return where the output of a command is."""
        return self.folder / f"{number}-{host.name}.out"

    def logs(self) -> str:
        """Return the ends of all outputs."""
        return "\n".join(
            f"{file.name}:\n{file.read_text(errors='replace')[-3000:]}"
            for file in sorted(self.folder.glob("*.out"))
        )

    def end(self) -> None:
        """End what was started, with its children; what they leave is on their hosts."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
