"""`dagrl certify`: records golden runs, and prints the certificate of each."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from dagrl.config.file import load_config
from dagrl.errors import ConfigError, RunError
from dagrl.run.certify import Certificate, certify, check, measure, missing_package, record

SHIPPED = Path(__file__).parents[1] / "golden"

VERDICTS = {"equal": "equal bit for bit", "within": "equal within its bound", "differs": "DIFFERS"}


def run_certify(options: argparse.Namespace) -> None:
    """Records or certifies. Raises RunError if a phase of a golden run differs."""
    overrides = [*options.overrides, *(str(word) for word in options.golden if "=" in str(word))]
    golden = [word for word in options.golden if "=" not in str(word)]
    if options.record is not None:
        if len(golden) != 1:
            raise ConfigError(f"--record takes one GOLDEN, the directory to write; found {len(golden)}")
        replays = record(load_config(options.record, overrides), golden[0], options.steps)
        phases = ", ".join(f"{count} {phase}" for phase, count in replays.items())
        sys.stdout.write(f"wrote {golden[0]} ({phases}); after an upgrade: dagrl certify {golden[0]}\n")
        return
    if overrides:
        raise ConfigError(f"{overrides[0]!r}: a golden run is executed as it was recorded; override keys with --record")
    if options.measure and not golden:
        raise ConfigError("--measure takes each GOLDEN whose bounds it sets; found none")
    for directory in golden:
        check(directory)
    if options.measure:
        for directory in golden:
            sys.stdout.write(f"{directory}: {measure(directory)}\n")
        return
    certificates = list(_certificates(golden or sorted(path for path in SHIPPED.iterdir() if path.is_dir()), bool(golden)))
    if options.json is not None:
        options.json.write_text(json.dumps([certificate.json() for certificate in certificates], indent=1) + "\n")
    failed = [certificate.golden for certificate in certificates if not certificate.passed]
    if failed or not certificates:
        raise RunError(f"not certified: {', '.join(failed) or 'no golden run fits the installed packages'}")


def _certificates(golden: list[Path], chosen: bool) -> Iterator[Certificate]:
    """Yields the certificates, each printed. Shipped runs whose packages are not installed are skipped."""
    for directory in golden:
        missing = None if chosen else missing_package(directory)
        if missing is not None:
            sys.stdout.write(f"{directory.name}: skipped, as {missing} is not installed\n")
            continue
        certificate = certify(directory)
        sys.stdout.write(certificate_text(certificate))
        sys.stdout.flush()
        yield certificate


def certificate_text(certificate: Certificate) -> str:
    """Returns a line for each phase, and one for each package whose version differs."""
    lines = [certificate.golden]
    lines += [f"  {name} {old or 'missing'} -> {new or 'missing'}" for name, (old, new) in certificate.changed.items()]
    for report in certificate.phases:
        lines.append(f"  {report.phase:<20} {report.values:>7} values  {VERDICTS[report.verdict]}")
        if report.first:
            largest = f", the largest by {report.largest:.2g} of its bound" if report.largest else ""
            lines.append(f"    {report.unequal} unequal{largest}: {report.first}")
        if report.draws:
            lines.append(f"    {report.draws}")
    return "\n".join([*lines, ""])
