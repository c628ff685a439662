"""Every block of the documentation is read by what reads it where a user pastes it.

What runs where: Python behind `<!-- runnable -->` in tests/system/test_snippets.py, the commands of
a page in the test that `RUN_BY` names, settings of TOML in test_docs.py, the chart's values in
tests/deploy/test_chart.py.
Here: certificates are made, shell is parsed, its programs and the flags of ours are known, their
values are judged, and all other languages are read. `ELSEWHERE` lists which programs are not run,
`NOT_RUN` which pages, and why.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
import yaml

from peercache.cli.main import main, peercache
from peercache.config.settings import SETTINGS, Config
from peercache.engines.hints import hints_of
from tests.contracts.frozen.public import table
from tests.house.reference_pages import ROOT
from tests.house.test_docs import NOW, id_of
from tests.house.test_monitoring import unknown
from tests.shown import commands_in, commands_of
from tests.system.test_pages import PAGES as TYPED

BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PAGES = [*NOW, *sorted((ROOT / "deploy").rglob("*.md"))]

ELSEWHERE = {
    "apt-get docker podman systemctl systemd-sysusers sysctl mount install chown chmod ulimit": (
        "they change the host; tests/deploy/ reads the files that they take"
    ),
    "kubectl helm": "they want a cluster; tests/deploy/test_chart.py renders and validates",
    "ssh scp git curl openssl": "they want another host, a checkout's origin or a running server",
    "go": "it fetches Porcupine; tests/faults/test_checkers.py reads the file that it checks",
    "pip python3 tar echo export cmake sed": (
        "an environment or another project is built; tests/release/check.sh does so with ours"
    ),
    "vllm lmcache": "servers of other projects: tests/integration/ starts them where they are",
    "cat cd df eval source sleep grep head kill sha256sum …": "they come with every shell",
}
"""Programs of the shell blocks that are not run here, and why."""

MODULES_ELSEWHERE = ("sglang", "sglang_router")
"""Modules of other projects: tests/integration/ starts their servers where they are installed."""

RUN_BY = {
    **dict.fromkeys(TYPED, "tests/system/test_pages.py"),
    "README.md": "tests/system/test_readme.py",
    "docs/how-to/run-with-sglang.md": "tests/integration/test_sglang_pages.py",
    "docs/how-to/secure-a-cluster.md": "tests/system/test_separate_hosts.py",
    "docs/tutorials/first-cluster.md": "tests/system/test_tutorial.py",
    "docs/tutorials/three-hosts.md": "tests/system/test_three_hosts.py",
}
"""Pages with commands of ours, and the test that runs them."""

NOT_RUN = {
    "docs/README.md": "its commands are those of README, with another host's address",
    "docs/explanation/simulation.md": "`make sims` runs the same with other seeds; some take hours",
    "docs/how-to/enable-rdma.md": "they want an adapter; tests/rdma/ runs the like in its guest",
    "docs/how-to/find-each-other.md": "they want a name server and etcd: test_finding.py has both",
    "docs/how-to/kubernetes.md": "certificates are made below; the rest wants a cluster",
    "docs/how-to/prefill-and-decode.md": "test_sglang_three_hosts.py starts the same, with TLS",
    "docs/how-to/replay-a-failing-seed.md": "`make sims` runs the same with other seeds",
    "docs/how-to/run-without-a-host-tier.md": (
        "test_sglang_shown.py has SGLang parse them, test_sglang_untiered.py starts both modes"
    ),
    "docs/reference/sglang-versions.md": "`make full` fetches the versions and tests them",
    "docs/spec/README.md": "`make spec` runs it",
}
"""Pages with commands of ours that no test types as they stand, and why."""

OURS = ("peercache", "python")

PYTHON_RUN_ELSEWHERE = {
    "docs/tutorials/first-cluster.md": "tests/system/test_tutorial.py",
    "docs/how-to/add-an-actor.md": "a protocol, which mypy holds every actor to",
}
INLINE = re.compile(r"`(peercache [^`\n]+)`")
PLACEHOLDER = re.compile(r"HOST-A|HOST-B|\bHOST\b")


@attrs.frozen
class Block:
    """A block of a page."""

    page: str
    language: str
    text: str
    is_run: bool


def blocks(*languages: str) -> list[Any]:
    """Return the blocks of these languages, of all languages where none is named."""
    found = []
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        for number, match in enumerate(BLOCK.finditer(text)):
            is_run = text[: match.start()].rstrip().endswith("<!-- runnable -->")
            block = Block(page, match[2], textwrap.dedent(match[3]), is_run)
            if not languages or block.language in languages:
                found.append(pytest.param(block, id=f"{page}-{number}"))
    return found


def test_every_block_has_a_language_that_is_looked_at() -> None:
    """`text` is what a command prints, or a picture: it is read by a person alone."""
    known = {"sh", "bash", "python", "json", "yaml", "toml", "ini", "promql", "dockerfile", "text"}
    other = [(b.values[0].page, b.values[0].text[:60]) for b in blocks()
             if b.values[0].language not in known]  # fmt: skip

    assert other == []
    assert len(blocks("sh", "bash")) > 60


@pytest.mark.parametrize("block", blocks("sh", "bash"))
def test_shell_is_shell_and_its_programs_are_known(block: Block) -> None:
    """A quote that does not end, a target or a file that is gone: a reader pastes it in vain."""
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    assert [line for line in simple_commands(block.text) if trouble_of(line)] == []


def simple_commands(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments and redirections."""
    found = []
    # shlex would drop the end of the line together with its comment.
    bare = re.sub(r"(?m)(^|\s)#\s.*$", "", text.replace("\\\n", " "))
    lexer = shlex.shlex(bare, posix=True, punctuation_chars="|&;<>\n")
    lexer.commenters = ""
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;\n"):
            found.append(words)
            words = []
        else:
            words.append(word)
    return [words for words in [*found, words] if words]


def trouble_of(words: list[str]) -> str:
    """Return what is wrong with one command, "" for nothing."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    if words[:1] == ["do"]:
        words = words[1:]
    if not words or words[0] in (".", "for", "done"):
        return ""
    program = Path(words[0]).name
    if program == "peercache":
        return problem_of(shlex.join(["peercache", *words[1:]]))
    if program == "make":
        rules = re.findall(r"^([\w./ -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known = {*" ".join(rules).split(), ".venv/.installed"}
        return "".join(w for w in words[1:] if w not in known and "=" not in w)
    if program == "pre-commit":
        return "" if (ROOT / ".pre-commit-config.yaml").exists() else "no configuration"
    if program == "python" and words[1:2] == ["-m"]:
        module = words[2]
        ours = module.partition(".")[0] not in MODULES_ELSEWHERE
        is_there = not ours or module == "pytest" or importlib.util.find_spec(module) is not None
        return "" if is_there else module
    if program == "python":
        return "" if (ROOT / words[1]).exists() else words[1]
    return "" if program in " ".join(ELSEWHERE).split() else program


def test_commands_of_a_page_are_run_or_have_a_reason() -> None:
    """A page with a new command has a test that types it; what ends in `…` is part of one."""
    shown = {
        block.page
        for parameter in blocks("sh", "bash")
        for block in parameter.values
        for command in commands_in(block.text)
        if Path(command.split()[0]).name in OURS and "…" not in command
    }

    assert shown <= {*RUN_BY, *NOT_RUN}
    assert NOT_RUN.keys() <= shown - RUN_BY.keys()
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not name {page}"


def test_the_home_page_shows_the_commands_of_readme() -> None:
    """So that what is tested of README is tested of both; a flag may be in another line."""

    def servers(page: str) -> list[list[str]]:
        commands = [command for begin in ("python -m sglang", "vllm", "lmcache")
                    for command in commands_of(page, begin)]  # fmt: skip
        words = [shlex.split(command.replace("\\\n", " ")) for command in commands]
        return [[w if "{" not in w else str(json.loads(w)) for w in each] for each in words]

    assert servers("docs/README.md") == servers("README.md")
    assert len(servers("README.md")) == 3


def problem_of(line: str) -> str:
    """Return what is wrong with a command line, "" for nothing. Values are not looked at."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        return ""  # A part of a longer text, with a quote that ends elsewhere.
    command: click.Command = peercache
    context = click.Context(peercache, info_name="peercache")
    while words and isinstance(command, click.Group):
        name = words[0]
        if name.startswith("-") or not re.fullmatch(r"[a-z]+", name):
            break  # `peercache …`, or a flag of the whole program.
        found = command.get_command(context, name)
        if found is None:
            return f"{command.name or 'peercache'} has no command {name!r}"
        command, words = found, words[1:]
        context = click.Context(command, info_name=name, parent=context)
    known = {flag for parameter in command.params for flag in [*parameter.opts,
             *parameter.secondary_opts]} | {"--help"}  # fmt: skip
    for word in words:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", flag) and flag not in known:
            return f"`{command.name}` has no flag {flag}"
    return ""


@pytest.mark.parametrize("page", NOW, ids=id_of)
def test_commands_within_a_sentence_exist_with_their_flags(page: Path) -> None:
    """A reader copies them as they are."""
    problems = {line: problem_of(line) for line in INLINE.findall(page.read_text())}

    assert {line: problem for line, problem in problems.items() if problem} == {}


def test_a_command_that_cannot_work_is_found() -> None:
    """Each kind of trouble; and a chain and a pipe have several commands."""
    assert simple_commands("a b | c 'd\ne' && f # g\nh \\\n i") == [
        ["a", "b"], ["c", "d\ne"], ["f"], ["h", "i"],
    ]  # fmt: skip
    for wrong in ("make nothing", "python gone.py", "python -m peercache.gone", "frobnicate x",
                  "venv/bin/peercache node --gone", "peercache nodes",
                  "peercache disk chek /data"):  # fmt: skip
        assert trouble_of(wrong.split()), wrong
    assert not trouble_of(["A=1", "make", "lint"])


def nodes_shown() -> list[Any]:
    """Return each shown command that takes the settings of a node."""
    found: dict[str, Any] = {}
    for path in PAGES:
        text = path.read_text()
        lines = [shlex.split(line) for line in INLINE.findall(text) if line.count("'") != 1]
        for match in BLOCK.finditer(text):
            if match[2] in ("sh", "bash"):
                lines += simple_commands(textwrap.dedent(match[3]))
        for words in lines:
            if words[:3] == ["python", "-m", "peercache.node"]:
                words[:3] = ["peercache", "node"]
            if Path(words[0]).name == "peercache" and words[1] in ("node", "doctor", "health"):
                name = f"{path.relative_to(ROOT)}: {shlex.join(words[1:])}"
                found[name] = pytest.param(words[1:], id=name[:90])
    return list(found.values())


@pytest.mark.parametrize("words", nodes_shown())
def test_values_of_a_shown_node_are_judged_as_a_node_judges_them(words: list[str]) -> None:
    """Sizes, addresses and choices are right; files and hosts are the reader's."""
    settings: dict[str, str] = {}
    words = [PLACEHOLDER.sub("host-1", word) for word in words]
    flags = {flag: name for name, row in SETTINGS.items() for flag in (row.flag, *row.aliases)}
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name, _, text = flag.partition("=")
        if name in flags:
            settings[flags[name]] = text or value
    if any(value.startswith("--") or not value for value in settings.values()):
        return  # A flag that the text names without a value.
    trial = {} if "tls_cert" in settings or "insecure" in settings else {"insecure": True}

    Config.load({**settings, **trial})


def test_there_are_nodes_to_judge() -> None:
    """A search that finds nothing proves nothing."""
    assert len(nodes_shown()) > 15


@pytest.mark.parametrize("page", ["docs/how-to/secure-a-cluster.md", "docs/how-to/kubernetes.md"])
def test_certificates_of_a_page_can_be_made_in_its_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command of the page, one after the other; then its files are where it copies them."""
    monkeypatch.chdir(tmp_path)
    commands = [
        words
        for block in blocks("sh")
        if block.values[0].page == page
        for words in simple_commands(block.values[0].text)
    ]
    for words in commands:
        if words[:2] == ["peercache", "certs"]:
            assert main(words[1:]) == 0, (words, capsys.readouterr().err)
        elif words[0] == "scp":
            named = tmp_path / words[1]
            # Revoked files have moved, and what is joined here comes from `cat`.
            assert named.exists() or named.name == "both.crt", words
        elif words[0] == "kubectl":
            files = [word.rpartition("=")[2] for word in words if word.startswith("--from-file")]
            assert all((tmp_path / file).exists() for file in files), words


@pytest.mark.parametrize("block", blocks("python"))
def test_python_can_be_compiled_and_names_what_there_is(block: Block) -> None:
    """Imports are there, and calls of what they import have parameters of these names."""
    tree = ast.parse(block.text)
    if block.is_run or block.page in PYTHON_RUN_ELSEWHERE:
        return
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("peercache"):
            module = importlib.import_module(str(node.module))
            imported |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = imported.get(node.func.id)
            if called is not None:
                named = {word.arg: None for word in node.keywords if word.arg}
                inspect.signature(called).bind_partial(**named)


@pytest.mark.parametrize("block", blocks("json"))
def test_json_is_read_by_its_kind(block: Block) -> None:
    """Log events are known, hints are understood, and all else are settings of an engine."""
    read = json.loads(block.text)
    if "event" in read:
        assert read["event"] in {row[0] for row in table("log-events.md", "event")}
    elif "actions" in read:
        assert all(hints_of(action) for action in read["actions"])
    else:
        of_vllm = ("type", "module_path", "locality", "backpressure")
        is_tier = read.get("type") == "PeerCacheTier"
        Config.from_sglang({k: v for k, v in read.items() if not (is_tier and k in of_vllm)})


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_is_read_by_kind(block: Block, tmp_path: Path) -> None:
    """Manifests have a kind and a name, Prometheus takes its file, hooks run our commands."""
    for read in yaml.safe_load_all(block.text):
        if "apiVersion" in read:
            assert {"kind", "metadata"} <= set(read)
        elif "scrape_configs" in read:
            file = tmp_path / "prometheus.yml"
            file.write_text(block.text)
            rules = ROOT / "deploy" / "prometheus" / "rules.yml"
            shutil.copy(rules, tmp_path)
            if shutil.which("promtool") is None:
                pytest.skip("there is no promtool here")
            subprocess.run(["promtool", "check", "config", str(file)], check=True)
        elif "lifecycle" in read:
            assert not problem_of(shlex.join(read["lifecycle"]["preStop"]["exec"]["command"]))
        else:
            assert block.page == "docs/how-to/kubernetes.md", "what reads this?"


@pytest.mark.parametrize("block", blocks("ini", "promql", "dockerfile"))
def test_other_languages_are_read(block: Block) -> None:
    """Keys of the unit are keys that it has, expressions name what nodes have, a build's steps."""
    if block.language == "promql":
        assert "peercache_" in block.text
        assert unknown(block.text) == []
    elif block.language == "ini":
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(block.text)
        ours = (ROOT / "deploy" / "systemd" / "peercache.service").read_text()
        for section in unit.sections():
            assert all(f"\n{key}=" in ours for key in unit[section]), section
    else:
        assert {line.split()[0] for line in block.text.splitlines()} <= {"FROM", "COPY", "RUN"}
