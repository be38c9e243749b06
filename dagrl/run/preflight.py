"""Checks everything about a run that can be checked before any actor starts, and reads its data.

`preflight` is the first call of every run, and the only one of `dagrl train --dry-run`. Cheap checks come first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from dagrl.config import Config, Json
from dagrl.config.checks import check_settings, warn_of_settings
from dagrl.config.file import load_run_config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import GENERATION, TRAIN, role_config, section_key
from dagrl.config.run import PHASES
from dagrl.config.settings import bucket_widths, generation_config, model_names, phase_path, width_key
from dagrl.config.task import DataSourceConfig
from dagrl.data import Example, Splits, load_splits
from dagrl.data.chat import Chat, chat_of
from dagrl.data.examples import Parse, judged_of, keep_valid, preference_of, with_chat, with_other_answers, with_tools
from dagrl.data.media import MEDIA, MediaProcessor, Medium, load_processor
from dagrl.data.messages import RESULT
from dagrl.data.replies import reply_text
from dagrl.data.tokenization import (
    Demonstration,
    Preference,
    Prompt,
    Row,
    encode_demonstrations,
    encode_preferences,
    encode_prompts,
    keep_fitting,
    warn_of_differences,
)
from dagrl.errors import ConfigError, DataError, LayoutError, UserError
from dagrl.files import require_writable
from dagrl.imports import load_attribute, load_callable, load_class, require_package, running
from dagrl.machine import VISIBLE, cpu_count
from dagrl.rl.algorithm import columns_by_phase, planned_algorithm
from dagrl.rl.benchmarks import load_sets, rewards_of_sets
from dagrl.rl.environments import check_environment
from dagrl.rl.functions.runner import check_concurrency
from dagrl.rl.preferences import gives_scores, is_unpaired
from dagrl.rl.rewards import check_keywords, check_weights, reward_functions
from dagrl.rl.routed_experts import ROUTED_EXPERTS
from dagrl.rl.tools import load_tools, tool_schemas
from dagrl.rl.trial import try_algorithm, try_environment, try_rewards
from dagrl.run.checkpoint_store import CheckpointStore
from dagrl.run.cluster import check_open_files, check_ray_directory, gpus_here, gpus_per_worker
from dagrl.run.derive import (
    Derived,
    derive_chat,
    derive_date,
    derive_from_data,
    derive_from_machine,
    derive_images,
    derive_steps,
    derive_stops,
    epoch_steps,
    gpu_memory,
)
from dagrl.run.memory import check_memory, run_memory
from dagrl.run.model import (
    CONFIG,
    GENERATION_CONFIG,
    Apart,
    check_directories,
    check_other_tokenizers,
    check_random_model,
    check_template,
    checkpoint_bytes,
    end_tokens,
    generation_defaults,
    language_keys,
    load_tokenizer,
    model_description,
    other_models,
    role_description,
    set_date,
    token_count,
    with_local_models,
)
from dagrl.run.plans import load_phase, run_plans
from dagrl.run.resume import check_model_of, check_state_of
from dagrl.run.worker_protocols import OPTIONAL, check_supported, required_protocols
from dagrl.runtime.graph import InputRef, PhaseGraph
from dagrl.runtime.phase import Phase, Role, group_transports, methods_of
from dagrl.runtime.shapes import field_types, types_text
from dagrl.runtime.worker import check_worker_class
from dagrl.telemetry.metrics import VALIDATION
from dagrl.telemetry.record import RunPaths, check_run_directory, require_extras

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

ENDS_CHECKED = 1000  # examples of SFT that are searched for stop tokens
WORKERS_PER_CORE = 8  # workers allowed per CPU core on a machine without GPUs


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: its configuration without open keys, the tokenizer, the model's `config.json`, and tokenized
    examples. `derived` has the reason of each key that was derived.

    What no stage of the run learns from is empty.
    """

    config: Config
    derived: Mapping[str, str]
    tokenizer: PreTrainedTokenizerFast
    hf_config: Mapping[str, Json]
    demonstrations: list[Demonstration] = field(default_factory=list)
    validation_demonstrations: list[Demonstration] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    validation_prompts: list[Prompt] = field(default_factory=list)
    evaluation_prompts: list[Prompt] = field(default_factory=list)
    preferences: list[Preference] = field(default_factory=list)
    validation_preferences: list[Preference] = field(default_factory=list)
    processor: MediaProcessor | None = None

    @property
    def rows(self) -> Iterator[Demonstration | Prompt]:
        """All rows."""
        pairs = chain(self.preferences, self.validation_preferences)
        return chain(
            self.demonstrations,
            self.validation_demonstrations,
            self.prompts,
            self.validation_prompts,
            self.evaluation_prompts,
            chain.from_iterable((pair.chosen, pair.rejected) for pair in pairs),
        )

    @cached_property
    def media(self) -> list[Medium]:
        """The media of all rows, each once."""
        media = {medium.id: medium for row in self.rows if row.media is not None for medium in row.media.items}
        return list(media.values())


class Early:
    """Starts nothing while a run is checked. `Fleet` overrides it to start imports and Ray early."""

    apart: Apart = partial
    """What begins calls in a process that has torch, if there is one."""

    def begin_imports(self, config: Config, classes: Mapping[str, type]) -> None:
        """Begins to import what the workers, of these classes by role, will need."""

    def begin_cluster(self, config: Config) -> None:
        """Begins to start Ray."""


def preflight(config: Config, *, checkpoints: bool = True, early: Early | None = None) -> Inputs:
    """Derives what the configuration leaves open, and checks it against the machine, the model, the workers, the phases and
    the data; with `checkpoints` also against those of the run. Returns what the run starts from.

    `early` begins once the checks that take no time have passed. Raises a UserError that says what to change.
    """
    derived, early = derive_from_machine(config), early or Early()
    config = derived.config
    plan = RunPlan.of(config)
    check_settings(config, plan, lengths=not derived.lengths_open)
    require_extras(config.logger)
    workers = worker_classes(config, plan)
    check_machine(config, plan)
    paths = RunPaths.of(config)
    check_run_directory(paths)
    if checkpoints:
        _check_inputs_stay(config, paths)
    require_writable(paths.directory, f"output_dir {config.output_dir}")
    resumed = CheckpointStore(paths.checkpoints).latest() if checkpoints and config.checkpointing.resume else None
    trace_phases(config, plan, workers)
    if plan.generates:
        _check_rewards(config)
    _check_sets(config, plan)
    if plan.learns_from != "preferences":
        _check_responses(config, plan)
    early.begin_imports(config, workers)
    apart = early.apart
    # before models are looked for, and before torch and transformers are imported
    splits = load_splits(config.data, _parser(plan))
    questions = load_sets(config.evaluation)
    check_directories(config)
    early.begin_cluster(config)
    derived.config, origins = with_local_models(derived.config)
    derived.reasons |= origins
    init = derived.config.policy.random_init
    if init is None:
        checked = apart(check_model, derived.config, model_description(derived.config.policy, 0))
    tokenizer, hf_config = _open_text(derived, apart)
    config = derived.config
    if other_models(config):
        apart(check_other_tokenizers, config, tokenizer.get_vocab())()
    tried = [apart(try_algorithm, config)]
    if init is None:
        checked()
    else:  # with the vocabulary of the tokenizer
        tried.append(apart(check_model, config, hf_config))
        tried.append(apart(check_random_model, init, tokenizer))
    _check_stops(config, hf_config)
    if resumed is not None:
        check_model_of(resumed, config, hf_config, workers)
    inputs = _encoded(derived, plan, splits, questions, tokenizer, hf_config)
    for result in tried:
        result()
    _check_positions(inputs, plan)
    check_settings(inputs.config, plan)
    share = gpus_per_worker(config.cluster)
    gpu = gpu_memory() if config.cluster.address is None and share else 0
    if gpu and derived.open("policy.worker", "policy.generation.worker"):
        check_memory(plan, run_memory(inputs.config, plan, inputs.hf_config, gpu), gpu, share)
    warn_of_settings(inputs.config, plan)
    _check_metric(inputs, plan)
    if plan.generates:
        try_rewards(inputs.config, inputs.prompts, tokenizer)
        try_environment(inputs.config, inputs.prompts, tokenizer, inputs.processor)
    if resumed is not None:
        check_state_of(resumed, inputs.config, plan, inputs.demonstrations, inputs.prompts, inputs.preferences)
    return inputs


def read_data(config: Config, gpu_bytes: int = 0) -> tuple[Inputs, list[Example]]:
    """Returns the tokenized examples of a run, and the examples that they are made of. Checks nothing else.

    `gpu_bytes`: the memory of a GPU to derive for; 0: that of the smallest one here.
    """
    derived = derive_from_machine(config, gpu_bytes)
    plan = RunPlan.of(derived.config)
    check_settings(derived.config, plan, lengths=not derived.lengths_open)
    splits = load_splits(derived.config.data, _parser(plan))
    derived.config, origins = with_local_models(derived.config)
    derived.reasons |= origins
    tokenizer, hf_config = _open_text(derived)
    examples = [with_chat(example, derived.config.data) for example in (*splits.demonstrations, *splits.train)]
    return _encoded(derived, plan, splits, (), tokenizer, hf_config), examples


def _open_text(derived: Derived, apart: Apart = partial) -> tuple[PreTrainedTokenizerFast, dict[str, Json]]:
    """Returns the tokenizer and the model's `config.json`, and derives what follows from the tokenizer."""
    tokenizer = load_tokenizer(derived.config.policy, apart)
    derive_chat(derived, tokenizer.chat_template is not None)
    _keep_date(derived, tokenizer, RunPaths.of(derived.config))
    return tokenizer, model_description(derived.config.policy, token_count(tokenizer))


def _keep_date(derived: Derived, tokenizer: PreTrainedTokenizerFast, paths: RunPaths) -> None:
    """Makes a chat template that writes the date write that of the run's start, so that data have the same tokens later."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return
    resumes = derived.config.checkpointing.resume and paths.config.exists()
    derive_date(derived, load_run_config(paths.directory).policy.tokenizer.date if resumes else None)
    day = derived.config.policy.tokenizer.date
    assert day is not None
    set_date(tokenizer, day)


def limit_steps(config: Config, inputs: Inputs) -> Config:
    """Limits `max_num_steps` of each section to the steps that its `max_num_epochs` take."""
    limits = {}
    for name, rows in (("sft", inputs.demonstrations), ("grpo", inputs.prompts), ("preference", inputs.preferences)):
        section = getattr(config, name)
        if section.max_num_epochs is not None and rows:
            limits[f"{name}.max_num_steps"] = min(section.max_num_steps, epoch_steps(config, name, len(rows)))
    return config.with_keys(limits)


def worker_classes(config: Config, plan: RunPlan) -> dict[str, type]:
    """Returns the worker class of each group. Raises ConfigError for one that does not fit the protocols of its role.

    A class may name the top-level packages it imports later in `requires`.
    """
    classes, required = dict[str, type](), required_protocols(config, plan)
    for role, (key, path) in _worker_keys(config, plan).items():
        classes[role] = load_class(path, key)
        check_worker_class(classes[role], required[role], OPTIONAL, key)
        _require_packages(classes[role], key)
    return classes


def _worker_keys(config: Config, plan: RunPlan) -> dict[str, tuple[str, str]]:
    """Returns the key and the import path of each group's worker class."""
    keys = {TRAIN: ("policy.worker", config.policy.worker)}
    if plan.generates:
        keys[GENERATION] = ("policy.generation.worker", generation_config(config).worker)
    own = {role: (f"{section_key(role)}.worker", role_config(config, role).policy.worker) for role in plan.model_roles}
    return keys | own


def _require_packages(loaded: object, key: str) -> None:
    for package in getattr(loaded, "requires", ()):
        require_package(package, key)


def _check_rewards(config: Config) -> None:
    """Checks reward functions and the environment. Like a worker class, a function may name packages in `requires`."""
    for item in reward_functions(config.reward):
        key = f"{item.key}.function"
        function = load_callable(item.path, key)
        check_concurrency(function, key, item.config.batched, item.config.max_concurrency)
        _require_packages(function, key)
    if config.environment.agent is None:  # an agent names its parts when it returns
        check_weights(config.reward, config.environment.enabled)
    if config.environment.enabled:
        check_environment(config.environment)


def _check_sets(config: Config, plan: RunPlan) -> None:
    """Checks `evaluation.sets`, whose rewards may need packages, too."""
    if config.evaluation.sets and not plan.generates:
        raise ConfigError(
            f"evaluation.sets is {list(config.evaluation.sets)}, but algorithm {config.algorithm} generates nothing; leave "
            "it out, and run dagrl evaluate --set on the final model"
        )
    if config.evaluation.sets and config.environment.enabled:
        raise ConfigError("evaluation.sets has questions of one turn, but there is an environment; leave one of them out")
    for item in reward_functions(rewards_of_sets(config.evaluation, 1)):
        if item.name:
            _require_packages(load_callable(item.path, f"evaluation.sets: {item.name}"), f"evaluation.sets: {item.name}")


def trace_phases(config: Config, plan: RunPlan, workers: Mapping[str, type]) -> dict[str, PhaseGraph]:
    """Returns the graph of every phase that the algorithm replays, by its key in `phases`.

    Raises GraphError for a phase that its workers cannot run, and ConfigError for an import path that is not a phase.
    """
    transports = group_transports(gpus_per_worker(config.cluster))
    roles = {role: Role(role, layout, methods_of(workers[role]), transports) for role, layout in plan.layouts.items()}
    graphs, used = dict[str, PhaseGraph](), set[str]()
    for key in (phase.name for phase in run_plans(config, plan)):
        phase = load_phase(config, key)
        with running(phase_path(config, key), f"phases.{key}"):
            graphs[key] = phase.trace(roles)
        if phase_path(config, key) != PHASES.get(key):
            _check_inputs(config, plan, key, phase, _fields_read(graphs[key], workers))
        used.update(phase.roles)
    if idle := [role for role in config.models if role not in used]:
        raise ConfigError(
            f"models.{idle[0]} is set, but no phase of the run has a Shard named {idle[0]!r}; leave it out, or name such a "
            f"phase in the `columns` of {config.algorithm}"
        )
    return graphs


def _fields_read(graph: PhaseGraph, workers: Mapping[str, type]) -> set[str]:
    """Returns the fields that the graph's nodes read of its input, as far as the worker classes name them in `reads`."""
    calls = [(workers[node.worker.role], node.method) for node in graph.nodes if InputRef() in node.args]
    return {name for worker, method in calls for name in getattr(worker, "reads", {}).get(method, ())}


def _check_inputs(config: Config, plan: RunPlan, key: str, phase: Phase, read: set[str]) -> None:
    """Raises ConfigError for a phase of the user's that does not take the batches that it gets.

    A phase of samples' columns gets the fields that it names. Any other gets those of the phase that it replaces.
    """
    chooses = plan.generates and key in columns_by_phase(planned_algorithm(plan))
    replaced = "train_step" if chooses else key if key in PHASES else "answer_sums"  # a column of preferences
    given = cast(Phase, load_attribute(PHASES[replaced], key)).inputs
    if given is None:
        return
    types, own = field_types(given), field_types(phase.inputs or {})
    lacks = sorted((read if chooses else types.keys()) - own.keys())
    has = [name for name in own if own[name] != types.get(name) and name not in (MEDIA, ROUTED_EXPERTS)]
    if lacks or has:
        found = " and ".join(f"{what} {', '.join(names)}" for what, names in (("lack", lacks), ("have", has)) if names)
        raise ConfigError(
            f"{f'phases.{key}' if key in PHASES else 'algorithm'}: the `inputs` of {phase_path(config, key)} {found}; "
            f"expected: {'some' if chooses else 'all'} of {types_text(types)}. Correct the `inputs`"
        )


def _check_metric(inputs: Inputs, plan: RunPlan) -> None:
    """Checks a validation metric in `checkpointing.metric_name`. Others are checked by the first step (`ranking_metric`)."""
    name = inputs.config.checkpointing.metric_name or ""
    held_out = {
        "samples": inputs.validation_prompts,
        "demonstrations": inputs.validation_demonstrations,
        "preferences": inputs.validation_preferences,
    }[plan.learns_from]
    if name.startswith(VALIDATION) and not held_out:
        raise ConfigError(
            f"checkpointing.metric_name is {name!r}, but nothing is held out for validation; set data.val_fraction, "
            "data.val_path or data.val_split, or rank by a metric of training"
        )


def check_machine(config: Config, plan: RunPlan) -> None:
    """Raises LayoutError if this machine does not hold the workers. A running cluster is checked when it is joined."""
    groups = plan.layouts
    everyone = sum(layout.world_size for layout in groups.values())
    workers = plan.devices if gpus_per_worker(config.cluster) else everyone
    sizes = " + ".join(f"{layout.world_size} {role} ({layout.describe()})" for role, layout in groups.items())
    check_room(config, workers, sizes)
    if config.policy.megatron_cfg.cuda_graphs and config.cluster.address is None and not gpus_here(config.cluster):
        raise ConfigError("policy.megatron_cfg.cuda_graphs is true, but this machine has no GPUs; set it to false")
    if config.cluster.address is None:
        check_ray_directory()
        check_open_files(everyone)


def check_room(config: Config, workers: int, sizes: str) -> None:
    """Raises LayoutError if this machine does not hold so many workers, of groups of these `sizes`: Ray would wait."""
    cluster = config.cluster
    if cluster.address is not None:
        return
    gpus, share, advice = gpus_here(cluster), gpus_per_worker(cluster), "choose smaller layouts"
    if share:
        most = int(gpus / share)
        reason = f"this machine has {gpus} GPUs and a worker takes {share:g} (cluster.gpus_per_worker)"
        if not gpus:
            advice = f"look at {VISIBLE}, or set cluster.gpus_per_worker=0 to do without GPUs"
    else:
        cores = cluster.num_cpus or cpu_count()
        most = cores * WORKERS_PER_CORE
        reason = f"{cores} CPU cores hold {most} ({WORKERS_PER_CORE} a core; cluster.num_cpus sets the cores)"
    if workers > most:
        raise LayoutError(f"the layouts ask for {workers} workers, {sizes}, but {reason}; {advice}")


def check_model(config: Config, hf_config: Mapping[str, Json]) -> None:
    """Raises a UserError for what the model, or the static `check(config, hf_config)` of a worker class, rejects."""
    plan = RunPlan.of(config)
    keys = _worker_keys(config, plan)
    for role, worker in worker_classes(config, plan).items():
        key, path = keys[role]
        with running(f"{path}.check", key):
            try:
                described = role_description(config, role, hf_config)
                if role != "generation":
                    check_supported(worker, role_config(config, role).policy, key)
                if hasattr(worker, "check"):
                    worker.check(role_config(config, role), described)
            except UserError as error:
                raise type(error)(f"{role} workers: {error}") from error


def _check_stops(config: Config, hf_config: Mapping[str, Json]) -> None:
    generation, rows = config.policy.generation, language_keys(hf_config).get("vocab_size")
    if generation is None or not isinstance(rows, int):
        return
    if unknown := [token for token in generation.stop_token_ids if not 0 <= token < rows]:
        raise ConfigError(
            f"policy.generation.stop_token_ids has {', '.join(map(str, unknown))}, which the model does not have; expected: "
            f"tokens from 0 to {rows - 1}"
        )


def _check_positions(inputs: Inputs, plan: RunPlan) -> None:
    widest = bucket_widths(inputs.config.policy)[-1]
    for role in ("train", *plan.model_roles):
        described = role_description(inputs.config, role, inputs.hf_config)
        positions = language_keys(described).get("max_position_embeddings")
        if isinstance(positions, int) and positions < widest:
            whose = "the model" if role == "train" else f"the {role}"
            raise ConfigError(
                f"{whose} has {positions} positions (max_position_embeddings), but the largest bucket {widest} tokens; "
                f"lower {width_key(inputs.config.policy)}"
            )


def _parser(plan: RunPlan) -> Parse | None:
    """Returns what makes examples of rows, if these are not demonstrations."""
    if plan.learns_from != "preferences":
        return None
    return judged_of if is_unpaired(planned_algorithm(plan)) else preference_of


def _encoded(
    derived: Derived,
    plan: RunPlan,
    splits: Splits,
    questions: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    hf_config: Mapping[str, Json],
) -> Inputs:
    """Tokenizes the examples, each kind for training and for validation, and derives lengths and steps from them."""
    config = derived.config
    learned, train, held = (
        [with_chat(example, config.data) for example in part]
        for part in (splits.demonstrations, splits.train, splits.validation)
    )
    if tokenizer.chat_template is not None and any(example.messages for example in chain(learned, train, held)):
        check_template(config.policy, tokenizer)
    processor = None
    if shows := next((example.source for example in chain(learned, train, held) if example.media), None):
        derive_images(derived, shows)
    if derived.config.data.images.enabled:
        check_media(config, plan, hf_config)
        processor = MediaProcessor(load_processor(Path(config.policy.tokenizer.name or config.policy.model_name or "")))
    shown = config.data.apply_chat_template or any(example.messages for example in chain(learned, train))
    shown = shown and tokenizer.chat_template is not None
    if plan.generates:
        ends = {"eos_token of the tokenizer": [cast(int, tokenizer.eos_token_id)]}
        if config.policy.random_init is None:
            ends |= {CONFIG: end_tokens(hf_config), GENERATION_CONFIG: end_tokens(generation_defaults(config.policy))}
        derive_stops(derived, chat_of(tokenizer), ends, shown=shown)
    elif shown and not (end := chat_of(tokenizer).end).tokens and end.text.strip():
        logger.warning(
            "the chat template ends assistant turns with %r, which is not a token of the tokenizer: engines that serve the "
            "model stop there only if they are told to (`stop`)",
            end.text.strip(),
        )
    demonstrations, prompts, pairs = [list[Demonstration]()] * 2, [list[Prompt]()] * 3, [list[Preference]()] * 2
    if plan.learns_from == "preferences":
        scored = gives_scores(derived.algorithm)
        encode_pairs = partial(encode_preferences, tokenizer=tokenizer, scored=scored, processor=processor)
        parts = [train, held[: config.preference.max_val_samples]]
        if is_unpaired(derived.algorithm):
            parts = [with_other_answers(part, config.data.seed) for part in parts]
        pairs = [_valid(config, encode_pairs, part) for part in parts]
    elif _learns_responses(config, plan):
        turns = config.data.assistant_turns
        encode = partial(encode_demonstrations, tokenizer=tokenizer, assistant_turns=turns, processor=processor)
        demonstrations = [_valid(config, encode, part) for part in (learned, held[: config.sft.max_val_samples])]
    warn_of_differences(
        [*chain(*demonstrations), *(side for pair in chain(*pairs) for side in (pair.chosen, pair.rejected))]
    )
    if plan.generates:
        schemas = tool_schemas(load_tools(config.environment.tools)) if config.environment.tools else []
        parts = [train, held[: config.grpo.max_val_samples], [with_chat(example, config.data) for example in questions]]
        if schemas:
            parts = [[with_tools(example, schemas) for example in part] for part in parts]
            _check_tools(chat_of(tokenizer), schemas)
        encode_all = partial(encode_prompts, tokenizer=tokenizer, processor=processor)
        prompts = [_valid(config, encode_all, part) for part in parts]
        _check_ends(demonstrations[0], generation_config(derived.config).stop_token_ids, tokenizer)
    derive_from_data(derived, chain(*demonstrations, *pairs), chain(*prompts), hf_config, checkpoint_bytes(config.policy))
    config = derived.config
    new = generation_config(config).max_new_tokens if plan.generates else 0
    demonstrations = [_fitting(config, part) for part in demonstrations]
    prompts = [_fitting(config, part, new) for part in prompts]
    pairs = [_fitting(config, part) for part in pairs]
    derive_steps(derived, demonstrations=len(demonstrations[0]), prompts=len(prompts[0]), pairs=len(pairs[0]))
    if plan.generates:
        check_keywords(config.reward, {name for prompt in prompts[0] for name in prompt.columns})
    return Inputs(
        derived.config,
        derived.reasons,
        tokenizer,
        hf_config,
        demonstrations=demonstrations[0],
        validation_demonstrations=demonstrations[1],
        prompts=prompts[0],
        validation_prompts=prompts[1],
        evaluation_prompts=prompts[2],
        preferences=pairs[0],
        validation_preferences=pairs[1],
        processor=processor,
    )


def check_media(config: Config, plan: RunPlan, hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError for a run that does not train on images."""
    layout, advice = config.policy.train_layout, ""
    blind = [role for role in plan.model_roles if "vision_config" not in role_description(config, role, hf_config)]
    if plan.critic or (plan.learns_from == "preferences" and gives_scores(planned_algorithm(plan))):
        advice = "critics and reward models read texts alone"
    elif {role_config(config, role).policy.backend for role in ("train", *plan.model_roles)} != {"fsdp"}:
        advice = "Megatron workers take text alone; set policy.backend=fsdp"
    elif blind:
        advice = f"the {blind[0]} reads text alone: its config.json has no vision_config. Choose one that takes images"
    elif max(layout.tp, layout.cp, layout.ep) > 1:
        sizes = "tensor_parallel_size, context_parallel_size and expert_parallel_size"
        advice = f"their model is not split; set {sizes} of policy.fsdp_cfg to 1"
    if advice:
        raise ConfigError(f"the run has images, but {advice}, or remove the images (data.images.enabled)")
    both_ways = language_keys(hf_config).get("use_bidirectional_attention") == "vision"  # Gemma 4's
    both_ways |= hf_config.get("model_type") in ("gemma3", "paligemma")
    if plan.generates and not gpus_per_worker(config.cluster) and both_ways:
        raise ConfigError(
            f"the run has images, but in models of type {hf_config['model_type']!r} the tokens of an image see each "
            "other, which vLLM's attention on CPUs does not do: completions would be of another model than in training. "
            "Generate on GPUs, take a model of causal attention, such as Qwen3-VL or Idefics3, or train by SFT"
        )


def _check_tools(chat: Chat, schemas: Sequence[Json]) -> None:
    """Raises ConfigError if the chat template cannot show what tools answer; warns if it shows no tools."""
    try:
        reply_text(chat, [RESULT], schemas)
    except Exception as error:  # Jinja's errors, and those that templates raise
        raise ConfigError(f"environment.tools: the chat template rejects the result of a tool: {error}") from error
    if end := chat.stop_before_calls(schemas):
        raise ConfigError(
            f"environment.tools: the chat template writes {end!r}, with which generation stops, before the calls of a turn, "
            "so the policy could make none; use one that ends turns after their calls (policy.tokenizer.chat_template)"
        )
    asked = [{"role": "user", "content": "1"}]
    if chat.render(asked, schemas, opened=True) == chat.render(asked, opened=True):
        logger.warning("environment.tools: the chat template does not show them, so prompts must describe them")


def _valid(config: Config, encode: Callable[[Sequence[Example]], list[Row]], examples: Sequence[Example]) -> list[Row]:
    """Returns the rows of the examples that the chat template and the tokenizer take (`data.invalid`)."""
    try:
        return encode(examples)
    except DataError:
        if config.data.invalid == "error":
            raise
    rows = keep_valid(examples, lambda example: encode([example]), "drop", "the chat template")
    return [row for part in rows for row in part]


def _check_ends(rows: Sequence[Demonstration], stops: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises ConfigError if all turns that SFT learns go on after a token that ends a completion; warns if some do."""
    early: dict[str, int] = {}
    for row in rows[:ENDS_CHECKED]:
        learned = row.loss_mask > 0
        inside = learned[:-1] & learned[1:] & np.isin(row.tokens[:-1], stops)
        if inside.any():
            early[row.source] = int(row.tokens[inside.argmax()])
    if not early:
        return
    source, token = next(iter(early.items()))
    what = f"stop token {token} {tokenizer.convert_ids_to_tokens(token)!r}, where generation would end"
    if len(early) == len(rows[:ENDS_CHECKED]):
        raise ConfigError(
            f"{source}: the response goes on after {what}, as do all others; remove it from "
            "policy.generation.stop_token_ids, or from the data or the chat template"
        )
    logger.warning("%s and %d other examples go on after a stop token, such as %s", source, len(early) - 1, what)


def _learns_responses(config: Config, plan: RunPlan) -> bool:
    """Returns whether a stage of the run is SFT."""
    return not plan.generates or config.sft.max_num_steps > 0


def _sources(config: Config) -> dict[str, DataSourceConfig]:
    """Returns the sources of examples by their keys."""
    return {"data": config.data, **{f"data.mixture.{name}": source for name, source in config.data.mixture.items()}}


def _check_inputs_stay(config: Config, paths: RunPaths) -> None:
    """Raises ConfigError for an input in the directory of an earlier run, which the run would rename."""
    if config.checkpointing.resume or not paths.config.exists():
        return
    named = {**model_names(config), "policy.peft.adapter_path": config.policy.peft.adapter_path}
    for key, source in _sources(config).items():
        named |= {f"{key}.path": source.path, f"{key}.val_path": source.val_path}
    for key, name in named.items():
        if name is not None and paths.directory.resolve() in Path(name).resolve().parents:
            raise ConfigError(
                f"{key}: {name} is in {paths.directory}, which is renamed when another run of that name starts; choose "
                "another name or output_dir, or set checkpointing.resume=true to go on with the earlier run"
            )


def _check_responses(config: Config, plan: RunPlan) -> None:
    """Raises ConfigError if the examples are prompts alone, but SFT or a reward of ours needs responses."""
    without = [f"{key}.response_key" for key, source in _sources(config).items() if source.response_key is None]
    if without and _learns_responses(config, plan):
        alone = ", or set sft.max_num_steps=0" if plan.generates else ""
        raise ConfigError(f"{without[0]} is null, but SFT learns responses; name their key{alone}")
    for item in reward_functions(config.reward):
        if without and item.tasks is None and item.path.startswith("dagrl.rl.rewards:"):
            raise ConfigError(
                f"{without[0]} is null, but {item.key}.function {item.path} compares with a reference; name their key, or "
                "another function"
            )


def _fitting(config: Config, rows: list[Row], new: int = 0) -> list[Row]:
    """Returns the rows for which a bucket has room, with `new` tokens after them."""
    limit = "the largest bucket" + (f" less policy.generation.max_new_tokens {new}" if new else "")
    room = bucket_widths(config.policy)[-1] - new
    return keep_fitting(rows, room, config.data.too_long, limit, width_key(config.policy))
