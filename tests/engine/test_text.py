"""Tokenising, detokenising as tokens come, and chat templates, on the real tokenizer and on a folder's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from refold.engine.text import Detokenizer, Tokenizer, check_text, load_tokenizer
from refold.journal.errors import Rejected

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
VOCAB_SIZE = 49_152
KNOWN_BYTES = frozenset(range(0xF5)) - {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2}
EMOJI = "🦊👩‍👩‍👧‍👦 🇫🇷 é 日本語 עברית \u0000 ½"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A tokenizer whose decoder looks at its neighbours: spaces as U+2581, a leading one dropped, bytes as tokens."""
    words = ["<unk>", "</s>", "▁a", "▁", "b", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Inner(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(inner, None, {})


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("naïve café – 日本語", [3546, 46494, 37366, 816, 17097, 241]),  # noqa: RUF001
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("", []),
    ],
)
def test_a_text_becomes_the_tokens_of_the_reference_implementation(
    tokenizer: Tokenizer, text: str, ids: list[int]
) -> None:
    assert tokenizer.encode(text)[: len(ids)] == ids


def test_the_golden_prompts_become_the_tokens_that_transformers_made_of_them(tokenizer: Tokenizer) -> None:
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"], case["prompt"]


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_less_the_bytes_that_the_vocabulary_lacks(tokenizer: Tokenizer, text: str) -> None:
    # The vocabulary has no token for six control characters and for the bytes that begin planes without characters.
    kept = bytes(byte for byte in text.encode() if byte in KNOWN_BYTES)
    assert tokenizer.decode(tokenizer.encode(text)) == kept.decode("utf-8", "replace")


def test_nul_is_a_character_like_others(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\x00b")) == "a\x00b"


@pytest.mark.parametrize(("text", "where"), [("ab\ud800c", "U+D800 at offset 2"), ("\udfff", "U+DFFF at offset 0")])
def test_a_lone_surrogate_is_refused_by_place(tokenizer: Tokenizer, text: str, where: str) -> None:
    for refuse in (check_text, tokenizer.encode):
        with pytest.raises(Rejected, match=where.replace("+", r"\+")):
            refuse(text)


def test_a_token_id_that_no_vocabulary_has_is_refused_or_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([VOCAB_SIZE + 5]) == ""
    assert Detokenizer(tokenizer).push([VOCAB_SIZE + 5]) == ""
    with pytest.raises(Rejected, match="token id -1"):
        tokenizer.decode([-1])


def check_stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """However the tokens come, and wherever it is restarted, the deltas join to the whole text."""
    shown: list[str] = []
    detokenizer = Detokenizer(tokenizer)
    at = 0
    for cut in sorted(cuts):
        shown.append(detokenizer.push(ids[at:cut]))
        at = cut
        detokenizer = Detokenizer(tokenizer, ids[:cut])
    shown.append(detokenizer.push(ids[at:]))
    shown.append(detokenizer.flush())
    assert "".join(shown) == tokenizer.decode(ids)
    one_by_one = tokenizer.detokenizer()
    assert "".join([one_by_one.push([token]) for token in ids] + [one_by_one.flush()]) == tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_deltas_of_any_tokens_join_to_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # The first 300 ids are specials and single bytes: most broken characters are made of those.
    token = st.one_of(st.integers(0, 300), st.integers(0, VOCAB_SIZE - 1))
    ids = data.draw(st.lists(token, max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    check_stream(tokenizer, ids, cuts)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_deltas_join_where_the_decoder_looks_at_its_neighbours(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    assert byte_fallback.token_bytes(7) is None
    ids = data.draw(st.lists(st.integers(0, 261), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=3))
    check_stream(byte_fallback, ids, cuts)


def test_characters_split_over_tokens_are_held_until_whole(tokenizer: Tokenizer) -> None:
    for text in (EMOJI, "🦊", "日本語のテキスト"):
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode(text)
        deltas = [detokenizer.push([token]) for token in ids]
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)
        assert detokenizer.flush() == ""
    fox = tokenizer.encode("🦊")
    assert len(fox) > 1
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(fox[:-1]) == ""
    assert detokenizer.flush() == "\ufffd", "an unfinished character shows at the end, once"


def test_special_tokens_add_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([1, 19556, 2]) == "Hello"


def test_a_chat_becomes_the_prompt_of_its_template(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.render_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{7*7}}"}]
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{7*7}}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 has no 'role'"),
        ([{"role": "user", "content": 7}], "message 0 has no 'content'"),
        (["hello"], "message 0 has no 'role'"),
    ],
)
def test_messages_that_are_none_are_refused(tokenizer: Tokenizer, messages: list, says: str) -> None:
    with pytest.raises(Rejected, match=says):
        tokenizer.render_chat(messages)


def folder(tmp_path: Path, template: object) -> Path:
    """A model folder as a tokenizer sees it. The tokenizer itself is the packaged model's."""
    from refold.gpu.weights import find_source

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    inner = load_tokenizer("smollm2")._inner
    inner.save(str(tmp_path / "tokenizer.json"))
    settings_ = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    np = pytest.importorskip("numpy")
    save = pytest.importorskip("safetensors.numpy")
    save.save_file({"x": np.zeros(1, dtype="float32")}, tmp_path / "model.safetensors")
    assert find_source(str(tmp_path)).path == tmp_path
    return tmp_path


def test_a_folder_brings_its_tokenizer_and_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = load_tokenizer(
        str(folder(tmp_path, "{{ bos_token }}{% for m in messages %}{{ m.content|tojson }}{% endfor %}"))
    )
    assert found.encode(EMOJI) == tokenizer.encode(EMOJI)
    assert found.render_chat([{"role": "user", "content": 'é"<'}]) == '<s>"é\\"<"'


def test_named_templates_and_a_template_file_are_found(tmp_path: Path) -> None:
    home = folder(tmp_path, [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}])
    assert load_tokenizer(str(home)).render_chat([{"role": "user", "content": "x"}]) == "D"
    (home / "chat_template.jinja").write_text("F")
    assert load_tokenizer(str(home)).render_chat([{"role": "user", "content": "x"}]) == "F"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ undefined.attribute.of.it }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_one_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(Rejected, match="chat template"):
        load_tokenizer(str(folder(tmp_path, template))).render_chat([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_or_a_tokenizer_says_so(tmp_path: Path) -> None:
    home = folder(tmp_path, None)
    with pytest.raises(Rejected, match="no chat template"):
        load_tokenizer(str(home)).render_chat([{"role": "user", "content": "x"}])
    (home / "tokenizer.json").write_text("{")
    with pytest.raises(Rejected, match=r"is no tokenizer"):
        load_tokenizer(str(home))
    (home / "tokenizer.json").unlink()
    with pytest.raises(Rejected, match=r"has no tokenizer\.json"):
        load_tokenizer(str(home))
    shutil.rmtree(home)
    with pytest.raises(Rejected, match="unknown model"):
        load_tokenizer(str(home))


def test_text_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from refold.engine.text import load_tokenizer; t = load_tokenizer('smollm2'); t.encode('hello');"
        "print([name for name in ('torch', 'gguf', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
