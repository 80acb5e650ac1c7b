"""A tiny checkpoint with prompts for it, and the real stack in a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.paths import REPOSITORY
from tests.browser.support import Models, Stack

TEXT = "the quick brown fox jumps over a lazy dog while seven small boats sail past an old stone harbour wall"
START_SECONDS = 120.0
STOP_SECONDS = 60.0


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A Llama of a few thousand parameters, saved by transformers, with a byte-level tokenizer and 40 prompts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models")
    bytes_first = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=bytes_first)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    target = folder / "tiny-llama"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(target)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    prompts = folder / "prompts.jsonl"
    lines = [{"id": f"p{n}", "prompt": " ".join(random.choices(TEXT.split(), k=10))} for n in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Models(target, prompts)


@pytest.fixture
def stack_env() -> dict[str, str]:
    """What a test module adds to the stack's environment."""
    return {}


@pytest.fixture
def stack(tmp_path: Path, stack_env: dict[str, str]) -> Iterator[Stack]:
    """`manage.py up` on a free port with a data folder of its own; ended by Ctrl-C, which must succeed."""
    log = tmp_path / "up.log"
    data = tmp_path / "data"
    data.mkdir()
    unset = ("REDIS_URL", "DATABASE_URL", "DJANGO_SETTINGS_MODULE")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"SPECPILOT_DATA": str(data), "PYTHONUNBUFFERED": "1", **stack_env}
    argv = [sys.executable, "manage.py", "up", "--port", "0", "--gpus", "cpu"]
    process = subprocess.Popen(
        argv, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield Stack(_address(process, log), log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            rest, _ = process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            rest, _ = process.communicate()
        with log.open("a") as file:
            file.write(rest)
    assert process.returncode == 0, log.read_text()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    """The sign-in address, as soon as it is printed; everything printed until then goes to `log`."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    descriptor = process.stdout.fileno()
    said = ""
    with selectors.DefaultSelector() as waiting, log.open("a") as file:
        waiting.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not waiting.select(timeout=1):
                continue
            chunk = os.read(descriptor, 65536).decode(errors="replace")
            file.write(chunk)
            said += chunk
            found = re.search(r"(http://\S+/login\?token=[\w-]+)\s", said)
            if found:
                return found[1]
            if not chunk:
                break
    raise AssertionError(f"the stack printed no address:\n{said}")
