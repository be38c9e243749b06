"""Rows with images have the tokens and masks of the model's own processor.

Truths: `processor.apply_chat_template(tokenize=True, return_dict=True)` with the images themselves, its mask of what the
template marks as generated, and transformers' `load_image`.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Image as HubImage, List, Value
from hypothesis import given, settings, strategies as st
from PIL import Image
from pyarrow import parquet
from transformers.image_utils import load_image

from dagrl.config import DataConfig, ImagesConfig
from dagrl.data import Example, tokenization
from dagrl.data.chat import chat_of
from dagrl.data.examples import preference_of, read_examples
from dagrl.data.media import MediaProcessor, MediaStore, Medium, RowMedia, fitting, id_of, with_fullest
from dagrl.data.tokenization import Demonstration, Prompt, digest_of, encode_demonstrations, encode_prompts
from dagrl.errors import ConfigError, DataError
from dagrl.runtime.shapes import Batch
from tests.unit.data.processors import FAMILIES, Family, open_medium, processor_of

SIZES = [(40, 50), (16, 16), (90, 31), (40, 50)]
"""Heights and widths. Two images are of one size, but not equal."""

QUESTION, ANSWER = "Which is it?", "it is the hello"


def picture(number: int) -> Image.Image:
    height, width = SIZES[number]
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(number: int) -> dict[str, Any]:
    return {"type": "image", "image": f"images/{number}.png"}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": [image(0), text(QUESTION)]}, {"role": "assistant", "content": ANSWER}],
    "several": [
        {"role": "user", "content": [text("a\n\n"), image(0), image(3), text("\n\nhello"), image(2)]},
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": [text("and "), image(1)]},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "it"},
        {"role": "assistant", "content": "\u4e00 5"},
    ],
    "the same twice": [
        {"role": "user", "content": [image(1), image(1), text(QUESTION)]},
        {"role": "assistant", "content": ANSWER},
    ],
    "none": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    (directory / "images").mkdir()
    for number in range(len(SIZES)):
        (directory / "images" / f"{number}.png").write_bytes(png(number))
    return directory


def read(folder: Path, rows: Sequence[Any], **keys: Any) -> list[Example]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_examples(path, "", DataConfig(path=str(path), **keys))


def turns_of(family: Family, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation as the processor takes it: with the images themselves, and texts as its template takes them."""
    turns = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and "Idefics" in family.name:
            content = [text(content)]
        if isinstance(content, list):
            content = [{**one, "image": picture(number_of(one))} if one["type"] == "image" else one for one in content]
        turns.append({**message, "content": content})
    return turns


def truth(family: Family, messages: Sequence[dict[str, Any]], *, opened: bool = False) -> dict[str, Any]:
    """Returns what the processor makes of a conversation."""
    processor, wanted = processor_of(family, marked=True), {"tokenize": True, "return_dict": True, "processor_kwargs": {}}
    masks = {"add_generation_prompt": opened, "return_assistant_tokens_mask": not opened}
    output = processor.apply_chat_template([turns_of(family, messages)], **wanted, **masks)
    return {name: list(values[0]) for name, values in output.items() if name in ("input_ids", "assistant_masks")}


def demonstrations(family: Family, examples: Sequence[Example], turns: Any = "all") -> list[Demonstration]:
    processor = MediaProcessor(processor_of(family))
    return encode_demonstrations(examples, processor.tokenizer, turns, processor)


def check_media(family: Family, row: Demonstration | Prompt, numbers: Sequence[int]) -> None:
    """Checks the places of a row's images: as many tokens each as the processor writes for that image alone."""
    processor = processor_of(family)
    standing = np.isin(row.tokens, processor.image_token_ids)
    if not numbers:
        assert row.media is None and not standing.any()
        return
    assert np.array_equal(row.media.tokens != 0, standing)
    owners = [abs(int(one)) for one in row.media.tokens[standing]]
    alone = [processor(text=[processor.image_token], images=[[picture(number)]])["input_ids"][0] for number in numbers]
    counts = [int(np.isin(ids, processor.image_token_ids).sum()) for ids in alone]
    ids = [medium.id for medium in row.media.items]
    assert owners == [one for one, count in zip(ids, counts, strict=True) for _ in range(count)]
    assert (row.media.tokens < 0).sum() == len(numbers)
    for medium, number in zip(row.media.items, numbers, strict=True):
        assert np.array_equal(np.asarray(open_medium(medium)), np.asarray(picture(number)))


def numbers_of(messages: Sequence[dict[str, Any]]) -> list[int]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [number_of(part) for part in parts if part["type"] == "image"]


def number_of(part: dict[str, Any]) -> int:
    return int(part["image"][len("images/")])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_and_prompts_have_the_tokens_of_the_processor(family: Family, name: str, folder: Path) -> None:
    messages, processor = CONVERSATIONS[name], MediaProcessor(processor_of(family))
    examples = read(folder, [{"messages": messages}])
    (row,), (prompt,) = demonstrations(family, examples), encode_prompts(examples, processor.tokenizer, processor)
    expected = truth(family, messages)
    assert row.tokens.tolist() == expected["input_ids"]
    assert row.loss_mask.tolist() == expected["assistant_masks"]
    check_media(family, row, numbers_of(messages))
    assert prompt.tokens.tolist() == truth(family, messages[:-1], opened=True)["input_ids"]
    check_media(family, prompt, numbers_of(messages[:-1]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_turn_has_the_images_before_it(family: Family, folder: Path) -> None:
    messages = CONVERSATIONS["several"]
    rows = demonstrations(family, read(folder, [{"messages": messages}]), "each")
    for row, count in zip(rows, (2, 4, 6), strict=True):
        expected = truth(family, messages[:count])
        assert row.tokens.tolist() == expected["input_ids"]
        check_media(family, row, numbers_of(messages[:count]))


PART = st.integers(0, len(SIZES) - 1) | st.sampled_from(["hello", "a\n", "\n\n", " it", "\u4e00"])


@settings(max_examples=25, deadline=None)
@given(family=st.sampled_from(FAMILIES), contents=st.lists(st.lists(PART, min_size=1), min_size=1, max_size=3))
def test_any_conversation(family: Family, contents: list[list[Any]], folder: Path) -> None:
    messages: list[dict[str, Any]] = []
    for content in contents:
        parts = [image(part) if isinstance(part, int) else text(part) for part in content]
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": ANSWER}]
    (row,) = demonstrations(family, read(folder, [{"messages": messages}]))
    expected = truth(family, _joined(messages))
    assert row.tokens.tolist() == expected["input_ids"]
    assert row.loss_mask.tolist() == expected["assistant_masks"]


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the parts of turns without images, as everywhere."""
    turns = []
    for turn in messages:
        parts = turn["content"]
        joins = isinstance(parts, list) and not any(part["type"] == "image" for part in parts)
        turns.append({**turn, "content": "".join(part["text"] for part in parts)} if joins else turn)
    return turns


def _jsonl(folder: Path, source: Any) -> Path:
    path = folder / "sources.jsonl"
    turn = {"role": "user", "content": [source, text(QUESTION)]}
    path.write_text(json.dumps({"messages": [turn, CONVERSATIONS["one"][1]]}))
    return path


def _parquet(folder: Path) -> Path:
    """Writes a file in which the images of parts are bytes."""
    of_image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", of_image)])
    turn = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    parts = [{"type": "image", "text": None, "image": {"bytes": png(0), "path": None}}, {**text(QUESTION), "image": None}]
    answer = [{**text(ANSWER), "image": None}]
    rows = [[{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]]
    parquet.write_table(pa.table({"messages": pa.array(rows, pa.list_(turn))}), folder / "bytes.parquet")
    return folder / "bytes.parquet"


def _hub(folder: Path, kind: Any, value: Any) -> Path:
    """Saves a dataset with a column of images, in the way of those on the Hub."""
    features = Features({"prompt": Value("string"), "response": Value("string"), "image": kind})
    rows = {"prompt": [QUESTION], "response": [ANSWER], "image": [value]}
    Dataset.from_dict(rows, features=features).save_to_disk(folder / "hub")
    return folder / "hub"


def at_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"


SOURCES: dict[str, Any] = {
    "a path": lambda folder: _jsonl(folder, image(0)),
    "an absolute path": lambda folder: _jsonl(folder, {"type": "image", "path": str(folder / "images" / "0.png")}),
    "a file URL": lambda folder: _jsonl(folder, at_url((folder / "images" / "0.png").as_uri())),
    "a data URL": lambda folder: _jsonl(folder, at_url(data_url(0))),
    "bytes in Parquet": _parquet,
    "a column of images": lambda folder: _hub(folder, HubImage(), picture(0)),
    "a column of lists": lambda folder: _hub(folder, List(HubImage()), [picture(0)]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_images_come_from_files_bytes_urls_and_columns(source: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "images").symlink_to(folder / "images")
    path, column = SOURCES[source](tmp_path), "image" if "column" in source else None
    (example,) = read_examples(path, "train", DataConfig(path=str(path), image_key=column))
    (row,) = demonstrations(FAMILIES[0], [example])
    assert row.tokens.tolist() == truth(FAMILIES[0], CONVERSATIONS["one"])["input_ids"]
    check_media(FAMILIES[0], row, [0])


def test_parts_without_data_take_the_images_of_the_column_in_order(folder: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, text("and"), {"type": "image"}]}, CONVERSATIONS["one"][1]]
    rows = [{"messages": messages, "images": ["images/2.png", "images/1.png"]}]
    (row,) = demonstrations(FAMILIES[0], read(folder, rows, image_key="images"))
    check_media(FAMILIES[0], row, [2, 1])


def test_both_answers_of_a_preference_have_the_images(folder: Path) -> None:
    path = folder / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION, "chosen": ANSWER, "rejected": "the", "image": "images/0.png"}))
    (example,) = read_examples(path, "", DataConfig(path=str(path), image_key="image"), preference_of)
    processor = MediaProcessor(processor_of(FAMILIES[0]))
    (pair,) = tokenization.encode_preferences([example], processor.tokenizer, scored=True, processor=processor)
    for answer, content in ((pair.chosen, ANSWER), (pair.rejected, "the")):
        expected = truth(FAMILIES[0], [CONVERSATIONS["one"][0], {"role": "assistant", "content": content}])["input_ids"]
        assert answer.tokens[:-1].tolist() == expected
        assert answer.media is not None and len(answer.media.tokens) == len(answer)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_large_images_are_scaled_down_before_the_processor(family: Family, folder: Path) -> None:
    (example,) = read(folder, [{"messages": CONVERSATIONS["one"]}], images=ImagesConfig(max_pixels=600))
    (row,) = demonstrations(family, [example])
    small = open_medium(example.media[0])
    assert small.height * small.width <= 600 and (small.height, small.width) == example.media[0].size
    assert small.width / small.height == pytest.approx(50 / 40, rel=0.1)
    processor = processor_of(family)
    turns = turns_of(family, CONVERSATIONS["one"])
    turns[0]["content"][0]["image"] = small
    expected = processor.apply_chat_template([turns], tokenize=True, return_dict=True)
    assert row.tokens.tolist() == list(expected["input_ids"][0])


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), most=st.integers(1, 10**7))
def test_a_size_within_the_limit_stays(height: int, width: int, most: int) -> None:
    small = fitting((height, width), most)
    assert 1 <= small[0] * small[1] <= most or min(small) == 1
    assert small == (height, width) if height * width <= most else fitting(small, most) == small


def test_images_are_read_as_transformers_reads_them(folder: Path) -> None:
    sideways = Image.Exif()
    sideways[0x0112] = 6
    picture(2).save(folder / "images" / "sideways.jpg", exif=sideways)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 4), np.uint8)).save(folder / "images" / "alpha.png")
    picture(0).quantize(8).save(folder / "images" / "palette.gif")
    for name in ("sideways.jpg", "alpha.png", "palette.gif"):
        turn = {"role": "user", "content": [{"type": "image", "image": f"images/{name}"}]}
        (example,) = read(folder, [{"messages": [turn, CONVERSATIONS["one"][1]]}])
        (medium,) = example.media
        expected = np.asarray(load_image(str(folder / "images" / name)))
        assert np.array_equal(np.asarray(open_medium(medium)), expected)
        assert medium.size == expected.shape[:2]


def test_other_images_make_other_data(folder: Path) -> None:
    contents = [[image(number), text(QUESTION)] for number in (0, 3, 0)]
    rows = [{"messages": [{"role": "user", "content": content}, CONVERSATIONS["one"][1]]} for content in contents]
    one, other, again = demonstrations(FAMILIES[0], read(folder, rows))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert digest_of([one]) != digest_of([other])
    assert digest_of([one]) == digest_of([again])


BROKEN: dict[str, tuple[Any, str]] = {
    "a missing file": ("images/9.png", r"cannot read the file '.*images/9\.png': No such file"),
    "no image": ("rows.txt", r"rows\.txt': not an image that Pillow can read \(of no format that it knows\)"),
    "a truncated file": ("cut.png", r"cut\.png': not an image that Pillow can read \("),
    "an address": ("https://example.com/1.png", r"images are not fetched"),
    "a bad data URL": ("data:image/png;base64,%%", r"not a data URL in base64"),
    "a number": (5, r"is 5; expected: a file, a data URL, bytes"),
    "no data": (None, r"has no data; expected: a file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_an_error_with_its_line_or_dropped(name: str, folder: Path, caplog: Any) -> None:
    source, expected = BROKEN[name]
    (folder / "rows.txt").write_text("text")
    (folder / "cut.png").write_bytes(png(0)[:-900])
    bad = {"role": "user", "content": [image(0), {"type": "image", "image": source}]}
    rows = [{"messages": CONVERSATIONS["one"]}, {"messages": [bad, CONVERSATIONS["one"][1]]}]
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: message 1, image 2.*{expected}"):
        read(folder, rows)
    assert len(read(folder, rows, invalid="drop")) == 1
    assert "dropped 1 of 2" in caplog.text


def test_a_size_that_the_processor_rejects_is_an_error_with_its_line(folder: Path) -> None:
    Image.new("RGB", (600, 1)).save(folder / "strip.png")
    strip = {"role": "user", "content": [{"type": "image", "image": "strip.png"}]}
    examples = read(folder, [{"messages": CONVERSATIONS["one"]}, {"messages": [strip, CONVERSATIONS["one"][1]]}])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: \w+ rejects an image: .* aspect ratio .* got 600"):
        demonstrations(FAMILIES[0], examples)


def test_a_long_row_says_how_much_of_it_is_images(folder: Path) -> None:
    (row,) = demonstrations(FAMILIES[0], read(folder, [{"messages": CONVERSATIONS["one"]}]))
    count = truth(FAMILIES[0], CONVERSATIONS["one"])["input_ids"].count(processor_of(FAMILIES[0]).image_token_id)
    with pytest.raises(DataError, match=rf"{len(row)} tokens \({count} of images; data.images.max_pixels makes them few"):
        tokenization.keep_fitting([row], 5, "error", "the bucket", "policy.x")


def test_a_column_of_which_no_part_or_row_has_the_images_is_an_error(folder: Path) -> None:
    turns = [{"role": "user", "content": [{"type": "image"}]}, CONVERSATIONS["one"][1]]
    more = {"messages": turns, "image": ["images/0.png", "images/1.png"]}
    other = {"prompt": QUESTION, "response": ANSWER, "picture": "images/0.png"}
    none = r"no row has an image in 'image' \(data.image_key\); the columns are .*, picture"
    for row, says in ((more, "line 1 has 1 more images in 'image'"), (other, none)):
        with pytest.raises(DataError, match=says):
            read(folder, [row], image_key="image")


@pytest.mark.parametrize("kind, value", [(HubImage(), picture(0)), (List(HubImage()), [picture(0)])], ids=["one", "a list"])
def test_images_that_the_model_does_not_see_are_said(kind: Any, value: Any, tmp_path: Path, caplog: Any) -> None:
    path = _hub(tmp_path, kind, value)
    (example,) = read_examples(path, "train", DataConfig(path=str(path)))
    assert not any(message.media for message in example.messages)
    assert "has images in 'image' that the model does not see; set data.image_key=image" in caplog.text


def test_parts_of_other_kinds_and_images_of_the_assistant_are_errors(folder: Path) -> None:
    audio = "line 1: message 1 of 'messages', part 1 is .*; expected: a text, or an image"
    where = "images where the turn is not the assistant's"
    for role, part, expected in (("user", {"type": "input_audio"}, audio), ("assistant", image(0), where)):
        with pytest.raises(DataError, match=expected):
            read(folder, [{"messages": [{"role": role, "content": [part]}, CONVERSATIONS["one"][1]]}])


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_a_placeholder_in_a_text_is_an_error(family: Family, folder: Path) -> None:
    placeholder = processor_of(family).image_token
    turn = {"role": "user", "content": [image(0), text(f"what is {placeholder}?")]}
    with pytest.raises(DataError, match=r"line 1: the text of the conversation has 2 placeholders .* for 1 images"):
        demonstrations(family, read(folder, [{"messages": [turn, CONVERSATIONS["one"][1]]}]))


def test_a_model_without_a_processor_takes_no_images(folder: Path) -> None:
    tokenizer = chat_of(processor_of(FAMILIES[0]).tokenizer).tokenizer
    with pytest.raises(ConfigError, match="line 1 has images, but the model has no processor"):
        encode_demonstrations(read(folder, [{"messages": CONVERSATIONS["one"]}]), tokenizer)

    class Opaque:
        tokenizer = processor_of(FAMILIES[0]).tokenizer
        image_token = "<|image_pad|>"  # noqa: S105

    with pytest.raises(ConfigError, match="Opaque does not say what it writes for an image"):
        MediaProcessor(Opaque())  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [ImagesConfig(), ImagesConfig(max_pixels=600)])
def test_workers_see_the_images_that_were_read(limits: ImagesConfig, folder: Path, tmp_path: Path) -> None:
    """Also after a run has begun again, with files or bytes."""
    turn = {"role": "user", "content": [{"type": "image", "image": data_url(1)}, image(0)]}
    (example,) = read(folder, [{"messages": [turn, CONVERSATIONS["one"][1]]}], images=limits)
    for _ in range(2):
        MediaStore(tmp_path / "media", limits).add(example.media)
    for medium in example.media:
        found = MediaStore(tmp_path / "media", limits).open(medium.id)
        assert np.array_equal(np.asarray(found), np.asarray(open_medium(medium)))
        assert (found.height, found.width) == medium.size


def test_a_file_that_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(png(0))
    (example,) = read(tmp_path, [{"messages": CONVERSATIONS["one"]}])
    store = MediaStore(tmp_path / "media", ImagesConfig())
    store.add(example.media)
    (tmp_path / "images" / "0.png").write_bytes(png(3))
    with pytest.raises(DataError, match="has changed since the run read it"):
        store.open(example.media[0].id)
    (tmp_path / "images" / "0.png").unlink()
    with pytest.raises(DataError, match=r"cannot read the image '.*0\.png': No such file"):
        store.open(example.media[0].id)


def test_warm_ups_have_the_row_with_most_tokens_of_images(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media", ImagesConfig())
    assert store.fullest() is None
    media = [Medium(png(number), id_of(png(number)), SIZES[number]) for number in (0, 1)]
    store.add(media)
    one, other = (medium.id for medium in media)
    rows = [
        (np.array([5, 9, 9, 6]), RowMedia((media[0],), np.array([0, -one, one, 0]))),
        (np.array([5, 6, 7]), None),
        (np.array([9, 9, 9]), RowMedia((media[1],), np.array([-other, other, other]))),
    ]
    store.keep_fullest(rows)
    fields = {"tokens": np.full((2, 6), 1), "lengths": np.array([6, 3]), "media": np.full((2, 6), 4)}
    batch = with_fullest(Batch(fields), store.fullest())
    assert batch["tokens"].tolist() == [[1, 9, 9, 9, 1, 1], [1] * 6], "the second row has no room for the whole"
    assert batch["media"].tolist() == [[0, -other, other, other, 0, 0], [0] * 6]
    texts = Batch({"tokens": fields["tokens"], "lengths": fields["lengths"]})
    assert with_fullest(texts, store.fullest()) is texts
