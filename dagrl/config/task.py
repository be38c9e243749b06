"""What the policy learns from: data, rewards and environments."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from dagrl.config.section import Json, PathText, Section, Seed, derived


class DataSourceConfig(Section):
    """Examples from files, a dataset (`path`) or a callable (`task`)."""

    path: PathText | None = None
    """A JSONL file of prompt and response, of messages (and `tools`), or of preferences (prompt, chosen, rejected), or a CSV
    file; a Hugging Face dataset on disk (written by `save_to_disk`, a Parquet or Arrow file, or a directory of data files);
    or one on the Hub, `owner/name`."""

    subset: str | None = None
    """Subset of the dataset, such as `main` of openai/gsm8k. null: its only one."""

    val_path: PathText | None = None
    """Validation examples, in the formats of `path`. null: `val_split`, or else a share `val_fraction` of `path`."""

    split: str = "train"
    """Split of the dataset to train on."""

    val_split: str | None = None
    """Split of the dataset to validate on."""

    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of `path` held out for validation if there is neither `val_path` nor `val_split`."""

    task: str | None = None
    """Import path of a callable that makes the examples, such as `dagrl.rl.tasks:arithmetic`. Replaces `path`."""

    task_args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of `task`."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, or messages."""

    response_key: str | None = "response"
    """Column of the response, the reference of GRPO. null: rows are prompts alone, for rewards that need no reference."""

    chosen_key: str = "chosen"
    """Column of the better answer of a preference: text, or messages."""

    rejected_key: str = "rejected"
    """Column of the worse answer of a preference: text, or messages."""

    label_key: str = "label"
    """Column that says whether the response is desirable (true or false), for algorithms that learn from single answers."""

    messages_key: str = "messages"
    """Column of the messages of a conversation."""

    image_key: str | None = None
    """Column of a row's images: one, or a list. They belong to the parts of messages that are images without data, or else
    stand in front of the first user turn. null: messages have their images in their parts."""


class MixtureConfig(DataSourceConfig):
    """One of several sources of examples, with the keys of `data`."""

    weight: PositiveFloat | None = None
    """Share of the examples that are drawn from it, relative to the other weights. null: its number of examples."""


class ImagesConfig(Section):
    """Images of conversations; see `dagrl.data.media`."""

    enabled: bool = derived(False, "true if the data have images")
    """Whether conversations may have images. Set it if an environment or an agent alone sends them."""

    max_pixels: PositiveInt | None = None
    """Most pixels of an image. Larger ones are scaled down before the model's processor sees them. null: any number."""


class DataConfig(DataSourceConfig):
    """Training and validation examples: of one source (`path` or `task`), or of several (`mixture`)."""

    mixture: dict[str, MixtureConfig] = Field(default_factory=dict)
    """Several sources by task name. Each batch has their examples in the shares of their weights. Rewards get the name as
    `task`, and there are metrics for each. Replaces `path` and `task`."""

    apply_chat_template: bool = derived(False, "true if the tokenizer has a chat template")
    """Make a conversation of each prompt and response: a user turn and an assistant turn."""

    system_prompt: str | None = None
    """System message in front of each conversation that has none. null: none."""

    images: ImagesConfig = ImagesConfig()

    shuffle: bool = True
    """Shuffle the examples in every epoch."""

    seed: Seed = 0
    """Seed of the shuffling and of the held-out share."""

    assistant_turns: Literal["all", "each", "last"] = "all"
    """Assistant turns of a conversation that SFT learns. `all`: every turn, in one row; the chat template must only append,
    or mark what is generated. `each`: every turn, each in a row that ends with it. `last`: the last turn only."""

    too_long: Literal["error", "drop"] = "error"
    """What to do with an example longer than the largest bucket."""

    invalid: Literal["error", "drop"] = "error"
    """What to do with a row that is not valid, or that the chat template rejects. `drop`: leave it out; the log has their
    number and the first error."""


class ProcessConfig(Section):
    """How a user's functions and environments run. See `dagrl.rl.functions`."""

    timeout_s: PositiveFloat = 10.0
    """Deadline of one answer, in seconds."""

    start_timeout_s: PositiveFloat = 60.0
    """Deadline for a process to import the function. The first process to miss it ends the run."""

    num_workers: PositiveInt | None = None
    """Processes that run the function. null: one; a plain function of single samples that takes long gets up to 4."""

    max_concurrency: PositiveInt | None = None
    """Calls of a coroutine function of single samples under way at once in each process, such as requests to a remote
    judge. Waiting calls have not begun their `timeout_s`. null: all samples of a group."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of failed samples in a training step or a validation; above it the run ends. A training step in which
    all samples fail always ends it."""


class FunctionConfig(ProcessConfig):
    """How a user's function of texts runs."""

    batched: bool = True
    """The function takes lists of texts. false: the texts of one sample."""


class RewardFunctionConfig(FunctionConfig):
    """One of several reward functions; see `reward.functions`."""

    function: str
    """Import path of the reward function."""

    tasks: tuple[str, ...] | None = None
    """Tasks of `data.mixture` whose samples it rewards. null: all."""


class RewardConfig(FunctionConfig):
    """The reward of a sample: of one function, or the weighted sum of several; see docs/rewards.md."""

    function: str | None = "dagrl.rl.rewards:exact_match"
    """Import path of the reward function. null: the only rewards are those of the environment's turns."""

    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """Several reward functions by name, each with its own deadlines and processes. Replaces `function`."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named part in the reward; 1 for parts without one. Parts are the keys that `function` returns; of
    `functions` they are the function's name, or `<name>/<key>`."""


class EndpointConfig(Section):
    """Where the driver listens for the requests of agents. See docs/agents.md."""

    host: str = "127.0.0.1"
    """Address to listen on, which agents are given too. An address of the network admits agents on other hosts; requests
    need the API key of an episode, and are not encrypted."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: a free one."""


class EnvironmentConfig(ProcessConfig):
    """The environment of multi-turn rollouts: answers each turn of the policy. See docs/rewards.md."""

    function: str | None = None
    """Import path of a class, or of a function that returns an object, with the methods `reset`, `step` and `close`, such as
    `my_task:Calculator`. It is called for each sequence. null: sequences have one turn."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of `function`."""

    tools: tuple[str, ...] = ()
    """Import paths of Python functions that the policy may call, instead of `function`. The chat template shows their JSON
    schemas; a turn without a call ends the sequence."""

    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls, as in `vllm serve --tool-call-parser`."""

    agent: str | None = None
    """Import path of a function `agent(example, endpoint)`, plain or `async`, that talks to the policy as to an OpenAI model
    and returns the reward. Replaces `function` and `tools`. See docs/agents.md."""

    agent_timeout_s: PositiveFloat = 600.0
    """Deadline of a whole episode of the agent, in seconds."""

    max_conversations: PositiveInt = 1
    """Conversations of an agent's episode that are trained on, those with the most sampled tokens. Each has a row of the
    batch, so phases are warmed up at as many times the rows."""

    endpoint: EndpointConfig = EndpointConfig()

    max_turns: PositiveInt = 4
    """Maximum number of policy turns per sequence, or of requests per episode of an agent."""

    @property
    def enabled(self) -> bool:
        """Whether sequences have an environment."""
        return self.function is not None or bool(self.tools) or self.agent is not None


class EvaluationConfig(Section):
    """Standard sets of questions on which the policy is measured while it learns; `dagrl evaluate --set` has them too."""

    sets: tuple[str, ...] = ()
    """Sets by name: `gsm8k`, `math500`, `aime24`, `aime25`, `mmlu_pro`, `gpqa_diamond`, `ifeval`. Each comes from the Hub,
    or with `name=path` from a JSONL file or dataset on disk with the same columns. A run that generates measures the share
    of right greedy answers, `evaluation/<name>`, before its first step and after its last one."""

    period: NonNegativeInt = 0
    """Steps between further evaluations. 0: none."""

    prompt: str = "{question}\n\n{instruction}"
    """The text of a prompt, or of a user turn, with `{question}` and the set's own `{instruction}` of how to answer. Without
    a chat template, completions are marked up to a line that begins as that of `{question}`, but for `ifeval`."""

    max_samples: PositiveInt | None = None
    """Maximum number of questions of each set. null: all."""

    @field_validator("prompt")
    @classmethod
    def _has_a_question(cls, prompt: str) -> str:
        try:
            if "\0" in prompt.format(question="\0", instruction=""):
                return prompt
        except (LookupError, ValueError):
            pass
        raise ValueError("a text with {question}, and perhaps {instruction}; other braces are written twice")
