"""Builds the bundled model's tokenizer: byte-pair merges over the tasks' own words, in the Gemma family's style.

The family's conventions are kept, so that code written for the real model meets the same things here: a space is `▁`,
characters outside the vocabulary fall back to bytes, and turns, channels, tools and images have control tokens.
Merges stay inside words of small letters, with at most one capital or one space in front: capitals, digits and
punctuation are always tokens of their own, because the tasks work on them one by one.

    python -m training.tokenizer FOLDER
"""

import argparse
import json
import random
import re
import string
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ddllm_vk.tasks import (
    ANIMALS,
    COLORS,
    CONSONANTS,
    FACTS,
    FIELDS,
    LINES,
    NAMES,
    TASKS,
    VOWELS,
    training_example,
)  # fmt: skip

VOCABULARY_SIZE = 1408
CONTROL_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>",
    "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>",
]  # fmt: skip
PAD, EOS, BOS, TURN_END = (CONTROL_TOKENS.index(token) for token in ("<pad>", "<eos>", "<bos>", "<turn|>"))
IMAGE_BEGIN, IMAGE, IMAGE_END = (CONTROL_TOKENS.index(token) for token in ("<|image>", "<|image|>", "<image|>"))

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part['type'] == 'image' -%}{{- '<|image|>' -}}
            {%- elif part['type'] == 'text' -%}{{- part['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools or enable_thinking -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if messages and messages[0]['role'] == 'system' -%}{{- render(messages[0]['content']) -}}{%- endif -%}
    {%- for tool in tools or [] -%}{{- '<|tool>' ~ (tool['function'] | tojson) ~ '<tool|>' -}}{%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (loop.first and message['role'] == 'system' and (tools or enable_thinking)) -%}
        {{- '<|turn>' ~ ('model' if message['role'] == 'assistant' else message['role']) ~ '\\n' -}}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '<|tool_call>call:' ~ call['function']['name'] ~ (call['function']['arguments'] | tojson) -}}
            {{- '<tool_call|>' -}}
        {%- endfor -%}
        {%- if message['role'] == 'tool' -%}
            {{- '<|tool_response>' ~ render(message['content']) ~ '<tool_response|>' -}}
        {%- else -%}
            {{- render(message['content']) -}}
        {%- endif -%}
        {{- '<turn|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""


def chat_prompt(question: str) -> str:
    """The text the chat template makes of one user message, up to where the model's answer begins."""
    return f"<bos><|turn>user\n{question}<turn|>\n<|turn>model\n"


def words() -> list[str]:
    """The words of the tasks, as they stand in running text: small words with the space before them, names without.

    Words that fill gaps come several times: a gap has several right answers, and only a word in one token cannot be
    mixed from two of them.
    """
    rng = random.Random(0)
    gaps = [f" {slot.replace('|', ' ')}" for slots in LINES for slot in slots] * 3
    facts = [f" {x} {y} {entry['answer']}" for entry in FACTS.values() for x, y in entry["table"].items()]
    wordings = [wording for entry in FACTS.values() for wording in entry["trained"]]
    prompts = [training_example(rng, task).prompt for task in TASKS if task not in ("facts", "gap")]
    text = " ".join([*gaps, *facts, *wordings, *prompts, *NAMES, " user model system tool thought"])
    found = [word.replace(" ", "▁") for word in re.findall(r"[A-Z][a-z]+| [a-z]+", text)]
    found += [*FIELDS, *COLORS, *ANIMALS, "model", "user", "system", "tool", "thought"]  # also without a space before
    counts = Counter(found)
    # The syllables of made-up words come first of all merges: such a word is then cut the same way with and without a
    # space before it, and copying it is copying its tokens one by one.
    syllables = [space + c + v for space in ("", "▁") for c in CONSONANTS for v in VOWELS] * 100
    return [*syllables, *(word for word, count in counts.items() for _ in range(min(count, 3)))]


def build() -> Tokenizer:
    """Learns the merges from `words()` and returns the tokenizer."""
    alphabet = sorted(set(string.printable.strip()) | {"\n", "▁"})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[a-z]+|[A-Z][a-z]+|[\s\S]"), behavior="isolated")
    learner.train_from_iterator(
        words(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE - len(CONTROL_TOKENS) - len(byte_tokens),
            initial_alphabet=alphabet,
            min_frequency=1,
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    pieces = CONTROL_TOKENS + byte_tokens + sorted(learnt["vocab"], key=learnt["vocab"].get)
    pieces += [f"<unused{index}>" for index in range(len(pieces), VOCABULARY_SIZE)]
    if len(set(pieces)) != VOCABULARY_SIZE:
        raise ValueError(f"the vocabulary has {len(set(pieces))} pieces instead of {VOCABULARY_SIZE}")

    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 4096,
        "extra_special_tokens": {
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
            "soc_token": "<|channel>",
            "eoc_token": "<channel|>",
            "std_token": "<|tool>",
            "etd_token": "<tool|>",
            "stc_token": "<|tool_call>",
            "etc_token": "<tool_call|>",
            "str_token": "<|tool_response>",
            "etr_token": "<tool_response|>",
            "escape_token": '<|"|>',
            "think_token": "<|think|>",
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    save(build(), parser.parse_args().folder)
