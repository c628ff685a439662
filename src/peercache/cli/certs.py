"""`peercache certs`: the authority of a cluster, and the certificates that it issues."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import click
from rich.text import Text

from peercache.cli.options import Callback, DurationType, json_option
from peercache.cli.terminal import console, print_json, table
from peercache.errors import ConfigError, Rejected
from peercache.trust.authority import CA_CERTIFICATE, CA_KEY, Authority
from peercache.trust.certificates import CertificateFacts, certificates_in, facts_of, lists_in
from peercache.trust.files import REVOKED_NAME, common_name_of
from peercache.trust.identity import CertificateRole, Identity

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
DAYS_MAX = 36_500
DAY_S = 86_400.0

FILE_BYTES_MAX = 2**20

_folder = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))


def _days_option(default: int) -> Callable[[Callback], Callback]:
    def add(command: Callback) -> Callback:
        days = click.option(
            "--days", type=click.IntRange(1, DAYS_MAX), metavar="N", help="The same in days."
        )
        return click.option(
            "--for",
            "lifetime_s",
            type=DurationType(DAY_S, DAYS_MAX * DAY_S),
            default=default * DAY_S,
            show_default=f"{default}d",
            metavar="DURATION",
            help="Time until it expires.",
        )(days(command))

    return add


def _lifetime(days: int | None, lifetime_s: float) -> dt.timedelta:
    return dt.timedelta(seconds=lifetime_s) if days is None else dt.timedelta(days=days)


@click.group(no_args_is_help=False)
def certs() -> None:
    """Make the certificates of a cluster."""


@certs.command("init")
@_folder
@click.option("--cluster", required=True, metavar="NAME", help="Name of the cluster.")
@_days_option(AUTHORITY_DAYS)
@json_option
def init_command(
    folder: Path, cluster: str, days: int | None, lifetime_s: float, *, as_json: bool
) -> None:
    """Make the authority of a cluster: ca.crt and ca.key in DIR."""
    try:
        Authority.create(folder, cluster, _lifetime(days, lifetime_s))
    except Rejected as error:
        raise ConfigError("cluster", error.detail) from error
    if as_json:
        made = {"tls_ca": str(folder / CA_CERTIFICATE), "key": str(folder / CA_KEY)}
        print_json({"cluster": cluster, **made})
        return
    print(f"Made {folder / CA_CERTIFICATE}: every node and client needs it as tls_ca.")
    print(f"Made {folder / CA_KEY}: keep it here, and secret. It signs every certificate.")
    print(f"Next: peercache certs issue {folder} --node NAME")


@certs.command("issue")
@_folder
@click.option("--node", metavar="NAME", help="Issue a node's certificate.")
@click.option("--client", metavar="NAME", help="Issue a client's certificate: an engine's.")
@click.option("--operator", metavar="NAME", help="Issue an operator's certificate: a person's.")
@click.option(
    "--host",
    "hosts",
    metavar="HOST",
    multiple=True,
    help="Host name or IP of a node, for browsers and scrapers; may be repeated.",
)
@click.option(
    "--namespace",
    "namespaces",
    metavar="NAME",
    multiple=True,
    help="Namespace that the owner may use; may be repeated. Default: all.",
)
@click.option("--renew", is_flag=True, help="Keep the key, and replace the certificate.")
@_days_option(CERTIFICATE_DAYS)
@json_option
def issue_command(
    folder: Path,
    node: str | None,
    client: str | None,
    operator: str | None,
    hosts: tuple[str, ...],
    namespaces: tuple[str, ...],
    *,
    renew: bool,
    days: int | None,
    lifetime_s: float,
    as_json: bool,
) -> None:
    """Issue a certificate: ROLE-NAME.crt and ROLE-NAME.key in DIR."""
    wanted = {
        CertificateRole.NODE: node,
        CertificateRole.CLIENT: client,
        CertificateRole.OPERATOR: operator,
    }
    named = [(role, name) for role, name in wanted.items() if name is not None]
    if len(named) != 1:
        raise click.UsageError("Name one of --node, --client and --operator.")
    (role, name) = named[0]
    if hosts and role is not CertificateRole.NODE:
        raise click.UsageError("--host is for a node: nothing connects to a client.")
    authority = Authority.open(folder)
    try:
        identity = Identity(authority.cluster, role, name, namespaces)
    except Rejected as error:
        raise ConfigError(role.value, error.detail) from error
    path = authority.issue(
        identity, hosts=hosts, lifetime=_lifetime(days, lifetime_s), is_renewal=renew
    )
    if as_json:
        ca, key = folder / CA_CERTIFICATE, path.with_suffix(".key")
        made = {"tls_ca": str(ca), "tls_cert": str(path), "tls_key": str(key)}
        print_json({"identity": identity.uri(), **made})
        return
    print(f"Made {path} for {identity.uri()}")
    print(f"Settings: tls_ca = {folder / CA_CERTIFICATE}, tls_cert = {path},")
    print(f"          tls_key = {path.with_suffix('.key')}")


@certs.command("revoke")
@_folder
@click.argument("what", metavar="FILE|NAME")
@json_option
def revoke_command(folder: Path, what: str, *, as_json: bool) -> None:
    """Refuse a certificate from now on. NAME is that of its files, without .crt: node-a."""
    try:
        revoked = Authority.open(folder).revoke(what)
    except Rejected as error:
        raise ConfigError("certs", error.detail) from error
    if as_json:
        listed = [{"identity": each.uri, "serial": common_name_of(each.serial)} for each in revoked]
        print_json({"revoked": listed, "tls_crl": str(folder / REVOKED_NAME)})
        return
    for each in revoked:
        print(f"Revoked {each.uri or 'a certificate'}, serial {common_name_of(each.serial)}")
    if not revoked:
        print(f"Nothing new: {what} is on the list already.")
    print(
        f"Copy {folder / REVOKED_NAME} next to the tls_ca of one running node: all others follow."
    )


@certs.command("show")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def show_command(file: Path, *, as_json: bool) -> None:
    """Say what a certificate, or a list of revoked ones, holds."""
    try:
        text = file.read_bytes()[:FILE_BYTES_MAX].decode("ascii")
    except OSError as error:
        raise ConfigError("certs", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("certs", f"{file} is not a PEM file") from error
    if "PRIVATE KEY" in text:
        raise ConfigError("certs", f"{file} holds a private key: show the .crt next to it")
    shown = _list_facts(file, text) if "X509 CRL" in text else _facts(file, text)
    if as_json:
        print_json(shown[0] if len(shown) == 1 else {"certificates": shown})
        return
    for each in shown:
        rows = table("", "")
        rows.show_header = False
        for name, value in each.items():
            written = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.add_row(Text(name.replace("_", " "), "bold"), Text(written))
        console().print(rows)


def _facts(file: Path, text: str) -> list[dict[str, object]]:
    try:
        return [_shown(facts_of(each)) for each in certificates_in(text)]
    except ValueError as error:
        raise ConfigError("certs", f"{file} holds no certificate in PEM") from error
    except Rejected as error:
        raise ConfigError("certs", f"{file}: {error.detail}") from error


def _shown(facts: CertificateFacts) -> dict[str, object]:
    identity = facts.identity
    owner: dict[str, object] = {}
    if identity is not None:
        owner = {
            "identity": identity.uri(),
            "cluster": identity.cluster,
            "role": identity.role.value,
            "name": identity.name,
            "namespaces": list(identity.namespaces) or "all",
        }
    return {
        "kind": "authority" if facts.is_authority else "certificate",
        **owner,
        "hosts": list(facts.names),
        "valid_from": _written(facts.not_before),
        "valid_until": _written(facts.not_after),
        "days_left": round(facts.days_left, 1),
        "serial": common_name_of(facts.serial),
        "issuer": facts.issuer,
    }


def _list_facts(file: Path, text: str) -> list[dict[str, object]]:
    try:
        lists = lists_in(text)
    except Rejected as error:
        raise ConfigError("certs", f"{file}: {error.detail}") from error
    return [
        {
            "kind": "list of revoked certificates",
            "issuer": each.issuer,
            "number": each.number,
            "made": _written(each.made_at),
            "revoked": sorted(map(common_name_of, each.serials)),
        }
        for each in lists
    ]


def _written(at: float) -> str:
    return f"{dt.datetime.fromtimestamp(at, dt.timezone.utc):%Y-%m-%d %H:%M} UTC"
