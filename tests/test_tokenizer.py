"""Tokenizer: ids against the reference's (tests/oracle), replies by the roles of their control tokens, templates."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ddllm_vk.errors import InputError, TokenizerError
from ddllm_vk.tokenizer import StreamDecoder, Tokenizer

ORACLE = Path(__file__).parent / "oracle"
CASES = sorted(p.parent.name for p in ORACLE.glob("*/meta.json"))

SPECIAL = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|image|>", "<|channel>", "<channel|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|other|>"),
]


def build_tokenizer() -> tokenizers.Tokenizer:
    """The family's kind of tokenizer: BPE with byte fallback; words below are one token, other letters one each."""
    words = ["thought", "model", "user", "▁Paris", "final", "漢", "\n"]
    letters = [chr(c) for c in range(33, 127)] + ["▁"]
    pieces = dict.fromkeys([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *letters])
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces[word[:end]] = None
            merges.append((word[: end - 1], word[end - 1]))
        pieces.setdefault(word)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def write_folder(folder: Path, config: object = None, template: str | None = None) -> Path:
    build_tokenizer().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("tokenizer")))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# --- against the reference ---


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_the_reference(case):
    tokenizer = Tokenizer.from_folder(ORACLE / case / "checkpoint")
    meta = json.loads((ORACLE / case / "meta.json").read_text(encoding="utf-8"))
    for test in meta["tokenizer_tests"]:
        assert tokenizer.encode(test["text"]) == test["ids"]
        assert tokenizer.encode(test["text"], add_special_tokens=False) == test["ids"][1:]
    chat = meta["chat_test"]
    assert tokenizer.apply_chat_template(chat["messages"], tokenize=False) == chat["text"]
    assert tokenizer.apply_chat_template(chat["messages"]) == chat["ids"]
    assert tokenizer.vocab_size == meta["vocab_size"]


@pytest.mark.parametrize("case", CASES)
def test_control_tokens_of_the_reference_checkpoints(case):
    control = Tokenizer.from_folder(ORACLE / case / "checkpoint").control
    assert (control.pad, control.eos, control.bos, control.turn_start, control.turn_end) == (0, 1, 2, 5, 6)
    assert (control.image_start, control.image, control.image_end, control.channel_start) == (7, 8, 9, None)


def test_there_are_oracle_cases():
    assert len(CASES) == 5


# --- replies ---


@pytest.mark.parametrize(
    ("generated", "reply"),
    [
        ("The capital is Paris.", "The capital is Paris."),
        ("  two  spaces\n", "  two  spaces\n"),
        ("Paris<turn|>", "Paris"),
        ("Paris<turn|>\n<|turn>user\nmore", "Paris"),
        ("Paris<eos><pad><pad>more", "Paris"),
        ("<pad>Pa<mask>ris<unk><|image|><pad>", "Paris"),
        ("Paris\n<|turn>user\nwhat next", "Paris\n"),
        ("<|turn>model\nParis<turn|>", "Paris"),
        ("<|turn>odd thing<turn|>", "odd thing"),
        ("<|channel>thought\nhm, capital<channel|>Paris<turn|>", "Paris"),
        ("<|channel>thought\nhm<channel|>\n\nParis", "Paris"),
        ("<|channel>thought\n<channel|>Paris", "Paris"),
        ("<|channel>thought<channel|>Paris", "Paris"),
        ("<|channel>thought\nnever closed", ""),
        ("<|channel>thought<turn|>", ""),
        ("<|channel>final\nParis<channel|> it is", "Paris it is"),
        ("<|channel>no name here<channel|>", "no name here"),
        ("a thought<turn|>", "a thought"),
        ("Paris<channel|>", "Paris"),
        ('<|tool_call>call:f{a:<|"|>x y<|"|>}<tool_call|><turn|>', '<|tool_call>call:f{a:<|"|>x y<|"|>}<tool_call|>'),
        ("<|channel>thought\nuse f<channel|><|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{}<tool_call|>"),
        ("<|channel>thought<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{}<tool_call|>"),
        ("<|tool_call>call:f{}<tool_call|><|tool_response>", "<|tool_call>call:f{}<tool_call|>"),
        ("<|tool_call>call:f{}<tool_call|><|tool_response><eos>", "<|tool_call>call:f{}<tool_call|>"),
        ("<|tool_response>42<tool_response|>", "<|tool_response>42<tool_response|>"),
        ("kept <|other|> as text", "kept <|other|> as text"),
        ("<turn|>", ""),
        ("", ""),
    ],
)
def test_decode_gives_the_reply_a_person_wants(tokenizer, generated, reply):
    assert tokenizer.decode(ids_of(tokenizer, generated)) == reply
    assert tokenizer.decode(tokenizer.encode(generated)) == reply


@pytest.mark.parametrize(
    ("generated", "kept"),
    [
        ("<|channel>thought\nhm<channel|>Paris<turn|>x", "<|channel>thought\nhm<channel|>Paris"),
        ("<|channel>thought<channel|>Paris", "<|channel>thought<channel|>Paris"),
        ("<|tool_call>call:f{}<tool_call|><|tool_response><eos>", "<|tool_call>call:f{}<tool_call|>"),
        ("<pad><|turn>model\nParis<eos>", "Paris"),
    ],
)
def test_decode_can_keep_markers(tokenizer, generated, kept):
    assert tokenizer.decode(ids_of(tokenizer, generated), keep_markers=True) == kept


def test_tokens_renamed_by_the_config_have_their_role(tmp_path):
    config = {
        "eos_token": {"content": "<|other|>", "special": True},
        "extra_special_tokens": {"eot_token": "<mask>", "soc_token": "<not there>"},
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert tokenizer.control.eos == tokenizer.token_id("<|other|>")
    assert tokenizer.control.turn_end == tokenizer.token_id("<mask>")
    assert tokenizer.control.channel_start is None
    assert tokenizer.control.role(tokenizer.token_id("<mask>")) == "turn_end"
    assert tokenizer.decode(ids_of(tokenizer, "Paris<mask>more")) == "Paris"


# --- streaming ---


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_id(f"<0x{b:02X}>") for b in data]


def test_a_character_of_several_byte_tokens_appears_whole(tokenizer):
    decoder = StreamDecoder(tokenizer)
    steps = [decoder.feed(i) for i in bytes_as_ids(tokenizer, "é€𝄞".encode())]
    assert steps == ["", "é", "", "", "€", "", "", "", "𝄞"]
    assert decoder.finish() == ""


def test_bytes_that_are_not_utf8_become_replacement_characters_once(tokenizer):
    decoder = StreamDecoder(tokenizer)
    cut = bytes_as_ids(tokenizer, "€".encode()[:2])
    assert [decoder.feed(i) for i in cut] == ["", ""]
    assert decoder.feed(ids_of(tokenizer, "a")) == "��a"
    assert [decoder.feed(i) for i in cut] == ["", ""]
    assert decoder.finish() == "��"
    assert tokenizer.decode(bytes_as_ids(tokenizer, "é".encode() + b"\xff" + b"z")) == "é�z"


def test_decode_equals_the_tokenizers_library_on_text_without_control_tokens(tokenizer):
    plain = build_tokenizer()
    rng = random.Random(1)
    first_text = plain.token_to_id("!")
    for _ in range(200):
        ids = [rng.randrange(first_text, plain.get_vocab_size()) for _ in range(12)]
        ids[4:4] = bytes_as_ids(tokenizer, rng.choice(["é", "漢字", "𝄞"]).encode())
        assert tokenizer.decode(ids) == plain.decode(ids)


def test_streamed_parts_joined_equal_the_whole_for_any_split(tokenizer):
    rng = random.Random(7)
    control = [tokenizer.token_id(t) for t in SPECIAL if t not in ("<eos>", "<turn|>")]
    ends = [tokenizer.token_id("<eos>"), tokenizer.token_id("<turn|>")]
    names = [tokenizer.token_id(t) for t in ("thought", "model", "final", "▁", "a", "▁Paris")]
    newline = ids_of(tokenizer, "\n")[0]
    for _ in range(400):
        ids: list[int] = []
        while len(ids) < 60:
            kind = rng.randrange(20)
            if kind < 5:
                ids.append(rng.choice(control))
            elif kind < 9:
                ids.append(rng.choice(names))
            elif kind < 11:
                ids.append(newline)
            elif kind < 13:
                ids += bytes_as_ids(tokenizer, "𝄞".encode()[: rng.randrange(1, 5)])
            elif kind == 13 and len(ids) > 40:
                ids.append(rng.choice(ends))
            else:
                ids.append(rng.randrange(tokenizer.vocab_size))
        for keep_markers in (False, True):
            whole = tokenizer.decode(ids, keep_markers)
            decoder = StreamDecoder(tokenizer, keep_markers)
            parts, at = [], 0
            while at < len(ids):
                size = rng.choice([1, 1, 2, 7])
                parts.append(decoder.feed(np.array(ids[at : at + size], dtype=np.int32)))
                at += size
            assert "".join(parts) + decoder.finish() == whole


def test_a_tokenizer_of_byte_level_pieces_streams_whole_characters(tmp_path):
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    ids = ours.encode("né 漢")
    decoder = StreamDecoder(ours)
    parts = [decoder.feed(i) for i in ids] + [decoder.finish()]
    assert "".join(parts) == "né 漢" == ours.decode(ids)
    assert not any("�" in part for part in parts)


def test_pieces_give_every_row_its_text(tokenizer):
    ids = [*ids_of(tokenizer, "<bos> Paris"), *bytes_as_ids(tokenizer, "é".encode()), tokenizer.token_id("<eos>")]
    assert tokenizer.pieces(ids) == ["<bos>", " Paris", "", "é", "<eos>"]
    assert tokenizer.pieces([bytes_as_ids(tokenizer, b"\xc3")[0], tokenizer.token_id("a")]) == ["�", "a"]


def test_ids_without_a_token_have_no_text(tokenizer):
    assert tokenizer.decode([10**6, *ids_of(tokenizer, "a"), -1]) == "a"


# --- encoding ---


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    plain = build_tokenizer()
    plain.enable_truncation(3)
    plain.enable_padding(length=20)
    plain.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcdefgh")) == 9


def test_invalid_unicode_is_an_input_error(tokenizer):
    with pytest.raises(InputError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\udc80")


# --- chat templates ---

MESSAGES = [{"role": "user", "content": " hi "}]
TURN = "{% for m in messages %}<|turn>{{ m['role'] }}\n{{ m['content'] | trim }}<turn|>\n{% endfor %}"


def render(tmp_path: Path, template: str, messages=MESSAGES, **template_vars):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"bos_token": "<bos>"}, template))
    return tokenizer.apply_chat_template(messages, tokenize=False, **template_vars)


def test_bos_is_there_once_whether_or_not_the_template_renders_it(tmp_path):
    for template in (TURN, "{{ bos_token }}" + TURN):
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"bos_token": "<bos>"}, template))
        ids = tokenizer.apply_chat_template(MESSAGES)
        assert ids[0] == tokenizer.control.bos
        assert ids.count(tokenizer.control.bos) == 1


def test_the_template_file_wins_over_the_config(tmp_path):
    folder = write_folder(tmp_path, {"chat_template": "from config"}, "from file")
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES, tokenize=False) == "from file"
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES, tokenize=False) == "from config"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools|length }}"}]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, tools=[{"name": "f"}]) == "tools 1"
    odd = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*named 'default'"):
        Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": odd})).apply_chat_template(MESSAGES)


def test_what_templates_of_the_hub_expect(tmp_path):
    assert render(tmp_path, "{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render(tmp_path, "{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert (
        render(tmp_path, "{% for i in [1, 2, 3] %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}{% endfor %}")
        == "1"
    )
    assert render(tmp_path, "a{% generation %}b{% endgeneration %}c") == "abc"
    assert len(render(tmp_path, "{{ strftime_now('%Y') }}")) == 4
    assert render(tmp_path, "{{ tools is none }} {{ mood }}", mood="fine") == "True fine"
    assert render(tmp_path, "{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_refuses_escapes(tmp_path, template):
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: the chat template "):
        render(tmp_path, template)


def test_the_sandbox_shows_nothing_of_internals(tmp_path):
    assert render(tmp_path, "{{ '{0.__class__}'.format(1) }}{{ raise_exception.__globals__ }}") == ""


def test_template_errors_name_the_file_and_the_problem(tmp_path):
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: .*roles must alternate"):
        render(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: broken chat template, line 2: "):
        render(tmp_path, "x\n{% for %}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: .*TypeError"):
        render(tmp_path, "{{ messages + 1 }}")
    with pytest.raises(TokenizerError, match=r"no chat template.*--raw"):
        Tokenizer.from_folder(write_folder(tmp_path / "..", {})).apply_chat_template(MESSAGES)


# --- broken folders ---


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: file not found; copy"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": ')
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: must be a JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template must be"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.from_folder(tmp_path)
    for broken in ("", "{", '{"version": "1.0"}', "[]"):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a usable tokenizer"):
            Tokenizer.from_folder(tmp_path)
