"""Chat templates, rendered as transformers renders them.

Templates come with checkpoints and are foreign code: they run in jinja2's immutable sandbox, see only what is
passed here, and their output is text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import UserError


class _GenerationBlock(Extension):  # type: ignore[misc]  # jinja2's types are not followed
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; rendering keeps its body only."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled chat template. Raises UserError, naming `where`, if it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens, self._where = dict(special_tokens), where
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"{where}: its chat template does not compile ({error}).", code="chat-template") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation with the opening of the assistant's turn.

        Raises UserError where the template refuses these messages (an unknown role, a wrong order).
        """
        try:
            text: str = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a message's content is no text
            raise UserError(
                f"{self._where}: its chat template refuses these messages ({error}).", code="chat-template"
            ) from None
        return text
