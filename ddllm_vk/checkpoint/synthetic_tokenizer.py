"""A working tokenizer of any vocabulary size for synthetic models: control tokens, bytes, words that mean nothing."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import InputError

#: token i is CONTROL_TOKENS[i]
CONTROL_TOKENS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>",
)  # fmt: skip
_SPACE = "▁"
SMALLEST_VOCABULARY = len(CONTROL_TOKENS) + 256 + 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' + ('model' if m['role']=='assistant' else m['role']) + '\\n' }}"
    "{{ m['content'] | trim }}{{ '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


def tokenizer_files(vocab_size: int, context: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises InputError for too small a vocabulary.

    Text becomes one token a byte; every id decodes, those beyond the bytes to a word such as "t12345".
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"vocab_size must be at least {SMALLEST_VOCABULARY} for a synthetic model, not {vocab_size}")
    tokens = [*CONTROL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), _SPACE]
    tokens += [f"{_SPACE}t{i}" for i in range(len(tokens), vocab_size)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
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
        "model_max_length": context,
        "extra_special_tokens": {
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
        },
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
