# ruff: noqa: E501  # templates
"""Tokenizers and chat templates in the shapes of published ones, small enough to build in a test.

A template is shortened to what decides about tokens: what opens and ends turns, where tools, calls and results stand, and
what is left out of earlier turns. `end` is the token that a turn ends with, from the model's own documentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = ("h e", "l l", "he ll", "hell o", "i t", "t h", "th e", "\n \n", "\n \n\n", "a n", "an d", "> \n", "= 5")
"""Merges of two texts. Those with a space or a newline are the ones that meet the edges of turns."""


@dataclass(frozen=True)
class Kind:
    """A tokenizer and a template. `again` says that the template only appends, `writes_end` that it ends the last turn, and
    `ends_between` that it ends others.
    """

    name: str
    tokenizer: str
    end: str
    template: str
    added: Sequence[str | AddedToken] = ()
    bos: str = ""
    eos: str = "<|endoftext|>"
    again: bool = True
    opens_alike: bool = True
    tools: bool = True
    appends_eos: bool = False
    writes_end: bool = True
    ends_between: bool = True

    @property
    def stops(self) -> set[str]:
        return set(self.end.split())


def _spelled(letters: Mapping[str, str]) -> tuple[list[str], list[tuple[str, str]]]:
    pairs = []
    for merge in MERGES:
        left, right = merge.split(" ", 1)
        pairs.append(tuple("".join(letters.get(letter, letter) for letter in part) for part in (left, right)))
    return [left + right for left, right in pairs], pairs  # type: ignore[return-value]


def _byte_level(kind: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = _spelled({" ": "\u0120", "\n": "\u010a"})
    spaced = [("\u0120", "the"), ("\u0120", "and")]
    vocabulary = [*alphabet, *words, *(left + right for left, right in spaced)]
    merges = [*merges, *spaced]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(dict.fromkeys(vocabulary))}, merges))
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=kind != "tiktoken")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(kind: str) -> Tokenizer:
    letters = "\u2581\n" + "\t" * (kind == "gemma") + "".join(map(chr, range(33, 127)))
    words, merges = _spelled({" ": "\u2581"})
    spaced = [("\u2581", "the"), ("\u2581", "and"), ("\u2581", "it")]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words, *(a + b for a, b in spaced)]
    if kind != "gemma":
        pieces = [piece for piece in pieces if "\n" not in piece]
        merges = [pair for pair in merges if "\n" not in pair[0] + pair[1]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    if kind == "unigram":
        scores = [(piece, -1.0 * (number > 0) - 0.01 * number + len(piece)) for piece, number in vocabulary.items()]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        bpe = models.BPE(vocabulary, [*merges, *spaced], unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # noqa: S106
        tokenizer = Tokenizer(bpe)
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    else:
        scheme = {"first": "first", "unigram": "always", "never": "never"}[kind]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=kind == "unigram")
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [] if kind in ("gemma", "never") else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([*decoding, *strip])
    return tokenizer


@cache
def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    made = _byte_level(kind.tokenizer) if kind.tokenizer in ("gpt2", "nfc", "tiktoken") else _sentencepiece(kind.tokenizer)
    names = {"eos_token": kind.eos} | ({"bos_token": kind.bos} if kind.bos else {})
    tokens = dict.fromkeys([*names.values(), *map(str, kind.added)])
    given = {str(token): token for token in kind.added}
    made.add_special_tokens([given.get(token, AddedToken(token, normalized=False)) for token in tokens])
    options = {**names, "clean_up_tokenization_spaces": False, "add_eos_token": kind.appends_eos}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **options)
    fast.chat_template = kind.template
    return fast


def _calls(before: str, after: str) -> str:
    """A loop over a turn's calls as JSON objects."""
    call = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    return f"{{% for c in m.tool_calls or [] %}}{before}{call}{after}{{% endfor %}}"


_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"

CHATML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content or '' }}{% endif %}"
    + _calls("\n<tool_call>\n", "\n</tool_call>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

_THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
) + CHATML.replace("{{ m.content or '' }}", "{% if m.role == 'assistant' and loop.index0 > ns.last %}" + _THOUGHT)
QWEN35 = CHATML.replace("{{ m.content or '' }}", "{% if m.role == 'assistant' %}" + _THOUGHT)
QWEN35 = QWEN35.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' }}{% endif %}{% endfor %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    '{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception(1) }}{% elif m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{% if loop.first and tools %}"
    + _TOOLS
    + "\n\n{% endif %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
DATED = LLAMA3.replace(
    "{{ bos_token }}",
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string or '26 Jul 2024' }}<|eot_id|>",
)

LLAMA4 = (
    "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content | trim }}"
    + _calls("<|python_start|>", "<|python_end|>")
    + "<|eot|>{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first if loop.first }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

GEMMA4 = (
    "{{ bos_token }}{% if tools %}<|turn>system\n" + _TOOLS + "<turn|>\n{% endif %}{% for m in messages %}"
    "{% set before = messages[loop.index0 - 1] if not loop.first else {} %}"
    "{% if m.role == 'tool' %}{{ '<|tool_response>' if not before.tool_calls }}response:f{{ '{' + m.content + '}' }}<tool_response|>"
    "{% else %}{{ '<|turn>' + m.role + '\n' if before.role != 'tool' }}{{ m.content | default('', true) | trim }}"
    + _calls("<|tool_call>", "<tool_call|>")
    + "{{ '<|tool_response>' if m.tool_calls else '<turn|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|turn>assistant\n' if add_generation_prompt and messages[-1].role != 'tool' }}"
)
GEMMA4_TOKENS = ("<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>")

MISTRAL1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL3 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | default('') | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "[TOOL_RESULTS] {{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    '{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}{% endfor %}]'
    "{{ eos_token }}{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_TOKENS = tuple(
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]".split()
)
TEKKEN = MISTRAL3.replace("[INST] {{", "[INST]{{").replace(" {{ m.content | trim }}", "{{ m.content }}")

PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI3_TOKENS = tuple(
    AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("system", "user", "assistant", "tool", "end")
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)

DEEPSEEK3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}<|tool_output_end|>"
    "{% elif m.content is none %}<|Assistant|>{% for c in m.tool_calls %}{{ '<|tool_call|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}{{ eos_token }}"
    "{% else %}<|Assistant|>{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
R1 = DEEPSEEK3.replace("m.content + eos_token", "m.content.split('</think>')[-1] + eos_token").replace(
    "%}<|Assistant|>{% endif", "%}<|Assistant|><think>\n{% endif"
)
R1_DISTILL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}<|tool_output_end|>"
    "{% elif m.content is none %}<|Assistant|>{% for c in m.tool_calls %}{{ ('\n' if not loop.first else '') + '<|tool_call|>' + c.function.name"
    " + '\n' + c.function.arguments + '<|tool_call_end|>' }}{% if not loop.first %}<|tool_calls_end|>{{ eos_token }}{% endif %}{% endfor %}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|><think>\n{% endif %}"
)
DEEPSEEK_TOKENS = (
    *("<|User|>", "<|Assistant|>", "<|tool_call|>", "<|tool_call_end|>", "<|tool_calls_end|>"),
    *("<|tool_output|>", "<|tool_output_end|>", "<think>", "</think>"),
)

GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}\n</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_TOKENS = tuple("[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <tool_call> </tool_call>".split())

HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% set ns = namespace(called='f') %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set ns.called = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")

NEMOTRON = (
    "{% for m in messages %}{{ {'system': '<extra_id_0>System', 'user': '<extra_id_1>User', 'assistant': '<extra_id_1>Assistant',"
    " 'tool': '<extra_id_1>Tool'}[m.role] }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<extra_id_1>Assistant\n{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{{ '\n' if not loop.last }}{% else %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    + _calls("<|tool_call|>", "")
    + "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
COMMAND = (
    "{{ bos_token }}{% for m in messages %}<|START|><|{{ {'assistant': 'CHATBOT', 'user': 'USER'}.get(m.role, 'SYSTEM') }}|>"
    "{% if m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<|END_OF_TURN|>"
    "{% endfor %}{% if add_generation_prompt %}<|START|><|CHATBOT|>{% endif %}"
)
COMMAND_A = "{{ bos_token }}<|START|><|SYSTEM|>Be brief.<|END_OF_TURN|>" + COMMAND.removeprefix("{{ bos_token }}").replace(
    "{% if add_generation_prompt %}<|START|><|CHATBOT|>{% endif %}", "<|START|><|CHATBOT|>"
)
METHARME = (
    "{{ bos_token }}{% for m in messages %}<|{{ 'model' if m.role == 'assistant' else m.role }}|>{{ m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)
COMMAND_TOKENS = tuple(
    "<|START|> <|CHATBOT|> <|USER|> <|SYSTEM|> <|START_RESPONSE|> <|END_RESPONSE|> <|END_OF_TURN|>".split()
)
SMOLLM3 = CHATML.replace(
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n",
    "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    "<|im_start|>{{ m.role }}\n",
    1,
).replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}", 1)
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}{{ c.id }}<|args|>{{ c.function.arguments if c.function.arguments is string"
    " else c.function.arguments | tojson }}{% endfor %}<|calls_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_KIMI = ("im_system", "im_user", "im_assistant", "im_tool", "im_middle", "im_end", "calls", "args", "calls_end")
KIMI_TOKENS = tuple(f"<|{name}|>" for name in _KIMI)
PLAIN_END = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}"
    "{{ eos_token }}{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

_APRIEL_CALLS = (
    "{% if m.tool_calls %}{% set last = loop.last %}{{ '\n' }}<tool_calls>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}{{ \', "id": "\' + c.id + \'"\' if not last }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>{% endif %}"
)
APRIEL = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    + _APRIEL_CALLS
    + "{{ '\n' }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
APRIEL16 = (
    "<|system|>\nReason.\n{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    + _APRIEL_CALLS
    + "{{ '\n' if m.role != 'assistant' else '\n<|end|>\n' if not loop.last }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
APERTUS = (
    "<|system_start|>Be brief.<|system_end|>{% for m in messages %}{% if m.role == 'user' and not loop.first %}<|assistant_end|>{% endif %}"
    "{{ '<|' + m.role + '_start|>' if m.role != 'tool' }}{{ m.content or '' }}{{ '<|user_end|>' if m.role == 'user' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START|><|{{ {'assistant': 'CHATBOT', 'user': 'USER'}.get(m.role, 'SYSTEM') }}|>"
    "{% if m.tool_calls %}Action:\n{{ m.tool_calls[0].function | tojson }}\n```\n{% elif m.role == 'tool' %}<results>\n{{ m.content }}"
    "</results><|END_OF_TURN|>{% else %}{{ m.content }}<|END_OF_TURN|>{% endif %}{% endfor %}<|START|><|SYSTEM|>Write {{ tools | length }} actions."
    "<|END_OF_TURN|>{% if add_generation_prompt %}<|START|><|CHATBOT|>{% endif %}"
)
COMMAND_MOE = (
    "{{ bos_token }}{% for m in messages %}<|START|><|{{ {'assistant': 'CHATBOT', 'user': 'USER'}.get(m.role, 'SYSTEM') }}|>"
    "{% if m.tool_calls %}"
    + _calls("<|START_ACTION|>", "<|END_ACTION|>")
    + "{% elif m.role == 'assistant' %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% else %}{{ m.content }}{% endif %}<|END_OF_TURN|>"
    "{% endfor %}{% if add_generation_prompt %}<|START|><|CHATBOT|><|START_THINKING|><|END_THINKING|>{% endif %}"
)
NEMOTRON_NANO = (
    "{% for m in messages %}<SPECIAL_11>{{ m.role }}\n{{ '<think>\n' if m.role == 'assistant' and loop.last and not m.tool_calls }}"
    "{{ m.content or '' }}"
    + _calls("<TOOLCALL>[", "]</TOOLCALL>")
    + "{{ '<SPECIAL_12>\n\n' if m.tool_calls and loop.last else '\n<SPECIAL_12>\n' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>assistant\n<think>\n{% endif %}"
)
R1_DISTILL_QWEN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}<|Assistant|>{% for c in m.tool_calls %}<|tool_call|>{{ c.function | tojson }}<|tool_call_end|>{% endfor %}"
    "{{ eos_token }}{% endif %}{% if m.role == 'assistant' and m.content is not none %}<|Assistant|>{{ m.content + eos_token }}{% endif %}"
    "{% if m.role == 'tool' %}<|tool_output|>{{ m.content }}<|tool_output_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|Assistant|>{% endif %}"
)
APERTUS_TOOLS = (
    "{% set ns = namespace(ours=false, listed=false) %}{% for m in messages %}"
    "{% if ns.listed and m.role != 'tool' and (m.role == 'user' or m.content is not none) %}]{% set ns.listed = false %}{% endif %}"
    "{% if m.role == 'user' %}{{ '<|assistant_end|>' if ns.ours }}{% set ns.ours = false %}<|user_start|>{{ m.content }}<|user_end|>"
    "{% elif m.role == 'assistant' %}{{ '<|assistant_start|>' if not ns.ours }}{% set ns.ours = true %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}"
    '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}{{ ", " if not loop.last }}'
    "{% endfor %}]<|tools_suffix|>{% endif %}"
    "{% else %}{{ ', ' if ns.listed else '[' }}{% set ns.listed = true %}{{ m.content }}{% endif %}{% endfor %}{{ ']' if ns.listed }}"
    "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
KIMI_K2 = (
    "{% set ns = namespace(made=0, told=0) %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content or '' if m.role != 'tool' }}"
    "{% for c in m.tool_calls or [] %}<|calls|>functions.{{ c.function.name }}:{{ ns.made }}<|args|>{{ c.function.arguments | tojson }}<|calls_end|>"
    "{% set ns.made = ns.made + 1 %}{% endfor %}{% if m.role == 'tool' %}## Return of functions.f:{{ ns.told }}\n{{ m.content }}"
    "{% set ns.told = ns.told + 1 %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MISTRAL_SYSTEM = MISTRAL3.replace(
    "{% for m in messages %}",
    "{% set rules = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}{% for m in messages %}",
).replace("[INST] {{ m.content }}", "[INST] {{ rules if loop.last }}{{ m.content }}")
BIELIK = CHATML.replace(
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n",
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' if m.role != 'tool' or loop.index0 % 2 == 0 }}",
)
GIGACHAT3 = (
    "{% for m in messages %}{{ m.role }}<|role_sep|>\n{{ m.content or '' }}<|message_sep|>\n\n{% if m.tool_calls %}function call<|role_sep|>\n"
    "{{ m.tool_calls[0].function | tojson }}<|message_sep|>\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant<|role_sep|>\n{% endif %}"
)
GLM_TRAINING = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>' if m.role == 'assistant' or loop.first or messages[loop.index0 - 1].role != 'assistant' }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}\n</tool_call>"
    "{% endfor %}{{ ('<|observation|>' if m.tool_calls else '<|user|>') if m.role == 'assistant' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWQ = CHATML.replace("{{ m.content or '' }}", "{{ m.content.strip() if not loop.last else m.content or '' }}")

IM_END = "<|im_end|>"
S: dict[str, Any] = {"bos": "<s>", "eos": "</s>"}
DEEPSEEK: dict[str, Any] = {"added": DEEPSEEK_TOKENS, "bos": "<|begin|>", "eos": "<|end|>"}
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
LLAMA4_TOKENS = ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>")
PHI4_TOKENS = tuple(AddedToken(f"<|im_{name}|>", lstrip=True, rstrip=True) for name in ("start", "sep", "end"))
METHARME_TURNS = ("<|model|>", "<|user|>")
GRANITE_TOKENS = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
NORMALIZED = tuple(AddedToken(token, normalized=True) for token in CHATML_TOKENS)
KINDS = (
    Kind("Qwen2.5", "nfc", IM_END, CHATML, CHATML_TOKENS),
    Kind("Qwen3", "nfc", IM_END, QWEN3, (*CHATML_TOKENS, "<think>", "</think>"), again=False),
    Kind("Qwen3.5", "nfc", IM_END, QWEN35, (*CHATML_TOKENS, "<think>", "</think>"), opens_alike=False),
    Kind("Yi", "gemma", IM_END, CHATML, CHATML_TOKENS),
    Kind("InternLM2", "legacy", IM_END, CHATML, CHATML_TOKENS, **S),
    Kind("Llama 2", "legacy", "</s>", LLAMA2, **S, tools=False),
    Kind("Llama 2, not legacy", "first", "</s>", LLAMA2, **S, tools=False),
    Kind("TinyLlama", "legacy", "</s>", ZEPHYR, **S, tools=False),
    Kind("Zephyr, EOS appended", "first", "</s>", ZEPHYR, **S, tools=False, appends_eos=True),
    Kind("Llama 3", "tiktoken", "<|eot_id|>", LLAMA3, LLAMA3_TOKENS, bos="<|begin_of_text|>"),
    Kind("Llama 3.1, dated", "tiktoken", "<|eot_id|>", DATED, LLAMA3_TOKENS, bos="<|begin_of_text|>"),
    Kind("Llama 4", "tiktoken", "<|eot|>", LLAMA4, LLAMA4_TOKENS, bos="<|begin_of_text|>"),
    Kind("Gemma", "gemma", "<end_of_turn>", GEMMA, GEMMA_TURNS, bos="<bos>", eos="<eos>", tools=False),
    Kind("Mistral v1", "legacy", "</s>", MISTRAL1, **S, tools=False),
    Kind("Mistral v3", "first", "</s>", MISTRAL3, MISTRAL_TOKENS, **S),
    Kind("Mistral tekken", "tiktoken", "</s>", TEKKEN, MISTRAL_TOKENS, **S),
    Kind("Phi-3", "legacy", "<|end|>", PHI3, PHI3_TOKENS, bos="<s>", tools=False),
    Kind("Phi-4-mini", "gpt2", "<|end|>", PHI3, tuple(map(str, PHI3_TOKENS)), tools=False),
    Kind("Phi-4", "gpt2", IM_END, PHI4, PHI4_TOKENS, tools=False),
    Kind("DeepSeek V3", "gpt2", "<|end|>", DEEPSEEK3, **DEEPSEEK),
    Kind("DeepSeek R1", "gpt2", "<|end|>", R1, **DEEPSEEK, opens_alike=False),
    Kind("R1-Distill", "gpt2", "<|end|>", R1_DISTILL, **DEEPSEEK, opens_alike=False),
    Kind("Gemma 4", "gemma", "<turn|> <|tool_response>", GEMMA4, GEMMA4_TOKENS, bos="<bos>", eos="<turn|>"),
    Kind("GLM-4.5", "tiktoken", "<|user|> <|observation|>", GLM, GLM_TOKENS, writes_end=False),
    Kind("gpt-oss", "tiktoken", "<|return|> <|call|>", HARMONY, HARMONY_TOKENS, again=False),
    Kind(
        "Nemotron", "unigram", "<extra_id_1>", NEMOTRON, ("<extra_id_0>", "<extra_id_1>"), **S, tools=False, writes_end=False
    ),
    Kind("OLMo", "gpt2", "<|endoftext|>", OLMO, bos="<|endoftext|>", tools=False),
    Kind("Granite", "gpt2", "<|end_of_text|>", GRANITE, GRANITE_TOKENS, eos="<|end_of_text|>"),
    Kind("Command", "gpt2", "<|END_OF_TURN|>", COMMAND, COMMAND_TOKENS, bos="<BOS>", tools=False),
    Kind("Command A", "gpt2", "<|END_OF_TURN|>", COMMAND_A, COMMAND_TOKENS, bos="<BOS>", tools=False),
    Kind("Metharme", "first", "</s>", METHARME, METHARME_TURNS, **S, again=False, tools=False, ends_between=False),
    Kind("SmolLM3, marked", "tiktoken", IM_END, SMOLLM3, CHATML_TOKENS, tools=False),
    Kind("Kimi", "tiktoken", IM_END, KIMI, KIMI_TOKENS, eos="[EOS]"),
    Kind("Vicuna", "never", "</s>", VICUNA, **S, tools=False),
    Kind("an end of plain text", "gpt2", "|", PLAIN_END, tools=False),
    Kind("normalized ends", "first", IM_END, CHATML, NORMALIZED, eos="</s>"),
)

_APRIEL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_APERTUS_TOKENS = tuple(f"<|{role}_{edge}|>" for role in ("user", "assistant", "system") for edge in ("start", "end"))
_APERTUS: dict[str, Any] = {"tokenizer": "gpt2", "eos": "<|assistant_end|>", "writes_end": False}
_MOE_TOKENS = tuple(f"<|{edge}_{part}|>" for edge in ("START", "END") for part in ("ACTION", "TEXT", "THINKING"))
_NANO: dict[str, Any] = {"tokenizer": "gpt2", "end": "<SPECIAL_12>", "template": NEMOTRON_NANO, "eos": "<SPECIAL_12>"}
_NANO_TOKENS = ("<SPECIAL_11>", "<SPECIAL_12>")
TWO_WAYS = {
    kind.name: replace(kind, again=False, opens_alike=kind.name == "QwQ")
    for kind in (
        Kind("Apriel-1.5", "tiktoken", "<|end|>", APRIEL, _APRIEL_TOKENS, eos="<|end|>"),
        Kind("Apriel-1.5, another EOS", "gpt2", "<|end|>", APRIEL, _APRIEL_TOKENS),
        Kind("Apriel-1.6", "tiktoken", "<|end|>", APRIEL16, _APRIEL_TOKENS, eos="<|end|>", writes_end=False),
        Kind("Apriel-1.6, another EOS", "tiktoken", "<|end|>", APRIEL16, _APRIEL_TOKENS, writes_end=False),
        Kind("Apertus", end="<|assistant_end|>", template=APERTUS, added=_APERTUS_TOKENS, tools=False, **_APERTUS),
        Kind("Command R+", "gpt2", "<|END_OF_TURN|>", COMMAND_R, COMMAND_TOKENS, bos="<BOS>", eos="<|END_OF_TURN|>"),
        Kind("Command MoE", "gpt2", "<|END_OF_TURN|>", COMMAND_MOE, (*COMMAND_TOKENS, *_MOE_TOKENS), bos="<BOS>"),
        Kind("Nemotron Nano", **_NANO, added=_NANO_TOKENS),
        Kind("Nemotron Nano, tags of tokens", **_NANO, added=(*_NANO_TOKENS, "<TOOLCALL>", "</TOOLCALL>")),
        Kind("R1-Distill-Qwen", "gpt2", "<|end|>", R1_DISTILL_QWEN, **DEEPSEEK),
        Kind("QwQ", "nfc", IM_END, QWQ, CHATML_TOKENS),
    )
}
"""Templates that write a turn, or how it begins, in two ways: with calls and without, or last and before others."""

WHOLE = [
    Kind(
        "Apertus, tools",
        end="<|assistant_end|> <|tools_suffix|>",
        template=APERTUS_TOOLS,
        added=(*_APERTUS_TOKENS[:4], "<|tools_prefix|>", "<|tools_suffix|>"),
        opens_alike=False,
        **_APERTUS,
    ),
    Kind("Kimi K2", "tiktoken", IM_END, KIMI_K2, KIMI_TOKENS),
    Kind("Mistral, system last", "legacy", "</s>", MISTRAL_SYSTEM, MISTRAL_TOKENS, **S, again=False),
    Kind("Bielik", "nfc", IM_END, BIELIK, CHATML_TOKENS),
    Kind("GLM-4.5, TRL", "tiktoken", "<|user|> <|observation|>", GLM_TRAINING, GLM_TOKENS),
]
"""Templates whose text of a reply depends on more than the turn before it, or opens what follows a turn as its end."""
