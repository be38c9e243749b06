"""Becomes a Ray worker. Ray's own program for this imports all of Ray first, and then the worker does so again.

    python worker_setup.py .../default_worker.py --serialized-runtime-env-context=JSON --language=PYTHON ARGUMENTS

Becomes Ray's program if the runtime environment asks for more than variables. It imports little, to start in milliseconds.
"""

import importlib.util
import json
import os
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
PLAIN: dict[str, object] = {
    "command_prefix": [],
    "override_worker_entrypoint": None,
    "java_jars": [],
    "py_executable": sys.executable,
}


def main() -> None:
    """Becomes the worker."""
    words = sys.argv[1:]
    context = json.loads(next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "") or "{}")
    variables = context.pop("env_vars", None) or {}
    plain = all(value in (None, PLAIN.get(key)) for key, value in context.items())
    if plain and f"{LANGUAGE}PYTHON" in words and "$" not in "".join(variables.values()):
        arguments = [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **variables})  # noqa: S606
    spec = importlib.util.find_spec("ray")  # without importing it
    assert spec is not None and spec.origin is not None
    rays = os.path.join(os.path.dirname(spec.origin), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, rays, *words])  # noqa: S606


if __name__ == "__main__":
    main()
