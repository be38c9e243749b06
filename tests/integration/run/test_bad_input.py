"""Wrong paths are errors before the slow imports, and children of a process that handles signals ignore them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  # its logger keeps the standard error of its import, which a test would close
import yaml

from dagrl.run.stop import stop_on_signals
from tests.unit.run.test_bad_input import configuration, good_lines


@pytest.mark.parametrize("missing", ["data", "model"])
def test_a_wrong_path_is_reported_before_the_slow_imports(missing: str, tmp_path: Path) -> None:
    path, data = tmp_path / "config.yaml", tmp_path / "data.jsonl"
    data.write_text("\n".join(good_lines()))
    path.write_text(yaml.safe_dump(configuration("none.jsonl" if missing == "data" else str(data))))
    wrong = [] if missing == "data" else ["policy.random_init=null", f"policy.model_name={tmp_path / 'none'}"]
    program = f"""
import logging, sys
from dagrl.cli.main import main
assert main(["train", {str(path)!r}, "output_dir={tmp_path}", "--dry-run", *{wrong!r}]) == 2
print(*{{"torch", "transformers"}} & sys.modules.keys()); logging.getLogger("dagrl").warning("whole lines " * 20)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [] and "none" in found.stderr and "whole lines " * 20 in found.stderr, found


def test_a_forked_child_ignores_the_signal() -> None:
    """Ctrl-C signals all processes in the foreground; a child must not print a traceback."""
    with stop_on_signals() as stop, stop.at_once():
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGINT)
                os._exit(stop.requested)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
