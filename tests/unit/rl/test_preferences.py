"""Losses of pairs against TRL's formulas (trl/trainer/dpo_trainer.py, 1.16); losses of the user's own; data of pairs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dagrl.config import Config, DataConfig
from dagrl.data import load_splits, open_sampler
from dagrl.data.examples import Example, judged_of, preference_of, with_chat, with_other_answers
from dagrl.data.tokenization import Preference, collate_pairs, encode_preferences, labels_of
from dagrl.errors import ConfigError, DataError
from dagrl.examples.kto import Kto
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.preferences import Pairs, PreferenceAlgorithm, pair_losses
from dagrl.rl.trial import try_algorithm
from dagrl.run.model import character_tokenizer
from tests.unit.data.test_data import TEMPLATE

PAIRS = 5
BETA = 0.3


def config_of(algorithm: str | type = "dpo", **preference: Any) -> Config:
    name = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__name__}"
    sections = {"policy": {}, "data": {}, "preference": preference}
    return Config.model_validate({"name": "t", "algorithm": name, **sections})


class Ipo(PreferenceAlgorithm):
    """A user's: Azar et al. 2023, equation 17, with lengths as in TRL."""

    columns = {"reference_logprobs": "reference_answer_sums"}

    def pair_loss(self, pairs: Pairs) -> tuple[Tensor, Mapping[str, Tensor]]:
        gap = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
        return (gap - 1 / (2 * self.config.preference.beta)) ** 2, {"gap": gap}


class WithoutAReference(Ipo):
    columns = {}


class OneNumber(PreferenceAlgorithm):
    def pair_loss(self, pairs: Pairs) -> Any:
        return (pairs.chosen - pairs.rejected).mean(), {}


class NotFinite(PreferenceAlgorithm):
    def pair_loss(self, pairs: Pairs) -> Any:
        return torch.log(pairs.chosen), {}  # of negative numbers


class Constant(PreferenceAlgorithm):
    def pair_loss(self, pairs: Pairs) -> Any:
        return torch.zeros_like(pairs.chosen_tokens), {}


def trl_sigmoid(logps: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    """`loss_type="sigmoid"`: sums are chosen then rejected, as TRL's batches."""
    chosen, rejected = (logps - reference).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def trl_ipo(logps: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    chosen, rejected = ((logps - reference) / tokens).chunk(2)
    return ((chosen - rejected - 1 / (2 * BETA)) ** 2).mean()


def trl_reward(scores: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
    """trl/trainer/reward_trainer.py, `compute_loss`."""
    chosen, rejected = scores.chunk(2)
    return -logsigmoid(chosen - rejected).mean()


Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
FORMULAS: dict[str, tuple[Config, Formula]] = {
    "sigmoid": (config_of(beta=BETA), trl_sigmoid),
    "reward": (config_of("reward_model"), trl_reward),
    "a user's": (config_of(Ipo, beta=BETA), trl_ipo),
}


def losses_of(config: Config, *columns: np.ndarray) -> Any:
    return pair_losses(algorithm_of(config), *columns)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_weights_are_those_of_the_formula(name: str) -> None:
    config, formula = FORMULAS[name]
    draw = np.random.default_rng(3)
    sums, fixed = (-9 * draw.random(2 * PAIRS) for _ in range(2))
    tokens = draw.integers(1, 9, 2 * PAIRS)
    actual = losses_of(config, sums, tokens, fixed)
    order = np.concatenate([np.arange(0, 2 * PAIRS, 2), np.arange(1, 2 * PAIRS, 2)])
    leaf = torch.tensor(sums[order], requires_grad=True)
    expected = formula(leaf, torch.tensor(fixed[order]), torch.tensor(tokens[order], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert actual.metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-12)
    np.testing.assert_allclose(actual.weights[order], gradient.numpy(), atol=1e-12)
    assert np.abs(actual.weights).min() > 1e-4


def test_metrics_of_dpo_are_those_of_trl() -> None:
    sums, fixed = np.array([-3.0, -5.0, -4.0, -5.0]), np.array([-4.0, -4.0, -3.0, -3.0])
    actual = losses_of(config_of(beta=BETA), sums, np.full(4, 2), fixed).metrics
    chosen, rejected = BETA * (1 - 1) / 2, BETA * (-1 - 2) / 2
    expected = {"accuracy": 1.0, "chosen_reward": chosen, "rejected_reward": rejected, "margin": 1.5 * BETA}
    assert {name: actual[f"preference/{name}"] for name in expected} == pytest.approx(expected)
    broken = losses_of(config_of(), np.array([-1.0, np.nan]), np.full(2, 3), np.zeros(2))
    assert np.isnan(broken.weights).all() and np.isnan(broken.metrics["loss"]), "no error of the loss"


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (WithoutAReference, "reads sums under the reference policy; name 'reference_logprobs' in the algorithm's `columns`"),
        (OneNumber, r"returned \[\] for 'loss'; expected: a value for each pair, \[2\]"),
        (NotFinite, "gives a loss or gradients that are not finite"),
        (Constant, "does not depend on `pairs.chosen` or `pairs.rejected`"),
        (PreferenceAlgorithm, "raised NotImplementedError"),
    ],
)
def test_losses_that_cannot_train_are_rejected(algorithm: type, says: str) -> None:
    try_algorithm(config_of(Ipo))
    with pytest.raises(ConfigError, match=says):
        try_algorithm(config_of(algorithm))


TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz []", chat_template=TEMPLATE)
USER = {"role": "user", "content": "a sum"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("right", "wrong one"))
FORMS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a sum", "chosen": "right", "rejected": "wrong one"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "prompt inside": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "prompt twice": {"prompt": "a sum", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "text and messages": {"prompt": [USER], "chosen": "right", "rejected": "wrong one"},
}


def pairs_of(path: Path, rows: list[dict[str, Any]], *, scored: bool = False) -> list[Preference]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), val_fraction=0, apply_chat_template=True)
    examples = [with_chat(row, config) for row in load_splits(config, preference_of).train]
    return encode_preferences(examples, TOKENIZER, scored=scored)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_pair_are_the_same_conversation(form: str, tmp_path: Path) -> None:
    (pair,) = pairs_of(tmp_path / "pairs.jsonl", [FORMS[form]])
    for answer, text in ((pair.chosen, "right"), (pair.rejected, "wrong one")):
        assert TOKENIZER.decode(answer.tokens) == f"[user]a sum[assistant]{text}{TOKENIZER.eos_token}"
        learned = answer.tokens[answer.loss_mask > 0]
        assert TOKENIZER.decode(learned) == f"{text}{TOKENIZER.eos_token}"
    batch = collate_pairs([pair, pair])
    assert batch["lengths"].tolist() == [len(pair.chosen), len(pair.rejected)] * 2


def test_a_score_is_read_after_the_whole_sequence(tmp_path: Path) -> None:
    plain, pair = (pairs_of(tmp_path / "pairs.jsonl", [FORMS["text"]], scored=scored)[0] for scored in (False, True))
    for answer, whole in ((pair.chosen, plain.chosen), (pair.rejected, plain.rejected)):
        np.testing.assert_array_equal(answer.tokens[:-1], whole.tokens)
        assert answer.loss_mask.tolist() == [0.0] * len(whole) + [1.0]


def test_a_position_is_valid_for_the_same_pairs_only(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path / "pairs.jsonl", [FORMS["text"], FORMS["text"] | {"rejected": "b"}])
    others = pairs_of(tmp_path / "others.jsonl", [FORMS["text"], FORMS["text"] | {"rejected": "c"}])
    state = open_sampler(pairs, DataConfig()).state()
    open_sampler(pairs, DataConfig()).restore(state)
    with pytest.raises(Exception, match="tokens, loss masks"):
        open_sampler(others, DataConfig()).restore(state)


def test_pairs_of_several_sources_have_their_task(tmp_path: Path) -> None:
    sources = {}
    for name, chosen, rejected in (("sums", "good", "rejected"), ("words", "chosen", "bad")):
        path, row = tmp_path / f"{name}.jsonl", {"prompt": name, chosen: "yes", rejected: "no"}
        path.write_text((json.dumps(row) + "\n") * 3)
        sources[name] = {"path": str(path), "val_fraction": 0, "chosen_key": chosen, "rejected_key": rejected}
    config = DataConfig.model_validate({"mixture": sources, "apply_chat_template": True})
    examples = [with_chat(example, config) for example in load_splits(config, preference_of).train]
    assert [pair.task for pair in encode_preferences(examples, TOKENIZER)] == ["sums"] * 3 + ["words"] * 3


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: no key 'rejected'; found 'prompt', 'chosen'. Set data.rejected_key"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "line 2: 'rejected' is empty; expected: text"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "line 2: 'rejected' is None; expected: text"),
        ({"chosen": "b", "rejected": "c"}, "line 2: no key 'prompt'"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "line 2: 'rejected' has the roles user; expected: a conversation"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": []}, r"line 2: 'rejected' is \[\]; expected: a list of messages"),
    ],
)
def test_rows_that_are_not_pairs_are_rejected(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        pairs_of(tmp_path / "pairs.jsonl", [FORMS["text"], row])


def test_the_kto_example_is_the_formula_of_trl() -> None:
    """trl/trainer/kto_trainer.py, `_compute_loss`: answers of other rows estimate the KL."""
    draw = torch.Generator().manual_seed(2)
    rows, before = (-3 * torch.rand(2 * PAIRS, generator=draw, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([1, 0, 0, 1, 1], dtype=torch.bool)
    kept = config_of(Kto, beta=BETA).with_keys({"loss_fn.args": {"undesirable_weight": 1.5}})
    rows.requires_grad_()
    gained, others = (rows - before).view(-1, 2).T
    kl = others.mean().detach().clamp(min=0)
    assert kl > 0.1
    good, bad = 1 - torch.sigmoid(BETA * (gained[labels] - kl)), 1 - torch.sigmoid(BETA * (kl - gained[~labels]))
    expected = torch.cat([good, 1.5 * bad]).mean()
    (gradient,) = torch.autograd.grad(expected, rows)
    sums = rows.detach().numpy()
    actual = pair_losses(Kto(kept), sums, np.full(2 * PAIRS, 3), before.numpy(), labels.double().numpy())
    assert actual.metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-12)
    np.testing.assert_allclose(actual.weights, gradient.numpy(), atol=1e-12)
    try_algorithm(kept)


def judged(path: Path, *rows: dict[str, Any]) -> list[Example]:
    path.write_text("".join(json.dumps({"prompt": "a", **row}) + "\n" for row in rows))
    config = DataConfig(path=str(path), val_fraction=0, response_key="completion", apply_chat_template=True)
    return [with_chat(row, config) for row in load_splits(config, judged_of).train]


def test_each_single_answer_is_beside_one_of_another_row(tmp_path: Path) -> None:
    rows = [{"prompt": text, "completion": [GOOD | {"content": text * 2}], "label": text in "ac"} for text in "abcd"]
    pairs = encode_preferences(with_other_answers(judged(tmp_path / "rows.jsonl", *rows), 0), TOKENIZER)
    assert labels_of(pairs).tolist() == [1, 0, 1, 0]  # type: ignore[union-attr]
    texts = [[TOKENIZER.decode(side.tokens) for side in (pair.chosen, pair.rejected)] for pair in pairs]
    end = TOKENIZER.eos_token
    assert [own for own, _ in texts] == [f"[user]{text}[assistant]{text * 2}{end}" for text in "abcd"]
    others = [other.removeprefix(f"[user]{text}[assistant]")[0] for text, (_, other) in zip("abcd", texts, strict=True)]
    assert sorted(others) == [*"abcd"] and all(own != other for own, other in zip("abcd", others, strict=True))


def test_rows_that_are_not_judged_are_rejected(tmp_path: Path) -> None:
    for row, says in (
        ({"completion": "b"}, "line 2: 'label' is None; expected: true or false. Set data.label_key"),
        ({"completion": "b", "label": "good"}, "line 2: 'label' is 'good'; expected: true or false"),
        ({"label": True}, "line 2: no key 'completion'"),
    ):
        with pytest.raises(DataError, match=says):
            judged(tmp_path / "rows.jsonl", {"completion": "b", "label": False}, row)
