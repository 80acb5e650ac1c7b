"""Tokenizer and chat template against transformers' AutoTokenizer, from GGUF metadata and from folders."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tiny import build, save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from engine.errors import UserError
from engine.tokenizer import load_tokenizer
from engine.weights import Checkpoint, open_checkpoint

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It's we'll I'VE they're",
    "def f(x: int) -> int:\n    if x > 10:\n\t\treturn x * 2\n\n\n    return [1, 22, 333]\n",
    "3.14159 1,000,000 0x1F 2026-12-01",
    "emoji 😀 👩‍👩‍👧 ❤️ and ünïcödé 中文 العربية русский",
    "\r\n\r\n x\t \n",
    "a" * 50,
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>x<|endoftext|>",
    "  leading and trailing  ",
    "<|im_end|><|im_end|>  <|endoftext|> x",
]
MESSAGES = [
    {"role": "user", "content": "What is 2+2?\nShow your work."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "<b>Why</b>? 😀"},
]
CHAT = (
    "{%- if messages[0]['role'] != 'user' %}{{ raise_exception('start with user') }}{% endif %}\n"
    "    {% for message in messages %}\n"
    "    {% if loop.index > 5 %}{% break %}{% endif %}\n"
    "{{ bos_token }}<{{ message['role'] }}>{{ message['content'] | tojson }}{{ eos_token }}\n"
    "    {% if message['role'] == 'assistant' %}{% generation %}[kept]{% endgeneration %}{% endif %}\n"
    "    {% endfor %}\n"
    "{% if add_generation_prompt %}<assistant> {{ strftime_now('%Y') }}{% endif %}"
)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def smollm(demo_target: Path) -> tuple[Any, Any]:
    """Ours and theirs, from one GGUF file."""
    theirs = transformers.AutoTokenizer.from_pretrained(demo_target.parent, gguf_file=demo_target.name)
    return load_tokenizer(open_checkpoint(str(demo_target))), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(text: str, smollm: tuple[Any, Any]) -> None:
    ours, theirs = smollm
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids, special=True) == text


def test_smollm2_random_ids_decode_as_transformers_decodes_them(smollm: tuple[Any, Any]) -> None:
    ours, theirs = smollm
    ids = [random.randrange(ours.vocab_size) for _ in range(200)]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, special=True) == theirs.decode(ids)


def test_smollm2_chat_equals_transformers(smollm: tuple[Any, Any]) -> None:
    ours, theirs = smollm
    for messages in (MESSAGES, MESSAGES[:1], [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        assert ours.chat(messages) == chat_ids(theirs, messages)
    assert ours.eos_ids == (2,)


def test_smollm2_splits_digits_off_as_the_model_was_trained(smollm: tuple[Any, Any]) -> None:
    """The published tokenizer (tokenizer.ggml.pre = smollm) takes every digit by itself first, so that four spaces
    before one stay one token. transformers' conversion does not know that rule and gives two."""
    ours, theirs = smollm
    text = "    1"
    assert [ours.decode([i]) for i in ours.encode(text)] == ["    ", "1"]
    assert theirs.convert_ids_to_tokens(theirs(text)["input_ids"]) == ["ĠĠĠ", "Ġ", "1"]


def train(split: str, *, special: tuple[str, ...] = ("<|endoftext|>", "<s>", "</s>")) -> Tokenizer:
    """A byte-level BPE tokenizer over this file's own text, split before merging by `split` ("" = GPT-2's rule)."""
    tokenizer = Tokenizer(BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level]) if split else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    return tokenizer


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {"qwen2": QWEN2, "llama-bpe": QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"), "gpt-2": ""}


def write_gguf(path: Path, tokenizer: Tokenizer, **entries: Any) -> Path:
    """A weightless llama GGUF file with this tokenizer; `entries` override metadata (None leaves one out)."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [token for token, _ in vocabulary],
        "token_type": [3 if token in ("<|endoftext|>", "<s>", "</s>") else 1 for token, _ in vocabulary],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **entries,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_vocab_size(len(vocabulary))
    for key, value in values.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pre", list(RULES))
def test_gguf_rules_equal_transformers(pre: str, bos: bool, tmp_path: Path) -> None:
    trained = train(RULES[pre])
    path = write_gguf(tmp_path / "t.gguf", trained, pre=pre, add_bos_token=bos, **{"tokenizer.chat_template": CHAT})
    ours = load_tokenizer(open_checkpoint(str(path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in [*TEXTS, "x</s>y<s>"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ids[:1] == [1] or not bos
        assert ours.decode(ids[bos:], special=True) == text
    assert ours.chat(MESSAGES) == chat_ids(theirs, MESSAGES)


def test_gguf_user_defined_tokens_stay_whole_and_padding_is_no_vocabulary(tmp_path: Path) -> None:
    trained = train("", special=("<|endoftext|>", "<s>", "</s>", "<think>", "[PAD4]"))
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    types = [3, 3, 3, 4, 5] + [1] * (len(vocabulary) - 5)
    ours = load_tokenizer(open_checkpoint(str(write_gguf(tmp_path / "t.gguf", trained, token_type=types))))
    assert 3 in ours.encode("a<think>b")
    assert ours.decode(ours.encode("a<think>b</s>")) == "a<think>b"
    assert 4 not in ours.encode("a[PAD4]b")
    assert ours.vocab_size == len(vocabulary) - 1


def test_qwen2_rule_composes_characters_as_the_published_tokenizer_does(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", train(QWEN2), pre="qwen2")
    ours = load_tokenizer(open_checkpoint(str(path)))
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"model": "llama"}, "tokenizer model 'llama' in a GGUF file is not supported"),
        ({"model": "t5"}, "tokenizer model 't5'"),
        ({"model": None}, "tokenizer model None"),
        ({"pre": "tekken"}, "tokenizer rule 'tekken'"),
        ({"pre": None}, "tokenizer rule '(none)'"),
        ({"merges": None}, "no tokenizer vocabulary or no merges"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template does not compile"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported(entries: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", train(""), **entries)
    with pytest.raises(UserError) as caught:
        load_tokenizer(open_checkpoint(str(path)))
    assert says in caught.value.sentence
    assert str(path) in caught.value.sentence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer, saved by transformers: begins texts with <s>, has a chat template."""
    path = tmp_path_factory.mktemp("hf")
    save(path, "llama")
    backend = train(QWEN2)
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<|endoftext|>", chat_template=CHAT
    )
    tokenizer.save_pretrained(path)
    return path


def test_folder_equals_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(open_checkpoint(str(folder))), transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "x</s>y<s><tool>"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    assert ours.has_chat_template
    assert ours.chat(MESSAGES) == chat_ids(theirs, MESSAGES)
    assert ours.eos_ids == (2,)


@pytest.mark.parametrize("form", ["inline", "named", "objects"])
def test_older_forms_of_the_chat_template_and_special_tokens(form: str, folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    template: Any = CHAT
    if form == "named":
        template = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT}]
    bos: Any = {"__type": "AddedToken", "content": "<s>"} if form == "objects" else "<s>"
    settings = {"chat_template": template, "bos_token": bos, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = load_tokenizer(open_checkpoint(str(folder)))
    ours = load_tokenizer(open_checkpoint(str(tmp_path)))
    assert ours.chat(MESSAGES) == expected.chat(MESSAGES)


def test_without_a_template_a_chat_is_its_text(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ours = load_tokenizer(open_checkpoint(str(tmp_path)))
    assert not ours.has_chat_template
    assert ours.chat([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]) == ours.encode(
        "one\n\ntwo"
    )


def test_messages_that_the_template_refuses(folder: Path) -> None:
    ours = load_tokenizer(open_checkpoint(str(folder)))
    with pytest.raises(UserError, match="refuses these messages \\(start with user\\)"):
        ours.chat([{"role": "system", "content": "x"}])


def test_template_cannot_reach_python(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(escape)
    ours = load_tokenizer(open_checkpoint(str(tmp_path)))
    with pytest.raises(UserError, match="refuses these messages"):
        ours.chat(MESSAGES)


def test_folder_without_or_with_a_broken_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(UserError, match=r"it has no tokenizer\.json"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="this is no tokenizer"):
        load_tokenizer(checkpoint)


def test_fingerprint_tells_vocabularies_apart(folder: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        checkpoint: Checkpoint = open_checkpoint(str(path))
        return load_tokenizer(checkpoint).fingerprint

    first = write_gguf(tmp_path / "a.gguf", train(""))
    same = write_gguf(tmp_path / "b.gguf", train(""), **{"tokenizer.chat_template": CHAT})
    swapped = train("")
    tokens = [token for token, _ in sorted(swapped.get_vocab().items(), key=lambda item: item[1])]
    tokens[300], tokens[301] = tokens[301], tokens[300]
    other = write_gguf(tmp_path / "c.gguf", swapped, tokens=tokens)
    assert fingerprint(first) == fingerprint(same)
    assert len({fingerprint(first), fingerprint(other), fingerprint(folder)}) == 3


def test_a_folder_and_a_gguf_file_of_one_model_have_one_fingerprint(tmp_path: Path) -> None:
    model = build("llama", head_dim=22)
    model.save_pretrained(tmp_path / "hf")
    backend = train("")
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "hf")
    path = write_gguf(tmp_path / "a.gguf", backend)
    first = load_tokenizer(open_checkpoint(str(tmp_path / "hf")))
    assert first.fingerprint == load_tokenizer(open_checkpoint(str(path))).fingerprint


def test_tokenizer_imports_no_torch_and_no_transformers(demo_target: Path) -> None:
    program = (
        "import sys; from engine.weights import open_checkpoint; from engine.tokenizer import load_tokenizer;"
        "checkpoint = open_checkpoint(sys.argv[1]); checkpoint.check();"
        "assert load_tokenizer(checkpoint).chat([{'role': 'user', 'content': 'hi'}]);"
        "loaded = {'torch', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program, str(demo_target)], check=True, timeout=120)
