"""`dagrl inspect` reports and draws what a run would compile, without starting anything."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dagrl.cli.inspect import inspect_config, phase_reports, plan_config_refit
from dagrl.cli.main import main
from dagrl.cli.text import text_report
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.data.chat import chat_of
from dagrl.errors import ConfigError, LayoutError
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.vllm import VllmWorker
from tests.unit.data.published import KINDS, Kind, tokenizer_of
from tests.unit.refit.weight_reference import VllmRank, vllm_weight_slices

ROOT = Path(__file__).parents[3]
GRPO, SFT = "examples/grpo_quickstart.yaml", "examples/sft_quickstart.yaml"
GENERATION_DP2_TP2 = ["policy.generation.vllm_cfg.data_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
PARAMETERS = 2 * 16 * 64 + 64 + 2 * (64 * (2 * 4 + 2 * 2) * 32 + 2 * 32 + 3 * 256 * 64 + 2 * 64)
"""The quickstart's Qwen3: embedding, head, final norm; per layer q, o, k, v, their norms, gate, up, down, norms."""


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describes engines by the reference; tests/integration/vllm_loads.py has vLLM's own description."""

    def describe(config: Config, hf_config: Any, layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        return vllm_weight_slices(dict(hf_config), VllmRank(layout.tp, layout.coordinates(rank).tp))

    monkeypatch.setattr(VllmWorker, "describe", staticmethod(describe))


def test_the_report_is_mermaid_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GRPO]) == 0
    comments, _, chart = capsys.readouterr().out.partition("flowchart LR\n")
    assert all(line.startswith("%% ") for line in comments.splitlines())
    names = ["demonstration_step", "evaluate", "train_step", "logprobs", "reference_logprobs", "generate", "refit"]
    assert [line.split()[2].rstrip(":") for line in comments.splitlines() if line.startswith("%% phase")] == names
    assert all(f'subgraph p{index}["{name}' in chart for index, name in enumerate(names))
    assert "buckets of a shard (sequences x tokens): 64 x 16" in comments
    assert "refit of 0.600 MB from 2 to 1 ranks" in comments


@pytest.mark.parametrize("given", [True, False])
def test_inspect_logs_the_lengths_that_it_assumes(given: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [line for line in Path(SFT).read_text().splitlines() if given or "max_total_sequence_length: " not in line]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    assert main(["inspect", str(tmp_path / "run.yaml")]) == 0
    assert ("buckets are shown with 2048 tokens; a run derives it from its data" in caplog.text) == (not given)


def test_a_single_phase_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GRPO, "--phase", "train_step"]) == 0
    text, _, chart = capsys.readouterr().out.partition("flowchart LR\n")
    assert "phase train_step: one of 2 equal graphs (dagrl.graphs.phases:train_step)" in text
    assert "1 MiB for a result" in text and "refit" not in text
    assert len(re.findall(r"p0_n\d+\[", chart)) == 2


def test_sft_has_no_generation_and_no_refit() -> None:
    found = [(report.name, set(report.drawing.graph.widths)) for report in phase_reports(load_config(SFT))]
    assert found == [("demonstration_step", {"train"}), ("evaluate", {"train"})]


def test_layouts_larger_than_any_machine_are_drawn() -> None:
    sizes = ["data_parallel_size=8", "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"]
    config = load_config(GRPO, [f"policy.megatron_cfg.{size}" for size in sizes] + GENERATION_DP2_TP2)
    report = next(report for report in phase_reports(config) if report.name == "refit")
    assert report.drawing.graph.widths == {"train": 16, "generation": 2}
    assert "one of 2 equal graphs" in report.text
    assert "from 32 to 4 ranks" in inspect_config(config, "refit")


@pytest.mark.parametrize(("precision", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_refit_plan_sends_each_parameter_to_each_replica_once(precision: str, item: int) -> None:
    plan = plan_config_refit(load_config(GRPO, [f"policy.precision={precision}"]))
    assert plan.summary().received == (PARAMETERS * item,)
    halves = plan_config_refit(load_config(GRPO, [f"policy.precision={precision}", *GENERATION_DP2_TP2]))
    norms = (2 * (2 * 64 + 2 * 32) + 64) * item  # on every rank
    padded = 2 * 16 * 64 * item  # 64 rows of padded vocabulary; the first rank has all real ones
    half = (PARAMETERS * item - norms - padded) // 2 + norms
    assert halves.summary().received == (half + padded, half, half + padded, half)


def test_the_refit_plan_over_hosts_and_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.cli.inspect.GPUS_PER_HOST", 4)
    config = load_config(GRPO, GENERATION_DP2_TP2)
    text = inspect_config(config, "refit")
    assert "GB/s in a host and 50 GB/s between hosts" in text and "2 hosts: " in text
    plan = plan_config_refit(config)
    assert plan is not None and plan.hosts == (0, 0, 1, 1, 1, 1)
    assert plan.summary().crossing < 1.01 * sum(plan.summary().received[:2])  # once for two replicas on one host


def test_data_parallel_ranks_of_fsdp_hold_different_shards() -> None:
    fsdp = ["policy.backend=fsdp", "policy.megatron_cfg.data_parallel_size=1", "policy.fsdp_cfg.data_parallel_size=2"]
    plan = plan_config_refit(load_config(GRPO, fsdp))
    assert plan is not None and plan.size == 3
    first, second = plan.summary().sent[:2]
    assert first + second == plan.summary().received[0] and min(first, second) > 0


class Undescribed(MegatronWorker):
    """A worker class without the optional `describe`."""

    describe = None  # type: ignore[assignment]


def test_workers_without_describe_have_no_plan() -> None:
    config = load_config(GRPO, [f"policy.worker={__name__}:Undescribed"])
    assert plan_config_refit(config) is None
    assert "no refit plan: a worker class has no static describe" in inspect_config(config, "refit")


def test_inspect_rejects_bad_settings() -> None:
    with pytest.raises(ConfigError, match="--phase evalute: algorithm 'sft' replays demonstration_step, evaluate; did you"):
        inspect_config(load_config(SFT), "evalute")
    for keys, error, says in (
        ("random_init=null", ConfigError, r"policy\.model_name and policy\.random_init: found neither"),
        ("megatron_cfg.tensor_model_parallel_size=3", LayoutError, r"train workers: layout .*3 does not fit the model"),
        ("megatron_cfg.virtual_pipeline_model_parallel_size=2", LayoutError, r"\.megatron_cfg: vpp is 2 but pp is 1"),
    ):
        with pytest.raises(error, match=says):
            inspect_config(load_config(SFT, [f"policy.{keys}"]))


TURNS = [("system", "be brief"), ("user", "7 + 5?\nsay it"), ("assistant", "12"), ("user", "1?"), ("assistant", "n\u00e9")]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<{{ m.content }}>{{ eos_token }}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ENDS = " ends with 2 <eos>."
SFT_TEXT = """
SFT: chats.jsonl, line 1, 77 tokens, 10 in the loss
template  [│s│y│s│t│e│m│]
data      b│e│ │b│r│i│e│f
template  [│u│s│e│r│]
data      7│ │+│ │5│?│↵│s│a│y│ │i│t
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     1│2
TRAIN+    >
STOP      <eos>
template  ↵│[│u│s│e│r│]
data      1│?
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     n│<unk>
TRAIN+    >
STOP      <eos>
template  ↵

SFT: chats.jsonl, line 2, 24 tokens, 4 in the loss
template  [│u│s│e│r│]
data      9│?
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     9
TRAIN+    >
STOP      <eos>
template  ↵
"""
PROMPTS = """
prompt: chats.jsonl, line 2, 19 tokens, reference 9
template  [│u│s│e│r│]
data      9│?
template  [│a│s│s│i│s│t│a│n│t│]
SAMPLE    ...
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes the data; returns the file and overrides of a run on them, in their order."""
    monkeypatch.chdir(tmp_path)
    chat = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
    rows = [chat, {"prompt": "9?", "response": "9"}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = f"policy.tokenizer.chat_template={json.dumps(TEMPLATE)}"
    data = "data={path: chats.jsonl, val_fraction: 0, shuffle: false}"
    return [str(ROOT / "examples" / "sft_quickstart.yaml"), data, template, "policy.max_total_sequence_length=100"]


def lines(text: str) -> str:
    """Returns a report without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def report_of(config: list[str], *turns: str, **keys: str) -> str:
    """Returns the lines of a report on one conversation, or on the file as it is."""
    if turns:
        said = zip(("user", "assistant"), turns, strict=True)
        row = {"messages": [{"role": role, "content": text} for role, text in said]}
        Path("chats.jsonl").write_text(json.dumps(row))
    words = [*config[1:], *(f"{key}={value}" for key, value in keys.items())]
    return lines(text_report(load_config(config[0], words), 2, Console(file=io.StringIO(), width=80)))


def test_kinds_of_tokens_are_told_apart(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *config, "--text"]) == 0
    plain = capsys.readouterr().out
    assert lines(plain).partition("A completion")[2] == f"{ENDS}\n{SFT_TEXT}".rstrip()
    coloured = text_report(load_config(config[0], config[1:]), 2, Console(force_terminal=True, file=io.StringIO(), width=80))
    assert coloured.count("\x1b[1;31m<eos>") == 3  # STOP is red
    assert lines(re.sub(r"\x1b\[[0-9;]*m", "", coloured)) == lines(plain)


def test_prompts_are_shown_with_what_follows(config: list[str]) -> None:
    text = report_of(config, **{"algorithm": "grpo", "policy.generation.max_new_tokens": "4", "sft.max_num_steps": "0"})
    assert text.endswith(PROMPTS.rstrip())
    assert "reference n\u00e9" in text and "SFT" not in text


def test_white_space_is_the_datas_unless_the_template_cuts_it(config: list[str]) -> None:
    cuts = TEMPLATE.replace("m.content }}>", "m.content | trim }} >")
    for template, trained in (
        (TEMPLATE, ["TRAIN+    <", "TRAIN      │1│2│↵", "TRAIN+    >"]),
        (cuts, ["TRAIN+    <", "TRAIN     1│2", "TRAIN+     │>"]),
    ):
        text = report_of(config, " 7? ", " 12\n", **{"policy.tokenizer.chat_template": json.dumps(template)})
        assert "data       │7│?│\n" in text and "\n".join(trained) in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_texts_of_tokens_join_to_the_whole(kind: Kind) -> None:
    """With byte-level tokens, of which several make a character, SentencePiece's spaces, and added tokens."""
    tokenizer = tokenizer_of(kind)
    for text in ("a \u65e5\u672c b", "\U0001f600", "n\u00e9\n\n \u00e9", "   x", "hello and it"):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False).input_ids
        texts = chat_of(tokenizer).encoder.pieces(ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids) and "\ufffd" not in "".join(texts)


def test_words_that_the_template_also_writes_are_told_apart(config: list[str]) -> None:
    prompt = "template  [│u│s│e│r│]\ndata      u│s│e│r\ntemplate  [│a│s│s│i│s│t│a│n│t│]\n"
    answer = "TRAIN+    <\nTRAIN     a│s│s│i│s│t│a│n│t│>\nTRAIN+    >\n"
    assert f"{prompt}{answer}" in report_of(config, "user", "assistant>")


def test_many_equal_tokens_are_one_with_their_number(config: list[str]) -> None:
    text = report_of(config, "0" * 300 + "1" * 7, "a", **{"policy.max_total_sequence_length": "512"})
    assert "\ndata      0 \u00d7 300│1│1│1│1│1│1│1\n" in text
