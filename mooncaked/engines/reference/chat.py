"""Messages to a prompt, by the template that comes with the model.

The template is a program from whoever made the model file, so it runs in jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncaked.engines.reference.model_config import broken
from mooncaked.engines.reference.weights_hf import read_json
from mooncaked.errors import InvalidRequest


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """Renders a conversation. Built from the template's text and the special tokens it may refer to."""

    def __init__(self, source: str | None, specials: Mapping[str, str], path: str) -> None:
        """`source` None: the model has no template. Raises `ModelInvalid` when it is no template."""
        self._specials = dict(specials)
        self._template: jinja2.Template | None = None
        if source is None:
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise broken(path, f"its chat template is no template ({error})") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the next answer. Raises `InvalidRequest` when the template refuses `messages`."""
        if self._template is None:
            problem = "This model has no chat template; use /v1/completions with a prompt of your own."
            raise InvalidRequest(problem=problem)
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=True, **self._specials
            )
        except SecurityError as error:
            raise InvalidRequest(
                problem=f"The model's chat template does what it may not: {error}"
            ) from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            problem = f"The model's chat template refuses these messages: {error}"
            raise InvalidRequest(problem=problem) from error


def read_hf_template(directory: Path) -> str | None:
    """The template's text: chat_template.jinja, else from tokenizer_config.json. Raises `ModelInvalid`."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise broken(str(file), f"it cannot be read ({error})") from error
    settings = directory / "tokenizer_config.json"
    found = read_json(settings).get("chat_template") if settings.exists() else None
    if isinstance(found, list):  # several by name; the one called default is for plain chat
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}.get("default")
    return found if isinstance(found, str) else None
