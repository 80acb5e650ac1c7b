"""Text to token ids and back, with the checkpoint's own tokenizer and chat template. Imports no torch.

A Hugging Face folder brings tokenizer.json. A GGUF file brings a vocabulary, merges and the name of the rule that
splits text before merging (`tokenizer.ggml.pre`); from these the same pipeline is built here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.chat import ChatTemplate
from engine.config import refuse, token_ids
from engine.errors import UserError
from engine.weights import Checkpoint, GgufCheckpoint, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

# Splits of published tokenizers, as their tokenizer.json files state them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


class Tokenizer:
    """`eos_ids`: tokens that end a text. `fingerprint`: equal for two checkpoints with the same vocabulary."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...], template: ChatTemplate | None
    ) -> None:
        self._backend, self._template = backend, template
        backend.no_truncation()
        backend.no_padding()
        self.eos_ids = eos_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        text = "\n".join(f"{index}\t{token!r}" for token, index in vocabulary)
        self.fingerprint = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text, with what the checkpoint puts before one (a beginning-of-text token, or nothing)."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Text of ids; special tokens such as the end of a turn are left out, or kept with `special`."""
        text: str = self._backend.decode(ids, skip_special_tokens=not special)
        return text

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation and the opening of the assistant's turn, by the checkpoint's chat template.

        `messages`: [{"role": "user", "content": "..."}, ...]. Without a template the contents are joined by blank
        lines and encoded as raw text. Raises UserError where the template refuses the messages.
        """
        if self._template is None:
            return self.encode("\n\n".join(str(message["content"]) for message in messages))
        # the template writes beginning-of-text itself
        ids: list[int] = self._backend.encode(self._template.render(messages), add_special_tokens=False).ids
        return ids


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an opened checkpoint.

    Raises UserError where it brings none, or a kind that is not supported.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return _from_gguf(checkpoint)
    return _from_folder(checkpoint)


def _from_folder(checkpoint: Checkpoint) -> Tokenizer:
    folder = checkpoint.path
    file = folder / "tokenizer.json"
    if not file.is_file():
        refuse(str(folder), "it has no tokenizer.json; save the fast tokenizer beside the weights", "no-tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the binding raises bare Exception for every damaged file
        raise UserError(f"{file}: this is no tokenizer ({error}).", code="no-tokenizer") from None
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(settings.get(name)))}
    eos_ids = checkpoint.config.eos_token_ids
    if not eos_ids and "eos_token" in special:
        eos_ids = token_ids(backend.token_to_id(special["eos_token"]), str(folder))
    source = _template_source(folder, settings)
    template = ChatTemplate(source, special, str(folder)) if source else None
    return Tokenizer(backend, eos_ids=eos_ids, template=template)


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json is a string, or an object with its `content`."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    inline = settings.get("chat_template") or ""
    if isinstance(inline, list):  # several named templates
        inline = next((entry.get("template") for entry in inline if entry.get("name") == "default"), "")
    return str(inline)


def save_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer of an opened checkpoint into `folder`, as `load_tokenizer` and transformers read it again.

    Raises UserError where it brings none, or a kind that is not supported.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        _from_folder(checkpoint)  # refuses what is none
        for name in TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        return
    backend, special, source = _gguf_parts(checkpoint)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if source:
        settings["chat_template"] = source
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _from_gguf(checkpoint: GgufCheckpoint) -> Tokenizer:
    backend, special, source = _gguf_parts(checkpoint)
    template = ChatTemplate(source, special, str(checkpoint.path)) if source else None
    return Tokenizer(backend, eos_ids=checkpoint.config.eos_token_ids, template=template)


def _gguf_parts(checkpoint: GgufCheckpoint) -> tuple[tokenizers.Tokenizer, dict[str, str], str]:
    """The pipeline, the special tokens by name, and the source of the chat template ("" where there is none)."""
    metadata, where = checkpoint.file.metadata, str(checkpoint.path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        refuse(
            where,
            f"tokenizer model {kind!r} in a GGUF file is not supported, only byte-level BPE ('gpt2'); "
            "use the model's Hugging Face folder",
            "unknown-tokenizer",
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    merges: list[str] | None = metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        refuse(where, "the GGUF file has no tokenizer vocabulary or no merges", "no-tokenizer")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend = _byte_level_bpe(tokens, types, merges, str(metadata.get("tokenizer.ggml.pre", "")), where)

    special = {}
    for name, key in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(index, int) and index < len(tokens):
            special[name] = tokens[index]
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return backend, special, str(metadata.get("tokenizer.chat_template") or "")


def _byte_level_bpe(
    tokens: list[str], types: list[int], merges: list[str], pre: str, where: str
) -> tokenizers.Tokenizer:
    """The pipeline that `pre` names, over this vocabulary."""
    split, options, normalizer = _pre_tokenizer(pre, where)
    # padding of the embedding matrix, which no text produces
    vocabulary = {
        token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED
    }
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=pairs, **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _of(tokens, types, _CONTROL)])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in _of(tokens, types, _USER_DEFINED)])
    return backend


def _of(tokens: list[str], types: list[int], kind: int) -> list[str]:
    return [token for token, its in zip(tokens, types, strict=True) if its == kind]


def _pre_tokenizer(pre: str, where: str) -> tuple[Any, dict[str, Any], Any]:
    """Splitter, BPE options and normalizer of a published tokenizer, by llama.cpp's name for it."""

    def by(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return gpt2, {}, None
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), {}, None
    if pre in ("llama-bpe", "llama3", "llama-v3"):
        return by(_LLAMA3), {"ignore_merges": True}, None
    if pre in ("qwen2", "deepseek-r1-qwen"):
        return by(_QWEN2), {}, normalizers.NFC()
    refuse(
        where,
        f"tokenizer rule {pre or '(none)'!r} in a GGUF file is unknown; gpt-2, smollm, llama-bpe and qwen2 are "
        "supported, or use the model's Hugging Face folder",
        "unknown-tokenizer",
    )
