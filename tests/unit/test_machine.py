"""Which GPUs a process may use."""

import pytest

from dagrl.machine import device_index, visible, visible_gpus

TABLE = "".join(f"GPU-{letter * 4}, NVIDIA H200, 143771, 580.1, 9.0\n" for letter in "abcd")


GIVEN = [(None, "abcd"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("2,0", "ca"), ("1,-1,2", "b"), ("0,9,1", "a")]


@pytest.mark.parametrize(("variable", "letters"), [*GIVEN, (" 3 ", "d"), ("GPU-cc,1", "cb")])
def test_visible_devices_as_cuda_reads_them(variable: str | None, letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.uuid for gpu in visible(TABLE)] == [f"GPU-{letter * 4}" for letter in letters]
    assert len(visible_gpus("0123")) == len(letters)


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [([], None, None), (["5"], None, 5), (["5"], "4,5", 1), (["0"], "", 0), (["GPU-b"], "GPU-a,GPU-b", 1)],
)
def test_index_of_the_assigned_gpu(assigned: list[str], visible: str | None, index: int | None) -> None:
    assert device_index(assigned, visible) == index
