"""Certificates for tests of encrypted edges."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dagrl.runtime.edges.tls import TlsFiles


def make_certificates(directory: Path) -> TlsFiles:
    """Makes an authority and a certificate of it with `openssl`, valid for a day."""
    certificate, key, authority = (str(directory / f"{name}.pem") for name in ("certificate", "key", "authority"))
    own = str(directory / "authority-key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    for command in (
        [*make, "-subj", "/CN=authority", "-keyout", own, "-out", authority],
        [*make, "-subj", "/CN=host", "-CA", authority, "-CAkey", own, "-keyout", key, "-out", certificate],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return TlsFiles(certificate, key, authority)
