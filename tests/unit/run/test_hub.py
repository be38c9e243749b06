"""Models by Hub id: downloaded by the real client from a double of the Hub, and found in the cache without it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from safetensors import safe_open

from dagrl.cli.main import main
from dagrl.config import Config, DataConfig, RandomInit
from dagrl.data import load_splits
from dagrl.errors import ConfigError, DataError
from dagrl.run.model import character_tokenizer, with_local_models, write_random_model
from dagrl.run.preflight import preflight

NAME, REVISION = "tester/tiny", "f" * 40
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
INIT = RandomInit(hf_config={"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2, **SHAPE})


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
