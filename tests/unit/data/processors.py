# ruff: noqa: E501  # templates
"""Processors of models that take images, in the shapes of published ones, from tokenizers built in a test.

Templates are the published ones, shortened to what stands in the text. They mark what an assistant's turn generates.
"""

from dataclasses import dataclass, replace
from functools import cache

from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import Gemma3Processor, Idefics3Processor, ProcessorMixin, Qwen3VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dagrl.data.media import Medium, decoded, without_videos
from tests.unit.data.published import CHATML_TOKENS, Kind, tokenizer_of

MARKS = "{% generation %}", "{% endgeneration %}"

QWEN3_VL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<end_of_turn>{% endgeneration %}{{ '\n' }}"
    "{% else %}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<start_of_image>{% elif c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
IDEFICS3 = (
    "<|begin_of_text|>{% for m in messages %}{{ m.role | capitalize }}:{% if m.role == 'assistant' %}{% generation %} {% for c in m.content %}{{ c.text }}{% endfor %}"
    "<end_of_utterance>{% endgeneration %}{{ '\n' }}{% else %}{% if m.content[0].type != 'image' %} {% endif %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

QWEN_TOKENS = (*CHATML_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
IDEFICS_TOKENS = (
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


@dataclass(frozen=True)
class Family:
    """A processor and what its template ends a turn with."""

    name: str
    kind: Kind


IDEFICS = Kind("Idefics3", "tiktoken", "<end_of_utterance>", IDEFICS3, IDEFICS_TOKENS, bos="<|begin_of_text|>")
FAMILIES = (
    Family("Qwen3-VL", Kind("Qwen3-VL", "nfc", "<|im_end|>", QWEN3_VL, QWEN_TOKENS)),
    Family("Gemma 3", Kind("Gemma 3", "gemma", "<end_of_turn>", GEMMA3, GEMMA_TOKENS, bos="<bos>", eos="<eos>")),
    Family("Idefics3", IDEFICS),
    Family("Idefics3, BOS by the tokenizer", replace(IDEFICS, template=IDEFICS3.removeprefix("<|begin_of_text|>"))),
)


@cache
def processor_of(family: Family, *, marked: bool = False) -> ProcessorMixin:
    """Builds the processor of a family; `marked`: its template says what is generated."""
    template = family.kind.template
    for mark in () if marked else MARKS:
        template = template.replace(mark, "")
    tokenizer = tokenizer_of(replace(family.kind, template=template))
    if family.name == "Qwen3-VL":
        images = Qwen2VLImageProcessorPil(min_pixels=16 * 16, max_pixels=64 * 64, patch_size=4, merge_size=2)
        return without_videos(Qwen3VLProcessor)(images, tokenizer, None, chat_template=template)
    if family.name == "Gemma 3":
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        tokenizer._set_model_specific_special_tokens(named)
        tokenizer.init_kwargs.update(named)
        size = {"height": 16, "width": 16}
        crops = Gemma3ImageProcessorPil(size=size, do_pan_and_scan=True, pan_and_scan_min_crop_size=16)
        return Gemma3Processor(crops, tokenizer, chat_template=template, image_seq_length=4)
    if "BOS" in family.name:
        bos, special = tokenizer.bos_token, [(tokenizer.bos_token, tokenizer.bos_token_id)]
        begins = TemplateProcessing(single=f"{bos} $A", pair=None, special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = begins
    tiles = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Idefics3Processor(tiles, tokenizer, image_seq_len=4, chat_template=template)


def open_medium(medium: Medium) -> Image.Image:
    image = decoded(medium.data if isinstance(medium.data, bytes) else medium.data.read_bytes())
    height, width = medium.size
    return image if (image.height, image.width) == medium.size else image.resize((width, height))
