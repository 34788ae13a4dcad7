# grpcio has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Authentication between nodes: a shared token, and TLS certificates if the settings name some.

On one node a unix socket in a private directory says who may come in. Over TCP anybody can
knock, so every call shows the token, and with TLS both sides show a certificate.
"""

import hmac
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from triptych.core.config import NetworkConfig
from triptych.core.errors import AccessRefused, ConfigError, PoolUnavailable

TOKEN_KEY = "triptych-token"
MIN_TOKEN_CHARS = 16

NO_TOKEN, WRONG_TOKEN = "no token was shown", "a wrong token was shown"

Metadata = tuple[tuple[str, str | bytes], ...]
Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Tls:
    """Contents of PEM files: the certificate of this process, and the authority that it trusts."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    certificate_file: str
    key_file: str
    """The files again: Python's TLS reads them itself."""
    server_name: str = ""
    """Name that a server's certificate must be made out for; empty: its address."""


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials that a process presents to other nodes, and requires of them."""

    token: str = field(repr=False)
    tls: Tls | None = None

    @classmethod
    def of(cls, config: NetworkConfig, token: str) -> "Access":
        """Read the files that the settings name; ``token`` is used if there is no file for it.

        Raises: ConfigError naming the setting and the file
        """
        if config.token_file:
            token = _read_token(config.token_file)
        if not config.tls_cert_file:
            return cls(token)
        _check_pair(config)
        tls = Tls(
            _read("tls_cert_file", config.tls_cert_file),
            _read("tls_key_file", config.tls_key_file),
            _read("tls_ca_file", config.tls_ca_file),
            config.tls_cert_file,
            config.tls_key_file,
            config.tls_server_name,
        )
        return cls(token, tls)

    # ---------------------------------------------------------------- showing

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call."""
        return ((TOKEN_KEY, self.token),)

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a client's channel; None without TLS."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            self.tls.authorities, self.tls.key, self.tls.certificate
        )

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """For a client's socket; None without TLS."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def server_name(self) -> str:
        """Name that a server's certificate must be made out for; empty: its address."""
        return self.tls.server_name if self.tls else ""

    @property
    def channel_options(self) -> Options:
        """Options of a client's channel beside them."""
        if self.tls is None or not self.tls.server_name:
            return ()
        return (("grpc.ssl_target_name_override", self.tls.server_name),)

    # ---------------------------------------------------------------- asking

    @property
    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a server's port; None without TLS. Clients must show a certificate, too."""
        if self.tls is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)], self.tls.authorities, require_client_auth=True
        )

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """For a server's sockets; None without TLS."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.tls.authorities.decode("ascii"))
        context.load_cert_chain(self.tls.certificate_file, self.tls.key_file, password="")
        return context

    def refusal(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Why a call with this metadata is not answered; "" if it is.

        The time that it takes says nothing about how much of a token was right.
        """
        shown = [value for key, value in metadata if key == TOKEN_KEY]
        if not shown:
            return NO_TOKEN
        (token, *more) = [s if isinstance(s, bytes) else s.encode() for s in shown]
        is_right = hmac.compare_digest(token, self.token.encode()) and not more
        return "" if is_right else WRONG_TOKEN


def failure(address: str, code: grpc.StatusCode, details: str | None) -> PoolUnavailable:
    """The error for a call that a peer did not answer."""
    told = details or code.name
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AccessRefused(address, told)
    if any(word in told.lower() for word in ("handshake", "certificate", "verification check")):
        return AccessRefused(address, f"the certificates do not fit: {told}")
    return PoolUnavailable(f"{address} does not answer: {told}")


def _read_token(path: str) -> str:
    token = _read("token_file", path).decode("ascii", "replace").strip()
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"network.token_file={path!r}: expected at least {MIN_TOKEN_CHARS} printable ASCII "
            "characters: make one with `openssl rand -hex 32`"
        )
    return token


def _read(name: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"network.{name}={path!r}: {error.strerror}: expected a file that this user can read, "
            "at this path on every node"
        ) from error
    return content


def _check_pair(config: NetworkConfig) -> None:
    """Check that the files are certificates and keys; gRPC's own errors say less."""
    for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
        path = str(getattr(config, name))
        if b"-----BEGIN " not in _read(name, path):
            raise ConfigError(f"network.{name}={path!r}: expected a file in PEM form")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.tls_ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"network.tls_ca_file={config.tls_ca_file!r}: {error}") from error
    try:  # the password is there so that nobody is asked for one
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"network.tls_key_file={config.tls_key_file!r}: expected the unencrypted key of "
            f"tls_cert_file={config.tls_cert_file!r}: {error}"
        ) from error
