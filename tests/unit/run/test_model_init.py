"""Models from a seed, which transformers loads, and by Hub id: downloaded once from a double of the Hub, then found."""

import errno
import hashlib
import json
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub.constants
import pytest
import torch
import yaml
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dagrl.cli.main import main
from dagrl.config import Config, DataConfig, PolicyConfig, RandomInit, TokenizerConfig
from dagrl.data import load_splits
from dagrl.errors import ConfigError, DataError
from dagrl.run import model as run_model
from dagrl.run.model import character_tokenizer, load_tokenizer, model_description, with_local_models, write_random_model
from dagrl.run.preflight import Inputs, preflight
from dagrl.run.start import prepared_config

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
MODEL = {"model_type": "qwen3", **SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64}
INIT = RandomInit(tokenizer_characters="0123456789+= \n", hf_config=MODEL)


def written(directory: Path, seed: int = 0, **hf_config: int) -> bytes:
    tokenizer = character_tokenizer(INIT.tokenizer_characters)
    init = INIT.model_copy(update={"seed": seed, "hf_config": {**INIT.hf_config, **hf_config}})
    run_model.write_random_model(init, tokenizer, directory)
    return (directory / "model.safetensors").read_bytes()


def configured(policy: dict[str, Any], **sections: Any) -> Config:
    content = {"name": "t", "algorithm": "grpo", "policy": policy, "data": {"path": "d"}, **sections}
    return Config.model_validate(content)


def test_each_role_has_the_description_of_its_own_model(tmp_path: Path) -> None:
    for name in ("critic", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    critic, teacher = ({"model_name": str(tmp_path / name)} for name in ("critic", "teacher"))
    config = configured({"random_init": INIT.model_dump()}, critic=critic, models={"teacher": teacher})
    policy = {"model_type": "policy"}
    for role, kind in (("train", "policy"), ("generation", "policy"), ("critic", "critic"), ("teacher", "teacher")):
        assert run_model.role_description(config, role, policy)["model_type"] == kind


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first = written(tmp_path / "a")
    assert written(tmp_path / "a") == written(tmp_path / "b") == first != written(tmp_path / "c", seed=1)
    before = (tmp_path / "a" / "model.safetensors").stat()
    assert written(tmp_path / "a") == first and (tmp_path / "a" / "model.safetensors").stat() == before, "it stays as it is"
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are its own
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_transformers_loads_a_random_model(tmp_path: Path) -> None:
    written(tmp_path / "a")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "a"), AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.vocab_size == len(tokenizer) == 4 + 14
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.pad_token_id is None and model.get_input_embeddings().weight.norm(dim=-1).min() > 0
    policy = PolicyConfig(model_name=str(tmp_path / "a"))
    assert model_description(policy, 0)["vocab_size"] == 18
    assert load_tokenizer(policy)("1+1=").input_ids == tokenizer("1+1=").input_ids


@pytest.mark.parametrize(("wanted", "rows"), [(5, 18), (64, 64)])
def test_a_vocabulary_may_be_larger_than_the_tokenizer(tmp_path: Path, wanted: int, rows: int) -> None:
    written(tmp_path / "a", vocab_size=wanted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == rows


def test_a_checkpoint_needs_a_row_for_each_token(tmp_path: Path) -> None:
    written(tmp_path / "a")
    policy = PolicyConfig(model_name=str(tmp_path / "a"))
    assert model_description(policy, run_model.token_count(load_tokenizer(policy)))["vocab_size"] == 18
    character_tokenizer(f"{INIT.tokenizer_characters}x").save_pretrained(tmp_path / "larger")
    policy = PolicyConfig(model_name=str(tmp_path / "a"), tokenizer=TokenizerConfig(name=str(tmp_path / "larger")))
    with pytest.raises(ConfigError, match=r"tokens up to 18, but the model .* has rows for 0 to 17 \(vocab_size 18\)"):
        model_description(policy, run_model.token_count(load_tokenizer(policy)))
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": json.loads(path.read_text())}))
    with pytest.raises(ConfigError, match=r"has rows for 0 to 17 \(vocab_size 18\)"):
        model_description(policy, 19)


def test_the_largest_token_sets_the_number_of_rows(tmp_path: Path) -> None:
    """A vocabulary with gaps has fewer tokens than its largest token needs rows."""
    vocabulary = models.WordLevel({"<pad>": 0, "<eos>": 2, "a": 40}, unk_token="<pad>")  # noqa: S106  # a token of text
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), pad_token="<pad>", eos_token="<eos>")  # noqa: S106
    assert (len(tokenizer), run_model.token_count(tokenizer)) == (3, 41)
    run_model.write_random_model(INIT, tokenizer, tmp_path / "a")
    assert model_description(PolicyConfig(model_name=str(tmp_path / "a")), 41)["vocab_size"] == 41


def test_broken_and_empty_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name: .*absent"):
        run_model.check_directories(configured({"model_name": str(tmp_path / "absent")}))
    written(tmp_path / "a")
    config = configured({"model_name": str(tmp_path / "a")})
    run_model.check_directories(config)
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"policy\.model_name: .*config\.json cannot be read"):
        run_model.check_directories(config)
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"policy\.model_name: .*has no config\.json; expected .* final_model"):
        run_model.check_directories(config)
    with pytest.raises(ConfigError, match=r"policy\.model_name: .*config\.json"):
        model_description(config.policy, 0)
    with pytest.raises(ConfigError, match="transformers cannot load a tokenizer from"):
        load_tokenizer(config.policy)
    with pytest.raises(ConfigError, match="tokenizer_characters or policy"):
        load_tokenizer(PolicyConfig(random_init=RandomInit(hf_config={})))


def test_a_configuration_that_transformers_rejects(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b")
    policy, path = PolicyConfig(model_name=str(tmp_path / "a")), tmp_path / "a" / "config.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps({**good, "num_hidden_layers": 2}))
    refused = r"policy\.model_name: transformers rejects .*config\.json: .*`num_hidden_layers` \(2\) must be equal"
    with pytest.raises(ConfigError, match=refused):
        load_tokenizer(policy)
    with pytest.raises(ConfigError, match=refused):
        load_tokenizer(PolicyConfig(model_name=str(tmp_path / "a"), tokenizer=TokenizerConfig(name=str(tmp_path / "b"))))
    path.write_text(json.dumps({"model_type": "gpt9"}))
    assert model_description(policy, 0) == {"model_type": "gpt9"}  # it is for the worker classes to say


def test_character_tokenizer_keeps_every_character(tmp_path: Path) -> None:
    text = "1 + 1 =\n\n 2 ,x<eos>"
    tokenizer = character_tokenizer("+=12 \n,x")
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("?").input_ids == [tokenizer.unk_token_id]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


def test_a_tokenizer_next_to_code_is_loaded_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask at the terminal whether to run it."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", asked.append)
    character_tokenizer("01").save_pretrained(tmp_path)
    code = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    (tmp_path / "configuration_own.py").write_text("raise AssertionError('run')")
    tokenizer = load_tokenizer(PolicyConfig(model_name=str(tmp_path)))
    assert tokenizer.encode("10", add_special_tokens=False) == [tokenizer.get_vocab()[one] for one in "10"]
    assert not asked


def test_replacing_the_tokenizers_chat_template_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, own in (("with", "{{ messages[0].content }}"), ("without", None)):
        character_tokenizer("01", own).save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
    replaces, own = "policy.tokenizer.chat_template replaces the chat template", "{{ messages[0].content }}"
    with caplog.at_level("WARNING", "dagrl"):
        for name, template in (("with", None), ("with", own), ("without", "{{ x }}"), ("with", "{{ x }}")):
            assert not caplog.text
            tokenizer = TokenizerConfig(chat_template=template)
            loaded = load_tokenizer(PolicyConfig(model_name=str(tmp_path / name), tokenizer=tokenizer))
            assert loaded.chat_template == (template or own)
    assert replaces in caplog.text


def sent(function: Any, *arguments: object) -> Callable[[], Any]:
    """Calls a function as another process would."""
    return lambda: pickle.loads(pickle.dumps(function(*arguments)))  # noqa: S301


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_texts_are_read_as_tokenizer_json_says(kind: str, name: str, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """As DeepSeek-R1-Distill-Llama is published: byte-level, with a class that replaces spaces in its own way. Llama 3's
    asks to remove spaces; transformers would warn that it ignores that."""
    warner = logging.getLogger("transformers.tokenization_utils_tokenizers")
    monkeypatch.setattr(warner, "warning_once", warner.warning, raising=False)
    monkeypatch.setattr(warner, "handlers", [caplog.handler])
    text = "what is the answer\n to  12 and 34?"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([text] * 9, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    config |= {"clean_up_tokenization_spaces": True, "tokenizer_class": name}
    config.pop("backend", None)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 300}))
    (tmp_path / "final_model").mkdir()
    for directory in ("model", "final_model"):
        policy = PolicyConfig(model_name=str(tmp_path / directory))
        tokenizer = load_tokenizer(policy, sent)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == made.encode(text, add_special_tokens=False).ids
        assert (tokenizer.decode(tokenizer(text)["input_ids"]), tokenizer.eos_token) == (text, "</s>")
        assert tokenizer.clean_up_tokenization_spaces and not caplog.text
        if directory == "model":
            run_model.save_tokenizer(policy, tokenizer, tmp_path / "final_model")
    run = configured({"model_name": str(tmp_path / "model"), "generation": {"stop_strings": ["and 34"]}})
    engines = prepared_config(run, Inputs(run, {}, tokenizer, {}), tmp_path / "init_model").policy.tokenizer.name
    assert AutoTokenizer.from_pretrained(engines)(text)["input_ids"] == tokenizer(text)["input_ids"]
    files = [tmp_path / directory / "tokenizer.json" for directory in ("model", "final_model")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_full_disk_is_one_error_that_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = MagicMock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("dagrl.run.model.replace_directory", full)
    with pytest.raises(ConfigError, match=r"output_dir: cannot write the first model, 0 MiB, .*No space left on device"):
        written(tmp_path / "a")
    assert not list(tmp_path.iterdir())


NAME, REVISION = "tester/tiny", "f" * 40
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"


class FakeHub(ThreadingHTTPServer):
    """Serves one model as huggingface.co does. `asked` are the paths that were requested."""

    def __init__(self, directory: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{NAME}/tree"):
            sizes = {name: {"size": len(held), "oid": _sha1(held)} for name, held in self.server.files.items()}
            content = json.dumps([{"type": "file", "path": name, **size} for name, size in sizes.items()]).encode()
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            content = json.dumps({"id": NAME, "sha": REVISION, "siblings": siblings}).encode()
        elif path.startswith(f"/{NAME}/resolve/") and name in self.server.files:
            content = self.server.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint with a chat template, and a file that a run does not need."""
    directory = tmp_path_factory.mktemp("made") / "model"
    letters = "".join(chr(code) for code in range(32, 127))
    write_random_model(INIT, character_tokenizer(letters, TEMPLATE), directory)
    (directory / "pytorch_model.bin").write_bytes(b"the same weights again")
    return directory


@contextmanager
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(model) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
        server.shutdown()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(tmp_path: Path, name: str = NAME, **data: object) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "response": "2"}\n' * 4)
    sections = {"policy": {"model_name": name}, "data": {"path": str(tmp_path / "train.jsonl"), **data}}
    return Config.model_validate({"name": "run", "algorithm": "sft", "output_dir": str(tmp_path), **sections})


def test_a_model_is_downloaded_once_and_found_offline(model: Path, cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with hub(model, monkeypatch) as server:
        found, origins = with_local_models(config(tmp_path))
        assert not any("pytorch_model.bin" in path for path in server.asked), "only safetensors are read"
    directory = Path(str(found.policy.model_name))
    assert directory.is_relative_to(cache) and directory.name == REVISION
    assert origins == {"policy.model_name": f"{NAME} on the Hugging Face Hub, revision {REVISION}"}
    with safe_open(directory / "model.safetensors", "np") as read, safe_open(model / "model.safetensors", "np") as made:
        assert list(read.keys()) == list(made.keys())
    again, _ = with_local_models(config(tmp_path))  # the server is gone
    assert again == found
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert with_local_models(config(tmp_path))[0] == found


def test_an_unknown_id_names_both_places(model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_local_models(config(tmp_path, str(model))) == (config(tmp_path, str(model)), {}), "a directory is taken"
    with hub(model, monkeypatch), pytest.raises(ConfigError, match=r"'tester/none' is neither a directory .* nor a model"):
        with_local_models(config(tmp_path, "tester/none"))


def test_a_hub_out_of_reach_is_asked_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client's retries would take 23 s."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: pytest.fail("the client retries"))
    with pytest.raises(ConfigError, match=rf"'{NAME}' is neither a directory"):
        preflight(config(tmp_path))
    with pytest.raises(DataError, match=r"cannot read 'tester/none' as a Hugging Face dataset"):
        load_splits(DataConfig(path="tester/none"))


def test_a_dry_run_saves_the_origin(model: Path, cache: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path).model_dump(mode="json", exclude_unset=True)))
    with hub(model, monkeypatch):
        assert main(["train", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"# derived: {NAME} on the Hugging Face Hub, revision {REVISION}\n  model_name: {cache}" in shown
    assert "# derived: the tokenizer has a chat template\n  apply_chat_template: true\n" in shown


def test_plain_prompts_are_rendered_by_the_chat_template(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = preflight(config(tmp_path, str(model), system_prompt="Add."))
    row = inputs.demonstrations[0]
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    whole = [*messages, {"role": "assistant", "content": "2"}]
    end = tokenizer.eos_token_id  # the template writes none
    assert row.tokens.tolist() == [*tokenizer.apply_chat_template(whole, return_dict=False), end]
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    learned = tokenizer.decode(row.tokens[row.loss_mask == 1])
    assert opened + learned == tokenizer.apply_chat_template(whole, tokenize=False) + "<eos>"
    plain = preflight(config(tmp_path, str(model), apply_chat_template=False)).demonstrations[0]
    assert tokenizer.decode(plain.tokens) == "1+12<eos>"


def test_a_conversation_keeps_its_own_system_message(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    lines = [{"messages": turns}, {"messages": [{"role": "system", "content": "own"}, *turns]}] * 2
    made = config(tmp_path, str(model), system_prompt="given", val_fraction=0.0)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    inputs = preflight(made)
    texts = [inputs.tokenizer.decode(row.tokens) for row in inputs.demonstrations[:2]]
    assert texts == ["[system]given[user]hi[assistant]yes<eos>", "[system]own[user]hi[assistant]yes<eos>"]


@pytest.mark.parametrize("data", [{"system_prompt": "x", "apply_chat_template": False}, {"apply_chat_template": True}])
def test_a_system_prompt_needs_a_chat_template(data: dict[str, object], model: Path, tmp_path: Path) -> None:
    made = config(tmp_path, str(model), **data)
    if data["apply_chat_template"]:  # of a tokenizer without a template
        write_random_model(INIT, character_tokenizer("12+"), tmp_path / "plain")
        made = config(tmp_path, str(tmp_path / "plain"), **data)
    with pytest.raises(ConfigError, match=r"data\.system_prompt is set, but|but the tokenizer has no chat template"):
        preflight(made)
