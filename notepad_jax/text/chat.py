"""The model's chat template: messages to text, and the frame of turn markers around one turn.

A model folder brings a jinja program that writes its turn markers. We use it once, when a
prompt template is loaded: a conversation whose user message is a mark is rendered, and
what stands before and after the mark is the frame. Prompts then do what they always did:
the frame's text is the model's and may hold special tokens; question, chunk and memory
are spliced as ids of ordinary text and never pass through the program. So the part before
the chunk is the same array for all members of a group, whatever the template is.

The program is not trusted: it runs in jinja2's immutable sandbox in a process of its own,
with limits of time, memory and output (`chat_render`). Above: prompts and the programs;
below: tokenizer and model_folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from notepad_jax.text.model_folder import present, read_json, special_tokens
from notepad_jax.text.tokenizer import Tokenizer

RENDERER = pathlib.Path(__file__).parent / "chat_render.py"
MAX_SOURCE = 1_000_000  # characters of a template; published ones have up to 20 thousand
MAX_TEXT = 4_000_000  # characters that a rendering may write
MAX_SECONDS = 5  # of computing, for all renderings of one call
MAX_WAIT = 60  # seconds on the clock, for a machine that is busy with other things
MAX_MEMORY = 1 << 29  # bytes of address space
NOW = datetime.datetime(2025, 1, 1)  # what strftime_now tells: a prompt must not age

# Two marks, so that a template which looks into the message is noticed.
_MARKS = ("NotepadTurnA7", "NotepadTheOtherTurn41")
_REPLY = "NotepadReply53"
_PLACEHOLDER = re.compile(r"\{[a-z_]+\}")

Message = Mapping[str, Any]  # role, content, and what else a template knows


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja chat template and the variables it is rendered with; `read` finds one."""

    path: pathlib.Path  # for messages
    source: str
    variables: Mapping[str, Any]  # bos_token, eos_token, and options like enable_thinking
    now: datetime.datetime = NOW

    @classmethod
    def read(cls, folder: str | pathlib.Path, **options: Any) -> ChatTemplate:
        """Reads the template of a model folder; `options` are further variables for it.

        Looks for chat_template.jinja, chat_template.json and then `chat_template` in
        tokenizer_config.json, where a list means its entry `default`. Raises ValueError if
        there is none or it is not a template; `has_template` asks first.
        """
        folder = pathlib.Path(folder)
        found = _find(folder)
        if found is None:
            raise ValueError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); write the turn markers into the [chat] section instead"
            )
        path, source = found
        if len(source) > MAX_SOURCE:
            raise ValueError(f"{path}: the chat template has more than {MAX_SOURCE} characters")
        return cls(path, source, {**special_tokens(folder), **options})

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Returns the text of a conversation, with the generation prompt if wanted.

        This is text for people and for tests: what a user wrote is not told apart from
        markers in it, so it must never be encoded as template text. Raises ValueError
        where the template fails, refuses, or exceeds its limits.
        """
        return self.render_all([(messages, add_generation_prompt)])[0]

    def render_all(self, conversations: Sequence[tuple[Sequence[Message], bool]]) -> list[str]:
        """Renders (messages, add_generation_prompt) pairs in one process; see `render`."""
        requests = [
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": cue,
                "tools": None,  # templates ask `tools is not none`
                "documents": None,
            }
            for messages, cue in conversations
        ]
        job = {
            "source": self.source,
            "variables": dict(self.variables),
            "now": self.now.isoformat(),
            "max_seconds": MAX_SECONDS,
            "max_memory": MAX_MEMORY,
            "max_characters": MAX_TEXT,
            "requests": requests,
        }
        answer = _run(job)
        if "error" in answer:
            raise ValueError(f"chat template of {self.path}: {answer['error']}")
        return answer["texts"]


@dataclasses.dataclass(frozen=True)
class Frame:
    """The turn markers around a user turn, and the stop ids of a reply to it."""

    before: str
    after: str  # ends with the cue for the reply
    stop_ids: tuple[int, ...]  # the end-of-turn token first, then the tokenizer's own

    @property
    def chat(self) -> str:
        """The frame as the text of a template file's [chat] section."""
        return self.before + "{turn}" + self.after


def has_template(folder: str | pathlib.Path) -> bool:
    """Says whether a model folder brings a chat template."""
    return _find(pathlib.Path(folder)) is not None


def frame(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """Returns the frame of one user turn, by rendering marks in its place.

    Raises ValueError where the message does not come out once and whole, where its
    surroundings depend on it, or where the template writes tokens the tokenizer lacks.
    """
    users = [[{"role": "user", "content": mark}] for mark in _MARKS]
    replied = [*users[0], {"role": "assistant", "content": _REPLY}]
    *turns, reply = template.render_all([(users[0], True), (users[1], True), (replied, False)])
    frames = [_around(template, text, mark) for text, mark in zip(turns, _MARKS, strict=True)]
    if frames[0] != frames[1]:
        raise ValueError(
            f"chat template of {template.path}: what it writes around a message depends on the "
            "message; write the turn markers into the [chat] section instead"
        )
    before, after = frames[0]
    try:
        tokenizer.encode_template(before), tokenizer.encode_template(after)
    except ValueError as error:
        raise ValueError(f"chat template of {template.path}: {error}") from error
    return Frame(before, after, _stop_ids(template, tokenizer, reply))


def _around(template: ChatTemplate, text: str, mark: str) -> tuple[str, str]:
    parts = text.split(mark)
    if len(parts) != 2:
        raise ValueError(
            f"chat template of {template.path}: a user message comes out {len(parts) - 1} times, "
            "and a prompt needs it once; write the turn markers into the [chat] section instead"
        )
    strange = _PLACEHOLDER.search(" ".join(parts))
    if strange:
        raise ValueError(
            f"chat template of {template.path}: it writes {strange[0]}, which our templates "
            "would take for a placeholder; write the turn markers into the [chat] section instead"
        )
    return parts[0], parts[1]


def _stop_ids(template: ChatTemplate, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The token that the template writes after a reply, then what the folder's files say."""
    _, found, rest = text.rpartition(_REPLY)
    if not found:
        raise ValueError(f"chat template of {template.path}: it leaves out the assistant's reply")
    after = [name for name in tokenizer.controls if rest.lstrip().startswith(name)]
    ends = [tokenizer.control_id(max(after, key=len))] if after else []
    return tuple(dict.fromkeys([*ends, *tokenizer.stop_ids]))


def _find(folder: pathlib.Path) -> tuple[pathlib.Path, str] | None:
    path = folder / "chat_template.jinja"
    if present(path):
        try:
            return path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        value = read_json(path).get("chat_template") if present(path) else None
        if value is not None:
            return path, _default(path, value)
    return None


def _default(path: pathlib.Path, value: Any) -> str:
    if isinstance(value, list):  # several, by name
        if not all(
            isinstance(entry, dict) and {"name", "template"} <= set(entry) for entry in value
        ):
            raise ValueError(f"{path}: chat_template is a list whose names or texts are missing")
        named = {entry["name"]: entry["template"] for entry in value}
        if "default" not in named:
            raise ValueError(
                f"{path} has the chat templates {', '.join(map(repr, named))} and no 'default'; "
                "write the one to use to chat_template.jinja"
            )
        value = named["default"]
    if not isinstance(value, str):
        raise ValueError(f"{path}: chat_template is a {type(value).__name__}, not a text")
    return value


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Renders in a new process, which ends with its limits and takes nothing along."""
    command = [sys.executable, "-P", str(RENDERER)]
    limits = f"{MAX_SECONDS} seconds or {MAX_MEMORY >> 20} MB"
    try:
        done = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, timeout=MAX_WAIT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it is not done after {MAX_WAIT} seconds"}
    if done.returncode < 0:  # a signal: the limit of computing time, or the kernel's
        return {"error": f"it takes more than {limits}"}
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        return {"error": f"the renderer failed: {said[-1][:500]}"}
    return json.loads(done.stdout)
