"""Text to tokens and back: tokenizers by model name, chat templates, and detokenising as tokens arrive.

A tokenizer is rebuilt from the model's own files: a GGUF file's metadata, or a folder's `tokenizer.json`.

Streaming text is harder than it looks: a character may be split over tokens, and a delta can't be taken back. With a
byte-level tokenizer (all that GGUF files here have) a token *is* its bytes, and an incremental UTF-8 decoder gives exactly the
text that may be shown. Other decoders look at their neighbours (a run of byte tokens is text only if all of it is), so there
the text up to the last token that ends such a run is decoded again and compared.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refold.engine.chat import Message, render_template
from refold.journal.errors import Rejected

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_CONTROL, _USER_DEFINED = 3, 4  # token types in GGUF metadata
_MAX_TOKEN_ID = (1 << 32) - 1


def load_tokenizer(model: str) -> "Tokenizer":
    """The tokenizer of a model, named as for `describe_model`. Raises Rejected, and no other error."""
    from refold.gpu.gguf_file import GgufFile  # noqa: PLC0415 - reading a journal needs none of this
    from refold.gpu.weights import find_source  # noqa: PLC0415

    source = find_source(model)
    try:
        if isinstance(source, GgufFile):
            return _from_gguf(str(source.path), source.metadata)
        return _from_folder(source.path)
    except ImportError as error:
        raise Rejected(f"model {model!r} needs the tokenizers package ({error}): pip install 'refold[gpu]'") from error


def check_text(text: str) -> None:
    """Raise Rejected, naming the place, if a text can't be written as UTF-8. U+0000 is a character like others."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise Rejected(
            f"the text holds a lone surrogate {code} at offset {error.start}, which is no character; decode the input as "
            "UTF-8 or replace it"
        ) from None


class Tokenizer:
    """A tokenizer of the `tokenizers` library, and the model's chat template."""

    __slots__ = ("_bytes", "_inner", "_special_tokens", "_template")

    def __init__(self, inner: "tokenizers.Tokenizer", template: str | None, special_tokens: dict[str, str]) -> None:
        self._inner = inner
        self._template = template
        self._special_tokens = special_tokens
        byte_level = isinstance(inner.decoder, import_module("tokenizers.decoders").ByteLevel)
        self._bytes: dict[int, bytes] | None = {} if byte_level else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised. Bytes without a token are left out.

        Raises Rejected if the text holds a lone surrogate.
        """
        check_text(text)
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special tokens left out. Bytes that are no UTF-8 become U+FFFD."""
        for token_id in token_ids:
            if not 0 <= token_id <= _MAX_TOKEN_ID:
                raise Rejected(f"token id {token_id} is not within 0..{_MAX_TOKEN_ID}")
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self, prior_token_ids: Sequence[int] = ()) -> "Detokenizer":
        """A detokeniser that continues after tokens whose text is out already."""
        return Detokenizer(self, prior_token_ids)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt for a conversation, up to where the assistant speaks. Rejected if the model's template refuses."""
        if self._template is None:
            raise Rejected("the model has no chat template; give a plain prompt, or use an instruction-tuned model")
        return render_template(self._template, messages, self._special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token adds to any text, or None if that depends on its neighbours."""
        if self._bytes is None:
            return None
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._lookup(token_id)
        return found

    def is_open(self, token_id: int) -> bool:
        """Whether what follows can change the text of this token, as the last one: a byte, or one without a text."""
        token = self._visible(token_id)
        return token is None or _BYTE_TOKEN.fullmatch(token) is not None

    def _visible(self, token_id: int) -> str | None:
        added = self._inner.get_added_tokens_decoder().get(token_id)
        return None if added is not None and added.special else self._inner.id_to_token(token_id)

    def _lookup(self, token_id: int) -> bytes:
        token = self._visible(token_id)
        if token is None:
            return b""
        values = [_BYTE_OF_CHARACTER.get(character) for character in token]
        return token.encode("utf-8") if None in values else bytes(value for value in values if value is not None)


class Detokenizer:
    """Turns tokens into text as they come. The deltas and the flush, joined, are `tokenizer.decode` of all tokens.

    `prior_token_ids` have been shown already by an earlier detokenizer: this one continues where that one was, so a held
    back part of a character is not lost over a restart.
    """

    __slots__ = ("_all_ids", "_decoder", "_emitted", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prior_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._all_ids: list[int] = []
        self._emitted = ""
        self.push(prior_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; never part of a character."""
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in token_ids]
        if self._emitted or self._all_ids or None in pieces:
            return self._push_decoding(token_ids)
        return self._decoder.decode(b"".join(piece for piece in pieces if piece is not None))

    def flush(self) -> str:
        """What was held back, at the end of the output. An unfinished character shows as U+FFFD."""
        if not self._all_ids:
            return self._decoder.decode(b"", final=True)
        text = self._tokenizer.decode(self._all_ids)
        rest = text[len(self._emitted) :]
        self._all_ids, self._emitted = [], ""
        return rest

    def _push_decoding(self, token_ids: Sequence[int]) -> str:
        self._all_ids += token_ids
        stop = len(self._all_ids)
        while stop and self._tokenizer.is_open(self._all_ids[stop - 1]):
            stop -= 1
        shown = self._tokenizer.decode(self._all_ids[:stop])
        if len(shown) <= len(self._emitted) or not shown.startswith(self._emitted):
            return ""
        delta = shown[len(self._emitted) :]
        self._emitted = shown
        return delta


def _from_gguf(name: str, metadata: dict[str, Any]) -> Tokenizer:
    """Rebuild a byte-level BPE tokenizer from GGUF metadata."""
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS or not isinstance(tokens, list) or not isinstance(merges, list):
        known = ", ".join(_PRE_TOKENIZERS)
        raise Rejected(
            f"{name}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported (byte-level BPE with {known} is); "
            "use the model's folder with its tokenizer.json"
        )
    import tokenizers  # noqa: PLC0415
    from tokenizers import AddedToken, decoders, models  # noqa: PLC0415

    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    try:
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        inner.pre_tokenizer = _PRE_TOKENIZERS[split]()
        inner.decoder = decoders.ByteLevel()
        typed = list(zip(tokens, types, strict=True))
        inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in typed if k == _CONTROL])
        inner.add_tokens([AddedToken(t, normalized=False) for t, k in typed if k == _USER_DEFINED])
        special = _gguf_special_tokens(tokens, metadata)
        _prepend_bos(inner, metadata, special)
    except Exception as error:
        raise Rejected(f"{name}: the tokenizer in its metadata is broken ({error}); fetch the file again") from error
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(inner, template if isinstance(template, str) else None, special)


def _digits_then_byte_level() -> Any:
    """`smollm`: digits one by one, then GPT-2's split."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _byte_level() -> Any:
    """`gpt-2`: its split, and bytes as characters."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_byte_level,
    "gpt-2": _byte_level,
    "default": _byte_level,
}


def _gguf_special_tokens(tokens: list[str], metadata: dict[str, Any]) -> dict[str, str]:
    found = {}
    for role in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(role, role)
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int):
            found[f"{role}_token"] = tokens[token_id]
    return found


def _prepend_bos(inner: "tokenizers.Tokenizer", metadata: dict[str, Any], special: dict[str, str]) -> None:
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or "bos_token" not in special:
        return
    from tokenizers import processors  # noqa: PLC0415

    bos = special["bos_token"]
    ids = [(bos, inner.token_to_id(bos))]
    inner.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=ids)


def _from_folder(path: Path) -> Tokenizer:
    import tokenizers  # noqa: PLC0415

    file = path / "tokenizer.json"
    if not file.is_file():
        raise Rejected(f"{path} has no tokenizer.json; tokenizers in other formats are not read")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise Rejected(f"{file} is no tokenizer ({error}); fetch the model again") from error
    config = _tokenizer_config(path)
    special = {
        key: token for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (token := _token(config.get(key)))
    }
    return Tokenizer(inner, _template(path, config), special)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    from refold.gpu.weights_folder import read_json  # noqa: PLC0415

    file = path / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _token(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _template(path: Path, config: dict[str, Any]) -> str | None:
    """A file of its own, a text in the config, or a list of named ones, of which `default` counts."""
    file = path / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise Rejected(f"{file} can't be read ({error}); fetch the model again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves as characters, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
