"""`dagrl init`: writes a commented configuration from three answers: the model, the data, the reward."""

import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dagrl.config import Json
from dagrl.data.examples import first_row
from dagrl.data.hugging_face import SUFFIXES, hub_has, is_hub_id
from dagrl.errors import ConfigError, UserError
from dagrl.imports import load_callable
from dagrl.run.derive import model_type
from dagrl.workers.families.decoder import MODEL_TYPES

PROMPT_KEYS = ("prompt", "question", "problem", "instruction", "input")
RESPONSE_KEYS = ("response", "answer", "solution", "completion", "output")

REWARDS = {"math": "dagrl.rl.rewards:math_answer", "exact": "dagrl.rl.rewards:exact_match"}
"""Short names of the rewards that come with dagrl."""

QUESTIONS = {
    "model": "Model: a directory, or an id on the Hugging Face Hub [Qwen/Qwen3-0.6B]: ",
    "data": "Data: a JSONL, JSON, CSV or Parquet file, or a dataset on disk or on the Hub such as openai/gsm8k: ",
    "reward": "Reward: math, exact, your own such as my_task:reward; empty for SFT on the responses: ",
}
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True)
class Answers:
    """What the user wants to train. `reward` "" means SFT."""

    model: str
    data: str
    reward: str


def ask(model: str | None, data: str | None, reward: str | None) -> Answers:
    """Asks for answers that no flag gave. Raises ConfigError without a terminal, or for an invalid answer."""
    given = {"model": model, "data": data, "reward": reward}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and not (sys.stdin and sys.stdin.isatty()):  # None: closed, as by `<&-`
        raise ConfigError(f"standard input is not a terminal; pass {', '.join(missing)} (--reward '' for SFT)")
    answers = {name: input(QUESTIONS[name]).strip() if value is None else value for name, value in given.items()}
    if not answers["data"]:
        raise ConfigError("a run needs data: a JSONL, JSON, CSV or Parquet file, or a dataset on disk or on the Hub")
    reward = REWARDS.get(answers["reward"], answers["reward"])
    if reward and ":" not in reward:
        raise ConfigError(
            f"reward {reward!r}: expected {', '.join(REWARDS)}, an import path such as my_task:reward, or nothing"
        )
    return Answers(answers["model"] or DEFAULT_MODEL, answers["data"], reward)


def check_answers(answers: Answers) -> list[str]:
    """Returns what could not be checked, as the Hub does not answer.

    Raises ConfigError for a model, data or reward that does not exist.
    """
    unknown = [
        _check_there(answers.model, "model", "a Hugging Face directory, or an id on the Hub such as Qwen/Qwen3-0.6B"),
        _check_there(answers.data, "data", "a data file, a dataset on disk, or one on the Hub such as openai/gsm8k"),
    ]
    if answers.reward:
        load_callable(answers.reward, "reward")
    return [name for name in unknown if name]


def _check_there(name: str, what: str, expected: str) -> str:
    """Returns the name if it is on the Hub, which does not answer. Raises ConfigError if there is no such thing."""
    if Path(name).expanduser().exists():
        return ""
    missing = ConfigError(f"{what}: there is no {name!r} (relative to {Path.cwd()}); expected: {expected}")
    if not is_hub_id(name) or Path(name).suffix in (".json", ".jsonl", ".txt", *SUFFIXES):
        raise missing
    found = hub_has(name, "model" if what == "model" else "dataset")
    if found is False:
        raise missing
    return "" if found else name


def check_new(path: Path) -> None:
    """Raises ConfigError if the file exists."""
    if path.exists():
        raise ConfigError(f"{path} exists already; remove it, or name another file with -o")


def config_text(answers: Answers, name: str) -> str:
    """Returns the configuration as YAML with comments. Keys that are commented out show the value they would have."""
    algorithm, rate, generation = ("grpo", "1.0e-6", _GENERATION) if answers.reward else ("sft", "1.0e-5", "")
    return f"""\
# dagrl train {name}.yaml --dry-run    checks everything, shows what is derived for this machine, and starts nothing
# dagrl train {name}.yaml              trains; dagrl view runs/{name} shows it in a browser
# A key that is left out is derived from the machine, the model and the data. All keys: `dagrl config --schema`.
name: {re.sub(r"[^A-Za-z0-9._-]", "_", name)}
algorithm: {algorithm}

policy:
  model_name: {json.dumps(answers.model)}
  # max_total_sequence_length: 2048    # tokens of prompt and completion; by default as the data need
{_MEGATRON if model_type(answers.model) in (None, *MODEL_TYPES) else _FSDP}\
  # optimizer: {{lr: {rate}}}
{generation}
data:
  path: {json.dumps(answers.data)}
{_columns(answers.data)}  # val_path: held_out.jsonl           # by default a share of the data is held out
  # system_prompt: "Think step by step."

{_GRPO.format(reward=json.dumps(answers.reward)) if answers.reward else _SFT}
# checkpointing:
#   save_period: 10
#   resume: true             # go on from the newest checkpoint

# logger:
#   wandb_enabled: true
"""


_MEGATRON = """\
  # megatron_cfg:
  #   tensor_model_parallel_size: 1    # more if the model does not fit on one GPU
"""

_FSDP = """\
  # fsdp_cfg:
  #   data_parallel_size: 1            # GPUs that share weights and optimizer state; by default all that divide a batch
"""

_GENERATION = """\
  # generation:
  #   max_new_tokens: 1024     # longest completion
  #   temperature: 1.0
"""

_GRPO = """\
reward:
  function: {reward}       # (prompts, completions, references) -> one number per sample

# grpo:
#   num_prompts_per_step: 32
#   num_generations_per_prompt: 16
#   max_num_steps: 100       # by default one pass over the data
#   val_period: 10

# loss_fn:
#   reference_policy_kl_penalty: 0.01
"""

_SFT = """\
# sft:
#   max_num_epochs: 1
#   val_period: 20
"""


def _columns(data: str) -> str:
    """Returns the keys of the columns, commented out where they have their default. Looks at data on this machine alone."""
    if data == "openai/gsm8k":
        return "  subset: main\n  val_split: test\n  prompt_key: question\n  response_key: answer\n"
    row: Mapping[str, Json] = {}
    if (path := Path(data).expanduser()).exists():
        with suppress(UserError):  # which the dry run shows
            row = first_row(path)
    text = ""
    for key, names in (("prompt_key", PROMPT_KEYS), ("response_key", RESPONSE_KEYS)):
        found = [name for name in names if name in row]
        if not row or found[:1] == [names[0]] or "messages" in row:
            text += f"  # {key}: {names[0]}\n"
        else:
            text += f"  {key}: {found[0] if found else f'{names[0]}    # found none; the columns are {[*row]}'}\n"
    return text
