"""Text to token ids and back, and chat messages to a prompt. Knows nothing about the model that uses the ids.

Control tokens are handled by role, not by their `special` flag. A token without a known role is text and is shown. Of
the others, in a decoded reply:

| role | shown by decode(ids) | shown by decode(ids, keep_markers=True) |
|---|---|---|
| pad, bos, unk, mask, think, image and audio | no | no |
| eos, turn end | no, nor anything after it | the same |
| turn start | no, nor the role name after it; once there is text it ends the reply | the same |
| channel start and end | no; of the thought channel name and content neither, of others the content only | whole |
| tool declaration, call, response, the quote inside them | whole | whole |
| a tool-response start with nothing after it (the model hands over to the tool) | no | no |
"""

import codecs
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from .errors import InputError, TokenizerError

HIDDEN_CHANNELS = frozenset({"thought"})
ROLE_NAMES = frozenset({"user", "model", "assistant", "system", "developer", "tool"})
LONGEST_NAME = 32  # characters; a longer first line of a channel is content


@dataclass(frozen=True)
class ControlTokens:
    """Ids by role, None where the tokenizer has no such token."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    mask: int | None = None
    turn_start: int | None = None
    turn_end: int | None = None
    channel_start: int | None = None
    channel_end: int | None = None
    tool_start: int | None = None
    tool_end: int | None = None
    tool_call_start: int | None = None
    tool_call_end: int | None = None
    tool_response_start: int | None = None
    tool_response_end: int | None = None
    tool_quote: int | None = None
    think: int | None = None
    image_start: int | None = None
    image: int | None = None
    image_end: int | None = None
    audio_start: int | None = None
    audio: int | None = None
    audio_end: int | None = None

    def role(self, token_id: int) -> str | None:
        """The role's name, None for a token that is text."""
        return next((f.name for f in fields(self) if getattr(self, f.name) == token_id), None)

    @property
    def ends(self) -> frozenset[int]:
        """Ids after which nothing of a reply is shown."""
        return frozenset(i for i in (self.eos, self.turn_end) if i is not None)


# role -> its name in tokenizer_config.json, and the spellings looked for when that does not name it
_ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bos": ("bos_token", ("<bos>",)),
    "eos": ("eos_token", ("<eos>",)),
    "pad": ("pad_token", ("<pad>",)),
    "unk": ("unk_token", ("<unk>",)),
    "mask": ("mask_token", ("<mask>",)),
    "turn_start": ("sot_token", ("<|turn>", "<start_of_turn>")),
    "turn_end": ("eot_token", ("<turn|>", "<end_of_turn>")),
    "channel_start": ("soc_token", ("<|channel>",)),
    "channel_end": ("eoc_token", ("<channel|>",)),
    "tool_start": ("std_token", ("<|tool>",)),
    "tool_end": ("etd_token", ("<tool|>",)),
    "tool_call_start": ("stc_token", ("<|tool_call>",)),
    "tool_call_end": ("etc_token", ("<tool_call|>",)),
    "tool_response_start": ("str_token", ("<|tool_response>",)),
    "tool_response_end": ("etr_token", ("<tool_response|>",)),
    "tool_quote": ("escape_token", ('<|"|>',)),
    "think": ("think_token", ("<|think|>",)),
    "image_start": ("boi_token", ("<|image>", "<start_of_image>")),
    "image": ("image_token", ("<|image|>", "<image_soft_token>")),
    "image_end": ("eoi_token", ("<image|>", "<end_of_image>")),
    "audio_start": ("boa_token", ("<|audio>",)),
    "audio": ("audio_token", ("<|audio|>",)),
    "audio_end": ("eoa_token", ("<audio|>",)),
}
_NEVER_SHOWN = frozenset(
    {"pad", "bos", "unk", "mask", "think", "image_start", "image", "image_end", "audio_start", "audio", "audio_end"}
)


class Tokenizer:
    """A model folder's tokenizer. Made by from_folder()."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], templates: Mapping[str, "_Template"]
    ):
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        names = _token_names(config)
        self.control = _find_control_tokens(tokenizer, names)
        self._roles = {i: f.name for f in fields(ControlTokens) if (i := getattr(self.control, f.name)) is not None}
        self._template_tokens = {key: text for key, text in names.items() if key.endswith("_token")}
        byte_ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._bytes = {i: bytes([byte]) for byte, i in enumerate(byte_ids) if i is not None}

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja; the last two may be absent.

        chat_template.jinja wins over the configuration's `chat_template`, a string or a list of named templates.
        Raises TokenizerError naming the file.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        text = _read(file)
        if text is None:
            raise TokenizerError(f"{file}: file not found; copy the original model's tokenizer.json into the folder")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as e:  # the library raises bare Exception
            raise TokenizerError(f"{file}: not a usable tokenizer ({e}); download the file again") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config_file = folder / "tokenizer_config.json"
        config = _read_config(config_file)
        return cls(tokenizer, config, _read_templates(folder / "chat_template.jinja", config_file, config))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling, e.g. "<turn|>"."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Control tokens spelled in it become their ids. add_special_tokens: begin with bos.

        Raises InputError for a text that is not valid Unicode (unpaired surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise InputError(f"the text is not valid Unicode at character {e.start}; pass it as UTF-8") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], keep_markers: bool = False) -> str:
        """The text of generated ids, up to the first end of sequence or turn (see the table above).

        keep_markers=False is the reply a person wants: thoughts are left out, tool calls are whole. True keeps channel
        and tool markers with what is between them, for a caller who parses them. Ids without a token have no text; of
        bytes that are not UTF-8 each becomes U+FFFD.
        """
        decoder = StreamDecoder(self, keep_markers)
        return decoder.feed(ids) + decoder.finish()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id's own text, control tokens spelled out, for showing a canvas row by row.

        A character made of several byte tokens stands at its last one, the ones before have none.
        """
        out: list[str] = []
        utf8 = _Utf8()
        for i in map(int, ids):
            byte = self._bytes.get(i)
            if byte is not None:
                out.append(utf8.feed(byte))
                continue
            if (tail := utf8.finish()) and out:
                out[-1] += tail
            out.append(self._plain_text([i]))
        if (tail := utf8.finish()) and out:
            out[-1] += tail
        return out

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **template_vars: Any,
    ) -> Any:
        """Messages ({"role", "content"}, ...) as a prompt: list of ids, or the text with tokenize=False.

        template_vars go to the template (tools=[...], enable_thinking=True, ...). From a list of named
        templates the Hub's rule picks "tool_use" when there are tools, else "default". bos is added unless the template
        renders it.
        Raises TokenizerError when there is no template or it fails, naming the template's file.
        """
        text = self._choose_template(bool(template_vars.get("tools"))).render(
            {
                **self._template_tokens,
                "tools": None,
                "documents": None,
                **template_vars,
                "messages": [dict(m) for m in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if not tokenize:
            return text
        bos = None if self.control.bos is None else self._tokenizer.id_to_token(self.control.bos)
        return self.encode(text, add_special_tokens=bos is None or not text.startswith(bos))

    def _choose_template(self, tools: bool) -> "_Template":
        if not self._templates:
            raise TokenizerError(
                "the model has no chat template; add chat_template.jinja to its folder, or send a raw prompt (--raw)"
            )
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        if len(self._templates) > 1:
            file = next(iter(self._templates.values())).source
            raise TokenizerError(f"{file}: none of the templates {sorted(self._templates)} is named 'default'")
        return next(iter(self._templates.values()))

    def _role(self, token_id: int) -> str | None:
        return self._roles.get(token_id)

    def _byte(self, token_id: int) -> bytes | None:
        return self._bytes.get(token_id)

    def _plain_text(self, ids: list[int]) -> str:
        known = [i for i in ids if 0 <= i < 2**32]
        return self._tokenizer.decode(known, skip_special_tokens=False)


class StreamDecoder:
    """Tokenizer.decode for ids that arrive in parts of any size.

    The texts returned by feed() and finish(), joined, equal decode() of all ids; none is ever taken back. Held back:
    the bytes of an incomplete character, a first line that may be a channel's or a turn's name, a tool-response marker
    with nothing after it yet.
    """

    def __init__(self, tokenizer: Tokenizer, keep_markers: bool = False):
        self._tokenizer = tokenizer
        self._keep_markers = keep_markers
        self._utf8 = _Utf8()
        self._recent: list[int] = []  # ids whose text is out, the context of the next ones
        self._held: list[int] = []  # ids whose text ends inside a character
        self._state = "text"  # "text" | "channel name" | "hidden" | "turn name"
        self._name = ""
        self._marker = ""
        self._shown = False
        self._after_channel = False
        self.ended = False

    def feed(self, ids: Iterable[int] | int) -> str:
        """The text that the next ids make certain; "" once an end of sequence or turn was seen (`ended`)."""
        if not isinstance(ids, Iterable):
            ids = (ids,)
        out: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if self.ended:
                break
            role, byte = self._tokenizer._role(i), self._tokenizer._byte(i)
            if role is None and byte is None:
                if not run:
                    out.append(self._text(self._utf8.finish()))
                run.append(i)
                continue
            out.append(self._plain(run, final=True))
            run = []
            if byte is not None:
                out.append(self._text(self._utf8.feed(byte)))
            elif role is not None:
                out.append(self._text(self._utf8.finish()))
                out.append(self._control(i, role))
        out.append(self._plain(run, final=False))
        return "".join(out)

    def finish(self) -> str:
        """The rest, when no more ids come."""
        rest = self._plain([], final=True) + self._text(self._utf8.finish())
        rest += self._end_name()
        self._marker = ""
        self.ended = True
        return rest

    def _plain(self, ids: list[int], final: bool) -> str:
        """Text of ordinary tokens. A tokenizer without byte tokens may split a character between two of them."""
        self._held += ids
        if not self._held:
            return ""
        before = self._tokenizer._plain_text(self._recent)
        text = self._tokenizer._plain_text(self._recent + self._held)[len(before) :]
        if text.endswith("�") and not final:
            return ""
        self._recent, self._held = self._held[-8:], []
        return self._text(text)

    def _control(self, token_id: int, role: str) -> str:
        self._recent = []
        if role in _NEVER_SHOWN:
            return ""
        if role in ("eos", "turn_end"):
            return self.finish()
        if role == "turn_start":
            if self._shown:
                return self.finish()
            out = self._end_name()
            self._state = "turn name"
            return out
        if role in ("channel_start", "channel_end") and not self._keep_markers:
            out = self._end_name()
            self._after_channel = role == "channel_end"
            self._state = "channel name" if role == "channel_start" else "text"
            return out
        literal = self._tokenizer._plain_text([token_id])
        if self._state == "hidden":
            return ""
        out = self._end_name()
        if role == "tool_response_start":
            self._marker += literal
            return out
        return out + self._show(literal)

    def _text(self, text: str) -> str:
        """What is shown of the text, given where we are."""
        if not text or self._state == "hidden":
            return ""
        if self._state == "text":
            return self._show(text)
        self._name += text
        name, newline, rest = self._name.partition("\n")
        if not newline and _may_be_name(name):
            return ""
        in_channel, self._name = self._state == "channel name", ""
        self._state = "text"
        if not newline or not (_may_be_name(name) if in_channel else name.strip() in ROLE_NAMES):
            return self._show(name + newline + rest)
        if in_channel and name.strip() in HIDDEN_CHANNELS:
            self._state = "hidden"
            return ""
        return self._show(rest)

    def _show(self, text: str) -> str:
        if self._after_channel and not self._shown:
            text = text.lstrip("\n")  # the blank line between the thought and the reply
        if not text:
            return ""
        self._shown, self._after_channel = True, False
        marker, self._marker = self._marker, ""
        return marker + text

    def _end_name(self) -> str:
        """Text held back as a possible name when what follows is a marker or nothing."""
        name, state = self._name, self._state
        self._name, self._state = "", state if state == "hidden" else "text"
        is_name = state == "channel name" or name.strip() in ROLE_NAMES
        return "" if is_name else self._show(name)


class _Utf8:
    """Bytes to text as characters become complete; each byte that cannot belong to one becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ddllm_vk.each_byte")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "�" * (error.end - error.start), error.end


codecs.register_error("ddllm_vk.each_byte", _replace_each_byte)


def _may_be_name(text: str) -> bool:
    """True for the beginning of a channel's or a role's name: one short word."""
    word = text.strip(" ")
    return len(text) <= LONGEST_NAME and (not word or (word.isascii() and word.replace("_", "").isalnum()))


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Names ("bos_token", "sot_token", ...) to spellings, from every place the published styles keep them."""
    names: dict[str, str] = {}
    for source in (config, config.get("model_specific_special_tokens"), config.get("extra_special_tokens")):
        if isinstance(source, Mapping):
            for key, value in source.items():
                spelling = value.get("content") if isinstance(value, Mapping) else value
                if key.endswith("_token") and isinstance(spelling, str):
                    names[key] = spelling
    return names


def _find_control_tokens(tokenizer: tokenizers.Tokenizer, names: Mapping[str, str]) -> ControlTokens:
    named = {role: (names[name],) for role, (name, _) in _ROLES.items() if name in names}
    usual = {role: spellings for role, (_, spellings) in _ROLES.items() if role not in named}
    found: dict[str, int] = {}
    for role, spellings in [*named.items(), *usual.items()]:
        for spelling in spellings:
            token_id = tokenizer.token_to_id(spelling)
            if token_id is not None and token_id not in found.values():
                found[role] = token_id
                break
    return ControlTokens(**found)


def _read(file: Path) -> str | None:
    """The file's text, None when there is no such file."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise TokenizerError(f"{file}: not UTF-8 text; download the file again") from None
    except OSError as e:
        raise TokenizerError(f"{file}: cannot be read ({e.strerror})") from None


def _read_config(file: Path) -> dict[str, Any]:
    text = _read(file)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        raise TokenizerError(f"{file}: not valid JSON ({e}); download the file again") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{file}: must be a JSON object")
    return config


def _read_templates(file: Path, config_file: Path, config: Mapping[str, Any]) -> dict[str, "_Template"]:
    """Template name -> template; a single one is "default"."""
    text = _read(file)
    if text is not None:
        return {"default": _Template(text, str(file))}
    source = f"{config_file}: chat_template"
    entry = config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": _Template(entry, source)}
    templates: dict[str, _Template] = {}
    for item in entry if isinstance(entry, list) else []:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            templates = {}
            break
        templates[name] = _Template(text, f"{source} {name!r}")
    if not templates:
        raise TokenizerError(f'{source} must be a string or a list of {{"name": ..., "template": ...}}')
    return templates


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what training learns from; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own filter, no HTML escapes: the text is a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class _Template:
    """A chat template in a sandbox: no attribute whose name begins with an underscore, no change of its arguments."""

    def __init__(self, text: str, source: str):
        self.source = source
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _template_tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"{source}: broken chat template, line {e.lineno}: {e.message}") from None
        except RecursionError:
            raise TokenizerError(f"{source}: broken chat template: nested too deeply") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as e:
            raise TokenizerError(f"{self.source}: the chat template stopped: {e}") from None
        except Exception as e:  # a template is a program: it can raise anything
            raise TokenizerError(f"{self.source}: the chat template fails: {type(e).__name__}: {e}") from None
