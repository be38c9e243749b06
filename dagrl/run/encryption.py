"""Encryption of the edges between hosts, as `cluster.tls` configures it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dagrl.config import ClusterConfig, Config
from dagrl.errors import ConfigError
from dagrl.runtime.edges.tls import TlsFiles, check_tls

logger = logging.getLogger(__name__)

RAY_TLS = "RAY_USE_TLS"
"""1: Ray encrypts its connections, with the files that `RAY_TLS_SERVER_CERT`, `_KEY` and `RAY_TLS_CA_CERT` name."""


def tls_files(config: ClusterConfig) -> TlsFiles | None:
    """Returns the files with which edges between hosts are encrypted; workers run in other directories."""
    tls = config.tls
    if tls is None:
        return None
    return TlsFiles(*(str(Path(file).absolute()) for file in (tls.certificate, tls.private_key, tls.authority)))


def check_encryption(config: Config) -> None:
    """Raises ConfigError if `cluster.tls` cannot encrypt edges with its files, or not with this engine."""
    files, engine = tls_files(config.cluster), config.executor_cfg.engine
    if files is None:
        return
    if config.executor != "compiled" or engine != "dagrl":
        sends = f"executor_cfg.engine={engine}" if config.executor == "compiled" else f"executor={config.executor}"
        raise ConfigError(
            f"cluster.tls encrypts the edges of executor=compiled with executor_cfg.engine=dagrl; {sends} sends through "
            f"Ray. Change it, or leave cluster.tls out and encrypt Ray's connections ({RAY_TLS}=1)"
        )
    check_tls(files, "cluster.tls")
    mode = os.stat(files.private_key).st_mode
    if mode & 0o077:
        raise ConfigError(
            f"cluster.tls.private_key: {files.private_key} has mode {mode & 0o777:o}, so other users may read the key; "
            "expected: 600 or 400 (chmod 600)"
        )
    if config.cluster.address and os.environ.get(RAY_TLS) != "1":
        logger.warning("cluster.tls does not cover Ray's own connections; for them set %s=1 (docs/security.md)", RAY_TLS)
