"""Renders a chat template in a sandboxed process of its own: run as a file, never imported.

A chat template is a program that came with the weights. jinja2's immutable sandbox keeps
it from attributes and modules, but not from looping for ever or from filling the memory
with one multiplication; the operating system does that, for this process alone. `chat`
starts it, writes one JSON object to its stdin (source, variables, now, max_seconds,
max_memory in bytes, max_characters, and `requests`, each the variables of one rendering)
and reads one from its stdout: `texts`, one per request, or `error`, one line.

The environment is the one that `transformers.apply_chat_template` promises to templates:
trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, and
a `tojson` that leaves characters as they are. `strftime_now` tells the time it was given,
so that the same input is the same prompt on any day.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training masks; here it is no more."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def limit(seconds: int, memory: int) -> None:
    """Lets the kernel end this process at `seconds` of computing or `memory` bytes."""
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0}
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def environment(now: datetime.datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the sandbox with everything that templates of Hugging Face models call."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = now.strftime
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(template: jinja2.Template, variables: dict[str, Any], most: int) -> str:
    """Returns the text; ValueError as soon as it is longer than `most` characters."""
    parts, length = [], 0
    for part in template.generate(variables):
        length += len(part)
        if length > most:
            raise ValueError(f"it writes more than {most} characters")
        parts.append(part)
    return "".join(parts)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Renders every request of a job; the first failure is the answer."""
    now = datetime.datetime.fromisoformat(job["now"])
    try:
        template = environment(now).from_string(job["source"])
        texts = [
            render(template, {**request, **job["variables"]}, job["max_characters"])
            for request in job["requests"]
        ]
    except MemoryError:
        return {"error": f"it needs more than {job['max_memory'] >> 20} MB"}
    except Exception as error:  # a template may raise anything at all
        line = getattr(error, "lineno", None)  # only syntax errors know it
        place = f"line {line}: " if line else ""
        kind = "" if type(error) in (jinja2.TemplateError, ValueError) else type(error).__name__
        said = " ".join(str(error).split())[:500]
        return {"error": place + ": ".join(filter(None, (kind, said)))}
    return {"texts": texts}


def main() -> None:
    job = json.load(sys.stdin)
    limit(job["max_seconds"], job["max_memory"])
    json.dump(answer(job), sys.stdout)


if __name__ == "__main__":
    main()
