"""The certificate files of a process: read, checked, and watched for changes."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs

from peercache.config.settings import DEFAULT_CLUSTER, Config
from peercache.errors import ConfigError, Rejected
from peercache.trust.identity import CertificateRole, Identity, identity_among
from peercache.trust.sharing import Sharing

if TYPE_CHECKING:
    import ssl

    from peercache.trust.certificates import Revocations

FILE_BYTES_MAX = 2**20
"""Longest file that is read; certificates have some kilobytes."""

LOOK_S = 2.0
"""How often the owner of `LiveTls` checks whether files changed: a few system calls."""

NODES_MAX = 16_384
"""Nodes whose certificates are remembered: those of the largest cluster."""

EXPIRY_WARNING_DAYS = 14.0
"""How long before its expiry a certificate causes a warning: two weeks contain a working day."""

EXPIRY_REPEAT_S = 86_400.0

REVOKED_NAME = "revoked.crl"
"""The file next to tls_ca with the revoked certificates, unless tls_crl names another."""


@attrs.frozen(eq=False)
class TlsFiles:
    """The certificates of a process, checked.

    ca_pem, cert_pem, key_pem: in the form for TLS libraries.
    serial:    the number of the own certificate; other peers may revoke it.
    not_after: when the own certificate expires, in seconds since 1970.
    """

    ca_pem: str
    cert_pem: str
    key_pem: str = attrs.field(repr=False)
    identity: Identity
    serial: int
    not_after: float

    @classmethod
    def load(
        cls, config: Config, *, is_node: bool = False, is_operator: bool = False
    ) -> TlsFiles | None:
        """Read and check the files that the settings name; None without TLS.

        Raises ConfigError for a file that is missing, damaged, open to other users, expired, or of
        another authority, key, cluster or role.
        """
        if not config.has_tls:
            return None
        # Imported late, because a process without TLS need not pay for it.
        from peercache.trust import certificates  # noqa: PLC0415

        ca_pem, _ = _read("tls_ca", config.tls_ca)
        cert_pem, _ = _read("tls_cert", config.tls_cert)
        key_pem = read_secret("tls_key", config.tls_key, config)
        authorities = _certificates("tls_ca", config.tls_ca, ca_pem)
        chain = _certificates("tls_cert", config.tls_cert, cert_pem)
        try:
            identity = certificates.identity_of(chain[0])
            certificates.verify_chain(authorities, chain, time.time())
        except Rejected as error:
            raise ConfigError("tls_cert", f"{config.tls_cert}: {error.detail}") from error
        try:
            is_fitting = certificates.fits(chain[0], key_pem)
        except ValueError as error:
            raise ConfigError("tls_key", f"{config.tls_key} {error}") from error
        if not is_fitting:
            problem = f"{config.tls_key} is not the key of {config.tls_cert}"
            raise ConfigError("tls_key", problem)
        wanted = CertificateRole.NODE if is_node else CertificateRole.CLIENT
        wanted = CertificateRole.OPERATOR if is_operator else wanted
        _check_role(config, identity, wanted)
        _check_cluster(config, identity)
        return cls(
            ca_pem=ca_pem,
            cert_pem=cert_pem,
            key_pem=key_pem,
            identity=identity,
            serial=chain[0].serial_number,
            not_after=chain[0].not_valid_after_utc.timestamp(),
        )


@attrs.define(eq=False)
class FoundFiles:
    """The result of `LiveTls.read`.

    marks, list_mark: marks of the files, and of the list of revoked certificates.
    files: None if they have not changed; an error if they are invalid.
    list:  the same for the text of the list.
    """

    marks: tuple[object, ...]
    list_mark: object
    files: TlsFiles | ConfigError | None = None
    list: str | ConfigError | None = None


@final
class LiveTls:
    """The current certificates of a process, and the revoked ones.

    Its owner calls `look` every LOOK_S, or `read` in another thread and then `use`. Invalid new
    files change nothing and are logged.
    """

    def __init__(self, config: Config, files: TlsFiles, *, is_node: bool, log: Any) -> None:
        """Start with `files`; raise ConfigError if the list of revoked certificates is damaged.

        A list of an untrusted authority is logged, and revokes nothing: its certificates are
        refused anyway. Such a list remains when the authority is replaced.
        """
        from peercache.trust.certificates import Revocations  # noqa: PLC0415 - as above

        self._config = config
        self._is_node = is_node
        self._log = log
        self._callbacks: list[Callable[[LiveTls], None]] = []
        self.files = files
        self.revocations: Revocations = Revocations(files.ca_pem)
        self._serials: dict[str, int] = {}
        """By the name of a node: the serial number of its certificate."""
        self.authorities_dropped = 0
        """How often an authority has ceased to be trusted: earlier connections may depend on it,
        and no library reports that."""
        self._problem = ""
        self._list_problem = ""
        self._expiry_logged_at = 0.0
        self._seen = self._marks()
        self._seen_list = mark_of(self.list_path)
        self._is_notified = True
        """Whether each callback has handled the last change."""
        self._is_unkept = False
        if self._seen_list is not None:
            self._use_list(self._text_of_list(), is_start=True)
        elif config.tls_crl:
            raise ConfigError("tls_crl", f"there is no {self.list_path}")
        if self.revocations.revokes(files.serial):
            raise ConfigError(
                "tls_cert",
                f"{config.tls_cert} is revoked: `peercache certs issue` makes a new certificate",
            )

    @classmethod
    def open(cls, config: Config, *, is_node: bool, log: Any) -> LiveTls | None:
        """Read the files that the settings name; None without TLS. Raises ConfigError."""
        files = TlsFiles.load(config, is_node=is_node)
        return None if files is None else cls(config, files, is_node=is_node, log=log)

    @property
    def list_path(self) -> Path:
        """The file with the list of revoked certificates."""
        config = self._config
        return Path(config.tls_crl) if config.tls_crl else Path(config.tls_ca).parent / REVOKED_NAME

    @property
    def days_left(self) -> float:
        """Days until the own certificate expires."""
        return (self.files.not_after - time.time()) / 86_400

    @property
    def own_problem(self) -> str:
        """Why every peer refuses the own certificate now, "" if it is valid."""
        if self.revocations.revokes(self.files.serial):
            return "this node's certificate is revoked"
        if self.days_left <= 0:
            return "this node's certificate has expired"
        return ""

    def on_change(self, callback: Callable[[LiveTls], None]) -> None:
        """Call `callback` after each change of files or revocations, in the thread of `look`."""
        self._callbacks.append(callback)

    def admit(self, common_name: str, alternative_names: Iterable[str]) -> Identity:
        """Return the identity in a certificate that the library has verified, from its names.

        Raises Rejected for a certificate without an identity, of another cluster, or revoked.
        """
        identity = identity_among(alternative_names)
        ours = self.files.identity.cluster
        if identity.cluster != ours:
            problem = f"the certificate is for cluster {identity.cluster!r}, this one is {ours!r}"
            raise Rejected("cluster", problem)
        serial = serial_of(common_name)
        is_revoked = self.revocations.revokes(serial)
        if identity.role is CertificateRole.NODE:
            self._note_serial(identity.name, serial, is_revoked=is_revoked)
        if is_revoked:
            raise Rejected("revoked", f"the certificate of {identity.uri()} is revoked")
        return identity

    def _note_serial(self, node: str, serial: int, *, is_revoked: bool) -> None:
        """Remember the certificate that a node has shown; a valid one replaces a revoked one."""
        known = self._serials.get(node)
        if known is None and len(self._serials) >= NODES_MAX:
            return
        if known is None or not is_revoked:
            self._serials[node] = serial

    def refusal(self, node: str) -> str:
        """Return why the last certificate of a node is refused; "" if it is valid, or not known."""
        serial = self._serials.get(node)
        if serial is None or not self.revocations.revokes(serial):
            return ""
        return (
            "its certificate is revoked, so the others refuse it: stop it, or issue a new "
            "certificate (peercache certs issue) and restart it"
        )

    def look(self) -> bool:
        """Read changed files, and use them; return whether anything has changed."""
        return self.use(self.read())

    def read(self) -> FoundFiles:
        """Read changed files: the part of `look` that blocks if a file system hangs.

        Called in any thread, one at a time. It also writes the list that `take_list` has stored.
        """
        if self._is_unkept and mark_of(self.list_path) == self._seen_list:
            # Otherwise there may be a newer list, which is read first.
            self._keep_list()
        found = FoundFiles(self._marks(), mark_of(self.list_path))
        if found.marks != self._seen or self._problem:
            try:
                found.files = TlsFiles.load(self._config, is_node=self._is_node)
            except ConfigError as error:
                found.files = error
        # New files may trust an authority whose list did not count before.
        is_due = found.files is not None or found.list_mark != self._seen_list
        # A list that could not be read may be read now: a process without descriptors reads none.
        is_due = is_due or bool(self._list_problem)
        if found.list_mark is not None and is_due:
            found.list = self._text_of_list()
        return found

    def use(self, found: FoundFiles) -> bool:
        """Use the result of `read`; return whether anything has changed."""
        self._warn_of_expiry()
        is_changed = self._use_files(found)
        self._seen_list = found.list_mark
        if found.list is not None:
            is_changed = self._use_list(found.list, is_start=False) or is_changed
        if is_changed or not self._is_notified:
            self._notify()
        return is_changed

    def take_list(self, pem: str, *, keeps: bool = True) -> bool:
        """Adopt a list of revoked certificates from a peer; return whether it is newer.

        keeps: whether the next `read` writes it to the file.
        Raises Rejected for one that no trusted authority has signed.
        """
        if not self.revocations.take(pem):
            return False
        self._is_unkept |= keeps
        self._log_revocations()
        self._notify()
        return True

    def _log_revocations(self) -> None:
        self._log.info(
            "tls.revocations_changed",
            revoked=len(self.revocations),
            numbers=self.revocations.numbers,
        )

    def _notify(self) -> None:
        # A callback may fail, for example without descriptors: the next check calls all of them
        # again.
        self._is_notified = False
        for callback in self._callbacks:
            callback(self)
        self._is_notified = True

    def _marks(self) -> tuple[object, ...]:
        config = self._config
        return tuple(map(mark_of, (config.tls_ca, config.tls_cert, config.tls_key)))

    def _use_files(self, found: FoundFiles) -> bool:
        files = found.files
        if files is None:
            return False
        self._seen = found.marks
        if isinstance(files, TlsFiles):
            own, theirs = self.files.identity, files.identity
            if (theirs.role, theirs.name) != (own.role, own.name):
                # Others identify this process by its name; a new name would be another process.
                problem = f"names {theirs.uri()}: a new name requires a restart"
                files = ConfigError("tls_cert", problem)
        if isinstance(files, ConfigError):
            if str(files) != self._problem:
                self._problem = str(files)
                self._log.error("tls.files_rejected", problem=self._problem)
            return False
        is_changed = (files.ca_pem, files.cert_pem) != (self.files.ca_pem, self.files.cert_pem)
        self._problem = ""
        if is_changed:
            self._use(files)
        return is_changed

    def _use(self, files: TlsFiles) -> None:
        from peercache.trust.certificates import (  # noqa: PLC0415 - as above
            Revocations,
            is_any_dropped,
        )

        if files.ca_pem != self.files.ca_pem:
            self.authorities_dropped += is_any_dropped(self.files.ca_pem, files.ca_pem)
            self.revocations = Revocations(files.ca_pem, self.revocations)
        self.files = files
        self._expiry_logged_at = 0.0
        self._log.info("tls.files_changed", identity=files.identity.uri(), days=self.days_left)

    def _text_of_list(self) -> str | ConfigError:
        try:
            return _read("tls_crl", str(self.list_path))[0]
        except ConfigError as error:
            return error

    def _use_list(self, listed: str | ConfigError, *, is_start: bool) -> bool:
        from peercache.trust.certificates import UNKNOWN_AUTHORITY  # noqa: PLC0415 - as above

        try:
            if isinstance(listed, ConfigError):
                raise listed
            is_newer = self.revocations.take(listed)
        except (ConfigError, Rejected) as error:
            problem = error.problem if isinstance(error, ConfigError) else error.detail
            is_foreign = isinstance(error, Rejected) and error.reason == UNKNOWN_AUTHORITY
            if is_start and not is_foreign:
                raise ConfigError("tls_crl", f"{self.list_path}: {problem}") from error
            if problem != self._list_problem:
                self._list_problem = problem
                self._log.error("tls.list_rejected", file=str(self.list_path), problem=problem)
            return False
        self._list_problem = ""
        if is_newer and not is_start:
            self._log_revocations()
        return is_newer

    def _keep_list(self) -> None:
        """Write the list to its file, for the next start; a read-only folder cannot store it."""
        self._is_unkept = False
        part = self.list_path.with_name(f"{self.list_path.name}.{os.getpid()}.part")
        try:
            part.write_text(self.revocations.pem)
            part.replace(self.list_path)
        except OSError as error:
            part.unlink(missing_ok=True)
            self._log.warning("tls.list_not_kept", file=str(self.list_path), error=error.strerror)
        self._seen_list = mark_of(self.list_path)

    def _warn_of_expiry(self) -> None:
        now = time.time()
        left = self.files.not_after - now
        if left < EXPIRY_WARNING_DAYS * 86_400 and now - self._expiry_logged_at > EXPIRY_REPEAT_S:
            self._expiry_logged_at = now
            event = "tls.certificate_expires" if left > 0 else "tls.certificate_expired"
            self._log.warning(event, file=self._config.tls_cert, days=round(left / 86_400, 1))


def with_cluster(config: Config, files: TlsFiles | None) -> Config:
    """Return the settings with the cluster name of the certificate."""
    return config if files is None else attrs.evolve(config, cluster=files.identity.cluster)


def load_own_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Load the own certificate from two files in memory, because `ssl` only reads files."""
    with _in_memory(files.cert_pem) as certificate, _in_memory(files.key_pem) as key:
        context.load_cert_chain(certificate, key)


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Create a file without a name, which no other process can open."""
    descriptor = os.memfd_create("peercache-pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def serial_of(common_name: str) -> int:
    """Return the serial number that a certificate of PeerCache repeats as its common name.

    0, which no certificate has, for other names: nng returns only a peer's names.
    """
    try:
        return int(common_name, 16)
    except ValueError:
        return 0


def common_name_of(serial: int) -> str:
    """Return the common name of the certificate with this serial number."""
    return f"{serial:040x}"


def _check_role(config: Config, identity: Identity, wanted: CertificateRole) -> None:
    # A client may present the certificate of a node.
    also = CertificateRole.NODE if wanted is CertificateRole.CLIENT else wanted
    if identity.role not in (wanted, also):
        one = f"an {wanted.value}" if wanted is CertificateRole.OPERATOR else f"a {wanted.value}"
        problem = (
            f"{config.tls_cert} is for the {identity.role.value} {identity.name!r}, and {one} "
            f"needs {one}'s: `peercache certs issue DIR --{wanted.value} NAME` makes one"
        )
        raise ConfigError("tls_cert", problem)


def _check_cluster(config: Config, identity: Identity) -> None:
    if config.cluster not in (DEFAULT_CLUSTER, identity.cluster):
        problem = f"is {config.cluster!r}, and {config.tls_cert} is for {identity.cluster!r}"
        raise ConfigError("cluster", problem)


def _read(name: str, path: str) -> tuple[str, os.stat_result]:
    """Return a file's text and status; raise ConfigError for one that cannot be read."""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > FILE_BYTES_MAX:
                raise ConfigError(name, f"{path} is no file of at most {FILE_BYTES_MAX} bytes")
            return file.read(FILE_BYTES_MAX).decode("ascii"), status
    except OSError as error:
        raise ConfigError(name, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(name, f"{path} is no PEM") from error


def read_secret(name: str, path: str, config: Config) -> str:
    """Return the text of a file with a secret.

    Raises ConfigError if it cannot be read, or if users that do not share this host's node can also
    read it.
    """
    text, status = _read(name, path)
    sharing = Sharing.of_config(config)
    is_open = status.st_mode & stat.S_IRWXO or (
        status.st_mode & stat.S_IRWXG and not (sharing.has_group and status.st_gid == sharing.gid)
    )
    if is_open:
        mode = stat.S_IMODE(status.st_mode)
        problem = f"{path} has mode {mode:04o}, so other users can read it: "
        problem += f"`chmod 600 {path}`, or set share_group to the group that may"
        raise ConfigError(name, problem)
    return text


def _certificates(name: str, path: str, pem: str) -> list[Any]:
    from peercache.trust.certificates import certificates_in  # noqa: PLC0415 - as above

    try:
        return certificates_in(pem)
    except ValueError as error:
        raise ConfigError(name, f"{path} holds no certificate in PEM, or a damaged one") from error


def mark_of(path: str | Path) -> object:
    """Return a mark that changes with a file's content; None if there is no file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
