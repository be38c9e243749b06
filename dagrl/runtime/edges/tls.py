"""TLS for links between hosts, by Python's ssl module (OpenSSL). Both sides show a certificate of one authority.

Names in certificates are not compared with hosts, so the hosts of a cluster may share one certificate: the secret of an edge
(`link.py`), which is shown inside the connection, says which process is at the other end.
"""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass
from pathlib import Path

from dagrl.errors import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files on every host: its certificate, the key of that, and the certificates of the authority."""

    certificate: str
    private_key: str
    authority: str

    def __str__(self) -> str:
        return f"certificate {self.certificate}, authority {self.authority}"


@functools.cache
def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns the settings of the listening side. Raises OSError (ssl.SSLError is one) for unusable files."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.num_tickets = 0  # nothing comes from a reader that would make the writer send
    return context


@functools.cache
def client_context(files: TlsFiles) -> ssl.SSLContext:
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: ssl._SSLMethod, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.private_key, password=_no_password)
    context.load_verify_locations(files.authority)
    return context


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ssl.SSLError("the key has a password; expected: none")


def check_tls(files: TlsFiles, key: str) -> None:
    """Raises ConfigError, naming the configuration's `key`, unless two processes with these files accept each other.

    They shake hands in memory, which finds files that do not fit, expired certificates, and those of another authority.
    """
    try:
        for file in (files.certificate, files.private_key, files.authority):
            Path(file).open("rb").close()  # OpenSSL does not say which file it cannot read
        _shake_hands(files)
    except OSError as error:
        where = "" if error.filename is None else f" {error.filename}:"
        raise ConfigError(
            f"{key}:{where} {reason(error)} ({files}). Expected: PEM files of a certificate, of its key without a "
            "password, and of the authority that signed the certificate"
        ) from error


def _shake_hands(files: TlsFiles) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(files).wrap_bio(to_client, to_server)
    server = server_context(files).wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def reason(error: OSError) -> str:
    """Returns why a handshake failed, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return "the other side ended the connection; it may have refused this side's certificate"
    return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")
