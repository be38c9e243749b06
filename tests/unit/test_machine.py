"""Which GPUs a process may use."""

import pytest

from dagrl.machine import visible, visible_gpus

TABLE = "".join(f"GPU-{letter * 4}, NVIDIA H200, 143771, 580.1, 9.0\n" for letter in "abcd")


@pytest.mark.parametrize(
    ("variable", "letters"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2,0", "ca"),
        ("1,-1,2", "b"),
        ("0,9,1", "a"),
        (" 3 ", "d"),
        ("GPU-cc,1", "cb"),
    ],
)
def test_visible_devices_as_cuda_reads_them(variable: str | None, letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.uuid for gpu in visible(TABLE)] == [f"GPU-{letter * 4}" for letter in letters]
    assert len(visible_gpus("0123")) == len(letters)
