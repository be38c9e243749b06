"""Each recipe passes preflight on a simulated machine of its size; what the one without pretrained weights makes of data."""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from dagrl.bench.models import SHAPES
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.machine import Gpu
from dagrl.rl.rewards import RewardRunner, rewards_of
from dagrl.run import derive
from dagrl.run.model import character_tokenizer, write_random_model
from dagrl.run.preflight import Inputs, preflight
from dagrl.workers.megatron.weights import parameter_shapes
from recipes.from_scratch import gsm8k
from recipes.from_scratch.gsm8k import write_rows
from recipes.gemma3_270m.sampled import pairs
from recipes.gemma3_270m.tasks import HELD_OUT, prepare

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")
pytest.importorskip("math_verify")

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
Models = Callable[[str], Path]
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Directories with the published shapes, by name: the weights are a hole in a sparse file."""
    directory = tmp_path_factory.mktemp("shapes")
    return cache(lambda name: write_hollow_model(directory / name, name, CHARACTERS, TEMPLATE))


def check(recipe: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """Checks the recipe with local files in place of those on the Hub."""
    path = RECIPES / f"{recipe}.yaml"
    content = yaml.safe_load(path.read_text())
    named = {"policy.model_name": content["policy"]["model_name"]}
    named |= {f"models.{role}.model_name": model["model_name"] for role, model in content.get("models", {}).items()}
    shapes = {key: name.removeprefix("Qwen/").removesuffix("-Base").lower() for key, name in named.items()}
    count, gib = needs(path.read_text())
    cards = [Gpu(f"GPU-{index}", "a GPU", gib << 10, "580", (9, 0)) for index in range(count)]
    monkeypatch.setattr(derive, "gpus", lambda: cards)
    monkeypatch.setattr("dagrl.run.cluster.gpu_count", lambda: count)
    data = tmp_path / "train.jsonl"
    columns = {content["data"]["prompt_key"]: "How many clips? " * 8, content["data"]["response_key"]: "24 + 48\n#### 72"}
    data.write_text((json.dumps(columns) + "\n") * 400)
    local = [f"data.path={data}", "data.subset=null", "data.val_split=null", f"output_dir={tmp_path}"]
    monkeypatch.chdir(ROOT)
    return preflight(load_config(path, [*(f"{key}={models(shape)}" for key, shape in shapes.items()), *local]))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of Gemma 3 270M, and one question of GSM8K as recipes/gemma3_270m/tasks.py prepares it."""
    directory = tmp_path_factory.mktemp("gemma3")
    sizes = {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "head_dim": 256,
    }
    sizes |= {"num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512, "max_position_embeddings": 32768}
    config = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True, **sizes}
    write_hollow_checkpoint(directory / "model", config, CHARACTERS)
    problem = {"question": "48 clips, and half of them?", "answer": "48+24 = <<48+24=72>>72\n72/2 = <<72/2=36>>36\n#### 36"}
    for name, count in (("train", HELD_OUT + 64), ("test", 64)):
        (directory / f"{name}.jsonl").write_text((json.dumps(problem) + "\n") * count)
    prepare(directory, directory / "data")
    completions = [{"text": f" {answer}", "reward": float(answer == "36")} for answer in ("35", "36")]
    sampled = [{"prompt": "48/2=", "completions": completions}] * 64
    write_rows(directory / "data" / "pairs.jsonl", pairs(sampled))
    return directory


@pytest.mark.parametrize(
    "recipe",
    [
        "sft",
        "stories",
        "gsm8k",
        "dpo",
        "ppo",
        "tool",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("distill", "agent")),
    ],
)
def test_recipes_of_gemma3_pass_all_checks(recipe: str, gemma3: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(derive, "gpus", lambda: [Gpu("GPU-0", "a GPU", 24 << 10, "580", (9, 0))])
    monkeypatch.setattr("dagrl.run.cluster.gpu_count", lambda: 1)
    monkeypatch.chdir(ROOT)
    text = (RECIPES / "gemma3_270m" / f"{recipe}.yaml").read_text().replace("runs/gemma3_270m_data", str(gemma3 / "data"))
    assert f"dagrl train recipes/gemma3_270m/{recipe}.yaml" in text and "one GPU of 24 GB or more" in text
    assert "\n# Seen: " in text
    (tmp_path / "recipe.yaml").write_text(text)
    more = {"distill": [f"models.teacher.model_name={gemma3 / 'model'}"], "ppo": ["critic.model_name=null"]}
    own = [f"policy.model_name={gemma3 / 'model'}", f"output_dir={tmp_path}", *more.get(recipe, [])]
    inputs = preflight(load_config(tmp_path / "recipe.yaml", own))
    policy = inputs.config.policy
    assert (policy.backend, policy.precision, policy.sequence_packing.enabled) == ("fsdp", "bfloat16", True)
    if recipe not in ("sft", "dpo"):
        assert policy.generation is not None and policy.generation.colocated.enabled
    if recipe in ("stories", "gsm8k"):
        assert len(inputs.evaluation_prompts) == 64 and inputs.config.loss_fn.force_on_policy_ratio


def needs(text: str) -> tuple[int, int]:
    """The GPUs that the recipe's comment asks for, and the gigabytes of each."""
    found = re.search(r"# Needs: (?:one GPU|one host with (\d+) GPUs) of (\d+) GB", text)
    assert found is not None
    return int(found[1] or 1), int(found[2])


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_passes_all_checks(recipe: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = check(recipe, models, tmp_path, monkeypatch)
    count, _ = needs((RECIPES / f"{recipe}.yaml").read_text())
    config = inputs.config
    assert config.name == recipe and config.policy.precision == "bfloat16" and config.policy.sequence_packing.enabled
    assert {layout.world_size for layout in RunPlan.of(config).layouts.values()} == {count}
    assert config.data.apply_chat_template and config.checkpointing.export_hf
    steps = config.grpo.max_num_steps if config.algorithm == "grpo" else config.sft.max_num_steps
    assert steps >= 100 and (config.algorithm == "sft" or config.sft.max_num_steps == 0)


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_says_what_it_needs_and_what_was_run(recipe: str) -> None:
    text = (RECIPES / f"{recipe}.yaml").read_text()
    for start in (
        "# Needs: ",
        "# Run: ",
        "# Expect: ",
        "# Checked by a dry run only; not yet run with the published weights.",
    ):
        assert f"\n{start}" in text
    assert f"dagrl train recipes/{recipe}.yaml" in text and f"({recipe}.yaml)" in (RECIPES / "README.md").read_text()


def test_the_calculator_replies_to_calls_only() -> None:
    from recipes.calculator import Calculator

    calculator = Calculator()
    calculator.reset({})
    for turn, reply in (
        ("So <calc>(48 + 24) / 2</calc>", "<result>36</result>\n"),
        ("So <calc>48/2", "</calc><result>24</result>\n"),  # without the stop string
        ("The answer is 72.", None),
        ("<calc>2**9**9</calc>", "<result>error: not arithmetic</result>\n"),
        ("<calc>__import__('os')</calc>", "<result>error: not arithmetic</result>\n"),
        ("<calc>1/0</calc>", "<result>error: division by zero</result>\n"),
        ("it is 1, and <calc>-2.5 * 4</calc>", "<result>-10</result>\n"),
    ):
        assert calculator.step(turn) == reply


PROBLEM = {
    "question": "How many clips are 48 and half as many?",
    "answer": "Half are 48/2 = <<48/2=24>>24 clips.\nAll are 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
SIMPLE = {"question": "What is 6 times 7?", "answer": "It is 6*7 = $<<6*7=42>>42.\n#### 42"}


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's files, in a working directory as its configurations expect it."""
    monkeypatch.setattr(gsm8k, "IMITATED", 40)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [PROBLEM, SIMPLE] * 80))
    gsm8k.prepare(tmp_path, tmp_path / "runs" / "from_scratch_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path / "runs" / "from_scratch_data"


def test_what_is_left_of_a_solution_completes_it(prepared: Path) -> None:
    one, simple = rows(prepared / "one_left.jsonl")[:2]
    assert one["prompt"].endswith("<<48/2=24>>24 clips.\nAll are 48+24 = <<48+24=") and one["response"].startswith("72>>72")
    assert one["prompt"] + one["response"] == f"Question: {PROBLEM['question']}\nAnswer: {PROBLEM['answer']}"
    assert simple["prompt"].endswith("$<<6*7=")
    (two, *_), count = rows(prepared / "two_left.jsonl"), len(rows(prepared / "two_left.jsonl"))
    assert two["response"].startswith("24>>24 clips.\nAll") and count == 60, "half of 120 problems have two calculations"
    assert rows(prepared / "calculations.jsonl")[:2] == [
        {"prompt": " <<48/2=", "response": "24>>"},
        {"prompt": " <<48+24=", "response": "72>>"},
    ]
    (called, *_), (twice, *_) = rows(prepared / "calls_one_left.jsonl"), rows(prepared / "calls_two_left.jsonl")
    assert called["prompt"].endswith("= <calc>48/2</calc><result>24</result>\n24 clips.\nAll are 48+24 = ")
    assert called["response"] == "<calc>48+24</calc><result>72</result>\n72 clips.\n#### 72"
    assert twice["response"].startswith("<calc>48/2</calc>")
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    for row in (gsm8k.solution(PROBLEM), one, called):
        text = row["prompt"] + row["response"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        ids = [tokenizer(part)["input_ids"] for part in (row["prompt"], row["response"])]
        assert ids[0] + ids[1] == tokenizer(text)["input_ids"], "a prompt ends between two tokens"
    assert tokenizer.tokenize("2</calc><result>2") == ["2", "</calc>", "<result>", "2"], "a turn ends between two tokens"


def test_the_reward_is_the_final_answer(prepared: Path) -> None:
    config = load_config(ROOT / "recipes/from_scratch/grpo.yaml").reward
    with RewardRunner(config) as runner:
        texts = ["72>>72 clips.\n#### 72", "71>>71.\n#### 71", "72>>72 clips.", "72\n####"]
        found = rewards_of(runner.submit([""] * 4, texts, [PROBLEM["answer"]] * 4).result())
    assert found.values.tolist() == [1, 0, 0, 0]
    assert found.parts["format"].tolist() == [1, 1, 0, 0]


def test_all_configurations_pass_all_checks(prepared: Path) -> None:
    sft = load_config(ROOT / "recipes/from_scratch/sft.yaml")
    learned = preflight(sft)
    assert sft.policy.random_init is not None and {row.task for row in learned.demonstrations} == {
        "solutions",
        "calculations",
        "calls",
    }
    small = sft.policy.random_init.model_copy(
        update={"hf_config": {**sft.policy.random_init.hf_config, "num_hidden_layers": 1, "hidden_size": 64}}
    )
    for directory in ("from_scratch_sft/final_model", "from_scratch_student"):
        write_random_model(small, learned.tokenizer, Path("runs") / directory)
    for recipe, samples in (("grpo", 64 * 16), ("calculator", 64 * 16), ("distill", 128 * 4)):
        inputs = preflight(load_config(ROOT / f"recipes/from_scratch/{recipe}.yaml"))
        assert {prompt.task for prompt in inputs.prompts} == {"one_left", "two_left"}
        assert inputs.config.policy.train_global_batch_size == samples, "one optimizer step for each batch"


def write_hollow_model(directory: Path, name: str, *tokenizer: str) -> Path:
    """Writes a model of `SHAPES`, with a tokenizer by the arguments of `character_tokenizer`."""
    return write_hollow_checkpoint(directory, SHAPES[name].config, *tokenizer)


def write_hollow_checkpoint(directory: Path, config: Mapping[str, Any], *tokenizer: str) -> Path:
    """Writes `config.json`, a tokenizer, and headers of the weights: of a Qwen3 model, or of transformers' class."""
    directory.mkdir(exist_ok=True)
    character_tokenizer(*tokenizer).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    header: dict[str, Any] = {}
    end = 0
    for parameter, shape in _shapes(directory, config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[parameter] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def _shapes(directory: Path, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    if str(config["model_type"]).startswith("qwen3"):
        return parameter_shapes(config)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}  # a tied head is not one of them
