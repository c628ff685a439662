"""`peercache certs`: certificates by one command each, and keys that nothing overwrites."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest

from peercache.cli.main import main
from peercache.config.settings import Config
from peercache.model.keys import Namespace
from peercache.trust.files import TlsFiles


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "certs"
    assert main(["certs", "init", str(folder), "--cluster", "prod"]) == 0
    return folder


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["certs", *map(str, arguments)])
    shown = capsys.readouterr()
    assert "PRIVATE" not in shown.out + shown.err
    return status, shown.out, shown.err


def test_init_makes_an_authority_that_only_its_owner_reads(folder: Path) -> None:
    """The key signs every certificate of the cluster."""
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "ca.key"}
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("flag", "name", "stem"),
    [
        ("--node", "a", "node-a"),
        ("--client", "engine 1", "client-engine%201"),
        ("--operator", "../ann", "operator-..%2Fann"),
    ],
)
def test_issue_writes_a_certificate_and_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str], flag: str, name: str, stem: str
) -> None:
    """The files stand in the folder, whatever the name holds."""
    status, reported, _ = _run(capsys, "issue", folder, flag, name)

    assert status == 0
    assert f"{stem}.crt" in reported
    assert stat.S_IMODE((folder / f"{stem}.key").stat().st_mode) == 0o600
    checked = subprocess.run(
        ["openssl", "verify", "-CAfile", folder / "ca.crt", folder / f"{stem}.crt"], check=False
    )
    assert checked.returncode == 0


def test_issued_files_work_as_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of `issue` names the settings; a node takes them as they are."""
    _run(capsys, "issue", folder, "--node", "a", "--namespace", "llama/8b")
    config = Config.load(
        {
            "tls_ca": str(folder / "ca.crt"),
            "tls_cert": str(folder / "node-a.crt"),
            "tls_key": str(folder / "node-a.key"),
        }
    )
    files = TlsFiles.load(config, is_node=True)

    assert files is not None
    assert files.identity.uri() == "peercache://prod/node/a?namespace=llama%2F8b"


@pytest.mark.parametrize("command", ["init", "issue"])
def test_nothing_is_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A key that is lost cannot be made again."""
    more = ["--cluster", "prod"] if command == "init" else ["--node", "a"]
    _run(capsys, "issue", folder, "--node", "a")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    status, _, problem = _run(capsys, command, folder, *more)

    assert status == 2
    assert "nothing is overwritten" in problem
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_renewal_keeps_the_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The certificate is another, and the key need not travel again."""
    _run(capsys, "issue", folder, "--node", "a")
    key, old = (folder / "node-a.key").read_bytes(), (folder / "node-a.crt").read_bytes()

    assert _run(capsys, "issue", folder, "--node", "a", "--renew")[0] == 0

    assert (folder / "node-a.key").read_bytes() == key
    assert (folder / "node-a.crt").read_bytes() != old
    status, _, problem = _run(capsys, "issue", folder, "--node", "b", "--renew")
    assert (status, "without --renew" in problem) == (2, True)


def test_certificate_ends_with_its_authority_at_the_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer one would be refused all the same."""
    folder = tmp_path / "short"
    _run(capsys, "init", folder, "--cluster", "prod", "--days", 3)
    _run(capsys, "issue", folder, "--node", "a", "--for", "30d")

    shown = json.loads(_run(capsys, "show", folder / "node-a.crt", "--json")[1])
    assert shown["days_left"] == pytest.approx(3, abs=0.1)


def test_show_prints_what_a_certificate_contains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people, and as JSON."""
    _run(capsys, "issue", folder, "--client", "e", "--namespace", "x", "--namespace", "y/z")
    _run(capsys, "issue", folder, "--node", "n", "--host", "::1", "--host", "gpu-1.example")

    shown = json.loads(_run(capsys, "show", folder / "client-e.crt", "--json")[1])
    assert shown["namespaces"] == ["x", "y/z"]
    assert (shown["kind"], shown["role"], shown["cluster"]) == ("certificate", "client", "prod")
    text = _run(capsys, "show", folder / "node-n.crt")[1]
    for word in ("peercache://prod/node/n", "gpu-1.example", "::1", "days left"):
        assert word in text
    assert "authority" in _run(capsys, "show", folder / "ca.crt")[1]


def test_revoke_by_name_lists_every_certificate_of_that_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that a renewal has replaced: their key is the same."""
    _run(capsys, "issue", folder, "--node", "a")
    _run(capsys, "issue", folder, "--node", "a", "--renew")
    _run(capsys, "issue", folder, "--node", "b")

    status, reported, _ = _run(capsys, "revoke", folder, "node-a")

    assert status == 0
    assert reported.count("Revoked peercache://prod/node/a") == 2
    shown = json.loads(_run(capsys, "show", folder / "revoked.crl", "--json")[1])
    assert (shown["number"], len(shown["revoked"])) == (1, 2)
    assert {path.name for path in folder.glob("node-*")} == {"node-b.crt", "node-b.key"}
    assert len(list((folder / "revoked").iterdir())) == 2
    assert _run(capsys, "issue", folder, "--node", "a")[0] == 0


def test_revoke_by_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certificate that was found elsewhere; twice changes nothing."""
    _run(capsys, "issue", folder, "--client", "e")
    copy = folder.parent / "found.crt"
    copy.write_bytes((folder / "client-e.crt").read_bytes())

    assert "Revoked peercache://prod/client/e" in _run(capsys, "revoke", folder, copy)[1]
    assert "Nothing new" in _run(capsys, "revoke", folder, copy)[1]


def test_a_namespace_with_the_tag_of_another_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner would have the other's rights. The first of them can be renewed."""
    first, second = "team-1", "team-2"
    # Two names with one tag are found by 2**32 hashes only.
    monkeypatch.setattr(Namespace, "space_tag", lambda self: len(self.name))
    both = ("--namespace", second, "--namespace", first)
    assert _run(capsys, "issue", folder, "--client", "c", *both)[0] == 2
    assert _run(capsys, "issue", folder, "--client", "a", "--namespace", first)[0] == 0

    for role in ("--client", "--node"):
        status, _, problem = _run(capsys, "issue", folder, role, "b", "--namespace", second)
        assert (status, first in problem) == (2, True)
    assert not (folder / "client-b.key").exists()
    renewed = ("--client", "a", "--namespace", first, "--renew")
    assert _run(capsys, "issue", folder, *renewed)[0] == 0
    _run(capsys, "revoke", folder, "client-a")
    assert _run(capsys, "issue", folder, "--client", "b", "--namespace", second)[0] == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["issue", "{folder}"], "Name one of --node, --client and --operator"),
        (["issue", "{folder}", "--node", "a", "--client", "b"], "Name one of"),
        (["issue", "{folder}", "--client", "a", "--host", "h"], "--host is for a node"),
        (["issue", "{folder}", "--node", ""], "1 to 255 printable"),
        (["issue", "{folder}", "--node", "a", "--host", "bad host"], "no host name"),
        (["issue", "{folder}", "--operator", "a", "--namespace", "n"], "names no namespace"),
        (["issue", "{folder}/none", "--node", "a"], "certs init"),
        (["issue", "{folder}", "--node", "a", "--days", "0"], "--days"),
        (["issue", "{folder}", "--node", "a", "--for", "30"], "wants 1d to 36500d"),
        (["init", "{folder}/new"], "--cluster"),
        (["init", "{folder}/new", "--cluster", ""], "1 to 255 printable"),
        (["revoke", "{folder}", "node-z"], "is no certificate of"),
        (["show", "{folder}/none.crt"], "No such file"),
        (["show", "{folder}/ca.key"], "holds a private key"),
        (["sho"], "Did you mean 'show'"),
    ],
)
def test_wrong_usage_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    """It explains what to do, and leaves nothing behind."""
    before = sorted(folder.iterdir())
    status, _, reported = _run(capsys, *(each.format(folder=folder) for each in arguments))

    assert status == 2
    assert problem in reported
    assert len(reported.splitlines()) == 1
    assert sorted(folder.iterdir()) == before


def test_a_script_takes_the_paths_from_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names are those of the settings, so what `issue` prints is a node's configuration."""
    folder = tmp_path / "made"
    authority = json.loads(_run(capsys, "init", folder, "--cluster", "prod", "--json")[1])
    issued = json.loads(_run(capsys, "issue", folder, "--node", "a", "--json")[1])
    again, listed = (
        json.loads(_run(capsys, "revoke", folder, "node-a", "--json")[1]) for _ in range(2)
    )

    assert authority == {
        "cluster": "prod", "tls_ca": f"{folder}/ca.crt", "key": f"{folder}/ca.key",
    }  # fmt: skip
    assert issued.pop("identity") == "peercache://prod/node/a"
    assert issued == {
        "tls_ca": f"{folder}/ca.crt",
        "tls_cert": f"{folder}/node-a.crt",
        "tls_key": f"{folder}/node-a.key",
    }
    assert [each["identity"] for each in again["revoked"]] == ["peercache://prod/node/a"]
    assert Path(again["tls_crl"]).exists()
    assert listed == {"revoked": [], "tls_crl": again["tls_crl"]}
