"""The command line: flags made from the configuration, and subcommands that say what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest

from peercache.cli import main as cli
from peercache.cli.demo import story
from peercache.cli.options import settings_options
from peercache.config.settings import SETTINGS, Config
from peercache.errors import ConfigError
from peercache.wire.envelope import WIRE_VERSION, versions_spoken


def parsed(*arguments: str, environ: Mapping[str, str] | None = None) -> Config:
    """Return what these flags give."""
    found: list[Config] = []

    @click.command
    @settings_options
    def command(config: str | None, **settings: str | None) -> None:
        found.append(Config.load(settings, file=config, environment=environ or {}))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_no_flags_give_the_defaults() -> None:
    """A flag that is not given leaves the setting to the other sources."""
    assert parsed() == Config()
    assert parsed(environ={"PEERCACHE_POOL_SIZE": "1GiB"}).pool_size == 2**30


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_a_flag(name: str) -> None:
    """Each field of the configuration can be given as --kebab-case with its own default."""
    default = getattr(Config(), name)
    text = ",".join(default) if isinstance(default, tuple) else str(default)

    assert parsed(f"{SETTINGS[name].flag}={text}") == Config()


def test_discovery_has_a_short_spelling() -> None:
    """--discovery is --discovery-addr."""
    trial = ("--insecure",)
    short = parsed(*trial, "--discovery", "a:1,b:2")
    assert short == parsed(*trial, "--discovery-addr", "a:1,b:2")
    assert short.discovery_addr == ("a:1", "b:2")


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    """One setting from each source, and each source overruled by the next."""
    file = tmp_path / "node.toml"
    file.write_text('cluster = "file"\npool_size = "1GiB"\nmax_masters = 7\n')
    environ = {"PEERCACHE_CLUSTER": "environment", "PEERCACHE_POOL_SIZE": "2GiB"}

    config = parsed("--config", str(file), "--cluster", "flag", environ=environ)

    assert (config.cluster, config.pool_size, config.max_masters) == ("flag", 2**31, 7)


@pytest.mark.parametrize("command", ["node", "doctor", "health"])
def test_help_of_the_node_has_what_a_first_node_needs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two screens; --help-all has every setting."""
    assert cli.main([command, "--help"]) == 0

    shown = capsys.readouterr().out
    assert shown.count("\n") < 90
    for flag in ("--home", "--pool-size", "--discovery", "--tls-cert", "--insecure", "--help-all"):
        assert f"{flag}" in shown
    assert "--rdma-retry-count" not in shown


def test_help_of_the_node_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Percent signs and braces in the help do not break it."""
    assert cli.main(["node", "--help-all"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    for row in SETTINGS.values():
        assert row.flag in shown
        assert row.allowed in shown


def test_example_file_is_toml_with_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uncommented as a whole, the example file is the default configuration."""
    assert cli.main(["config", "--toml"]) == 0
    lines = [line.removeprefix("# ") for line in capsys.readouterr().out.splitlines()]
    settings = [line for line in lines if line.partition(" = ")[0] in SETTINGS]
    file = tmp_path / "example.toml"
    file.write_text("\n".join(settings))

    assert len(settings) == len(SETTINGS)
    assert 'disk_size = "100GB"' in settings
    assert Config.load(file=file) == Config()


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    """The wire version is next to it: it decides which nodes can talk to each other."""
    assert cli.main(["version"]) == 0

    assert capsys.readouterr().out.startswith(
        f"peercache {version('peercache-kv')} (wire version {versions_spoken()})"
    )


def test_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As of most programs."""
    assert cli.main(["--version"]) == 0
    flag = capsys.readouterr().out
    assert cli.main(["version"]) == 0
    assert flag == capsys.readouterr().out


def test_the_program_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """In groups, the node first; every command is in one of them."""
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    assert cli.main(["--help"]) == 0

    assert alone == capsys.readouterr().out
    commands = [line.split()[0] for line in alone.splitlines() if re.match(r"  [a-z]", line)]
    assert commands[0] == "node"
    assert commands == cli.peercache.list_commands(click.Context(cli.peercache))
    assert len(re.findall(r"^[A-Z].*:$", alone, re.MULTILINE)) > 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["node", "--pool-sise", "1GiB"], ["--pool-sise", "--pool-size", "peercache node --help"]),
        (["demmo"], ["No such command 'demmo'. Did you mean demo?", "See `peercache --help`."]),
        (["bench"], ["Missing command", "peercache bench --help"]),
        (["bench", "drive"], ["Missing option", "--discovery", "peercache bench drive --help"]),
        (["disk", "check"], ["Missing argument", "PATH", "peercache disk check --help"]),
        (["demo", "twice"], ["unexpected extra argument", "twice"]),
    ],
)
def test_wrong_usage_is_one_line(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, which flag, and where to look."""
    assert cli.main(words) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in expected), error


def test_help_lists_every_command_without_importing_one() -> None:
    """`peercache --help` and a wrong command are as quick as `peercache version`."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "peercache", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    for name in ("demo", "bench", "doctor", "node", "disk", "config", "completion", "version"):
        assert f"\n  {name} " in done.stdout
    for heavy in ("numpy", "trio", "pynng", "rich", "jinja2", "multiprocessing"):
        assert f" {heavy}\n" not in done.stderr, heavy


def commands_of(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield every command below a group that is no command itself, with its name."""
    if not isinstance(group, click.Group):
        yield pytest.param(group, id=" ".join(path))
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from commands_of(command, (*path, name))


NO_JSON = {
    "node": "its only output is a line of JSON",
    "bench serve": "it prints one line when it serves; `bench drive` has the figures",
    "top": "it is a screen; `status --json` has its numbers",
    "completion": "its output is a script for a shell",
}


@pytest.mark.parametrize("command", list(commands_of(cli.peercache)))
def test_every_command_speaks_json(command: click.Command, request: pytest.FixtureRequest) -> None:
    """So that a script need not read tables; an exception has its reason."""
    name = request.node.callspec.id
    speaks = any("--json" in parameter.opts for parameter in command.params)

    assert speaks != (name in NO_JSON)


def test_the_format_has_a_flag_as_in_etcdctl(capsys: pytest.CaptureFixture[str]) -> None:
    """-w json is --json; the two do not contradict each other unnoticed."""
    for words in (["-w", "json"], ["--write-out=json"], ["--json"], ["--json", "-w", "json"]):
        assert cli.main(["version", *words]) == 0
        assert "wire" in json.loads(capsys.readouterr().out)
    assert cli.main(["version", "-w", "table"]) == 0
    assert capsys.readouterr().out.startswith("peercache ")
    assert cli.main(["version", "-w", "table", "--json"]) == 2
    assert cli.main(["version", "-w", "xml"]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ("status", "--at", "127.0.0.1:none"),
        ("exists", "key", "--at", "127.0.0.1:31998"),
        ("disk", "check", "/dev/null/none"),
        ("certs", "show", "/dev/null/none"),
        ("doctor", "--pool-size", "1XB"),
        ("config", "--none"),
    ],
    ids=lambda wrong: wrong[0],
)
def test_an_error_is_one_sentence_for_scripts_too(
    wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that parses stdout after exit status 2 finds nothing, never half an object."""
    assert cli.main([*wrong, "--json"]) == 2

    reported = capsys.readouterr()
    assert reported.out == ""
    assert reported.err.startswith("peercache: ")
    assert reported.err.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script asks `peercache` itself."""
    if shutil.which(shell) is None and shell == "bash":
        pytest.skip("click asks bash for its version")

    assert cli.main(["completion", shell]) == 0

    assert cli.COMPLETION in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "completes"),
    [
        ("peercache ve", "version"),
        ("peercache bench se", "serve"),
        ("peercache node --pool-s", "--pool-size"),
        ("peercache node --fabric rd", "rdma"),
    ],
)
def test_shell_completes_commands_flags_and_values(
    line: str,
    completes: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As bash asks: the words so far, and which of them is being written."""
    monkeypatch.setenv(cli.COMPLETION, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))

    assert cli.main([]) == 0

    assert completes in [item.partition(",")[2] for item in capsys.readouterr().out.splitlines()]


def test_error_of_a_subcommand_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What PeerCache refuses is reported in a line, with the exit status of wrong usage."""

    def refuse(**_: object) -> int:
        raise ConfigError("pool_size", "wants more")

    monkeypatch.setattr(story, "run_demo", refuse)

    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "peercache: configuration 'pool_size': wants more\n"


def test_interrupt_ends_with_the_status_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error, and no traceback."""

    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "run_demo", interrupted)

    assert cli.main(["demo"]) == 130


def test_reader_that_has_enough_is_no_error() -> None:
    """As in `peercache config | head -1`: no traceback, and the status that a shell expects."""
    command = [sys.executable, "-m", "peercache", "config", "--toml"]
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=600, check=False
        )
    finally:
        os.close(theirs)

    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert not done.stderr


def test_ready_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """The node ends: a program that waits for the file would wait forever."""
    file = tmp_path / "none" / "ready.json"
    done = subprocess.run(
        [sys.executable, "-m", "peercache", "node", "--listen", "127.0.0.1:0", "--pool-size",
         "1MiB", "--metrics-port", "0", "--log-level", "error", "--ready-file", str(file)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert f"cannot write {file}: No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_and_settings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: the wire as two numbers, and each setting with its default."""
    assert cli.main(["version", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["version"], reported["wire"][1]) == (version("peercache-kv"), WIRE_VERSION)
    assert cli.main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == SETTINGS.keys()


@pytest.mark.parametrize("command", [["get", "one"], ["exists", "one"], ["rm", "one"]])
def test_a_page_command_without_a_node_names_no_address_that_was_not_typed(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pages are read and written through a home address, also where a control port listens."""
    monkeypatch.setattr("peercache.config.home.SYSTEM_FOLDER", tmp_path / "run")
    monkeypatch.setattr("peercache.client.operator.homes_here", list)
    monkeypatch.delenv("PEERCACHE_HOME", raising=False)

    assert cli.main(command) == 2

    said = capsys.readouterr().err
    assert "no answer from a node of this host: nothing listens at ipc://" in said
    assert "start one (peercache node), or name one with --home ipc://PATH" in said
    assert "31998" not in said
