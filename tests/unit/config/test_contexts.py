"""Contexts: a user's clusters by name, and what is said of a file that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.client.operator import Target
from peercache.config.contexts import contexts_file, read_contexts
from peercache.errors import ConfigError

FILE = """\
# Clusters.
[prod]
at = "10.0.0.7:31998"
cluster = "production"
tls_ca = "prod/ca.pem"
tls_cert = "/etc/pki/operator.pem"
tls_key = "~/operator.key"

[lab]
at = "ipc:///run/lab.ipc"
cluster = "lab"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with contexts."""
    path = tmp_path / "peercache" / "contexts.toml"
    path.parent.mkdir()
    path.write_text(FILE)
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_a_context_names_node_cluster_and_certificates(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Paths begin at the folder of the file; one from the root, or from a home, stays."""
    target = Target.of(context="prod", environment=environment)

    assert (target.at, target.context) == ("10.0.0.7:31998", "prod")
    assert (target.has_cluster, target.is_named) == (True, True)
    assert target.config.cluster == "production"
    assert target.config.tls_ca == str(tmp_path / "peercache" / "prod" / "ca.pem")
    assert target.config.tls_cert == "/etc/pki/operator.pem"
    assert target.config.tls_key == str(Path("~/operator.key").expanduser())
    assert Target.of(context="lab", environment=environment).is_home


def test_a_flag_wins_over_the_environment_and_that_over_a_context(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Also an address of another kind; --config wins over the context as well."""
    variables = environment | {"PEERCACHE_CLUSTER": "of variables"}
    file = tmp_path / "node.toml"
    file.write_text('cluster = "of a file"')

    def of(**given: str) -> Target:
        return Target.of(context="lab", **given)  # type: ignore[arg-type]

    assert of(environment=environment, config=str(file)).config.cluster == "of a file"  # type: ignore[arg-type]
    assert of(environment=variables).config.cluster == "of variables"  # type: ignore[arg-type]
    assert of(environment=variables, cluster="of a flag").config.cluster == "of a flag"  # type: ignore[arg-type]
    elsewhere = of(environment=environment, at="h:1")  # type: ignore[arg-type]
    assert (elsewhere.at, elsewhere.context, elsewhere.config.cluster) == ("h:1", "", "lab")
    homes = environment | {"PEERCACHE_HOME": "ipc:///run/other.ipc"}
    assert of(environment=homes).at == "ipc:///run/other.ipc"  # type: ignore[arg-type]


def test_an_unknown_context_names_those_that_there_are(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as wrong:
        Target.of(context="prd", environment=environment)

    path = contexts_file(environment)
    assert str(wrong.value) == (
        f"configuration 'context': {path} has no context 'prd'; it has prod, lab"
    )


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}/.*: No such file"):
        Target.of(context="prod", environment={"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[prod]\nat = "h:1"\ncluster = "x\n', 3, "Illegal character"),
        ("[prod]\nat = [", 2, "Invalid value"),
        (
            '[a]\nat = "h:1"\n\n[b]\nat = "h:2"\nadress = "h"\n',
            6,
            "no adress; it has at, cluster, tls_ca",
        ),
        ('[a]\nat = "h:port"\n', 2, "at 'h:port' is not HOST:PORT"),
        ('[a]\nat = "h:1"\ncluster = 7\n', 3, "cluster must be a text, and not empty"),
        ('[a]\nat = ""\n', 2, "at must be a text"),
        (f'[a]\nat = "h:1"\ncluster = "{"x" * 300}"\n', 3, "must be 1 to 255 characters"),
        ('[a]\nat = "h:1"\n\n["b c"]\ncluster = "x"\n', 4, "the context b c has no address"),
        ('# none\nat = "h:1"\n', 2, "at is in no context: write [NAME] above it"),
        ('a = { cluster = "x" }\n', 1, "the context a has no address"),
        (b'[a]\nat = "h:1"\n# \xff\n', 3, "not UTF-8"),
    ],
)
def test_a_broken_file_is_one_sentence_with_the_line(
    tmp_path: Path, text: str | bytes, line: int, problem: str
) -> None:
    """Whichever context is wanted: what is wrong elsewhere would surprise later."""
    path = tmp_path / "contexts.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError) as wrong:
        read_contexts(path)

    said = str(wrong.value)
    assert said.startswith(f"configuration 'context': {path}, line {line}: ")
    assert problem in said
    assert "\n" not in said


def test_the_file_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")

    assert contexts_file({}) == Path("/home/u/.config/peercache/contexts.toml")
    assert contexts_file({"XDG_CONFIG_HOME": "relative"}) == contexts_file({})
