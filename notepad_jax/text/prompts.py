"""Prompts built from token-level templates: a template is a text file, read once.

A file has the sections `[update]` (one turn over a chunk), `[answer]` (the last turn),
`[no_memory]` (shown while nothing was ever written), `[keep]` (the marker by which a
policy keeps its memory; may be empty) and, if wanted, `[direct]` (document and question in
one turn, for the methods that a memory is compared with), `[between]` (what stands between notes
that are shown together; a line break where the section is missing), `[exit]` (the marker by which
a policy goes to the answer at once), `[end]` (what is read after the document's last chunk) and
`[again]` (the marker by which a policy then reads it again), and `[chat]`, turn markers
around `{turn}`, for which the model's own chat template can stand in (`chat.frame`). What stands
before the first section is a comment; blank lines around a section's text are dropped,
and `\\n` at its very end is a line break. `{question}`, `{chunk}` and `{memory}` are
replaced by token ids that are never decoded on the way, so a document cannot become a
special token; control pieces like `<|end|>` may stand in the template itself. Other
braces (`\\boxed{...}`) are ordinary text.

The order of placeholders decides how much a group shares (`Prompt.shared`): everything
before the memory; and where the question comes after the chunk, everything before the
question, so that all questions about a document share its chunk. The same builder serves
training, evaluation and serving. Above: reading.memory_agent; below: tokenizer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.text.chat import Frame
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import NO_TOKENS, Prompt, Tokens, tokens

SHIPPED = pathlib.Path(__file__).parent / "templates"

NO_CHAT = "{turn}"
_SECTIONS = ("update", "answer", "no_memory", "keep")
_IF_WANTED = ("direct", "between", "exit", "end", "again", "chat")
_HEADER = re.compile(r"^\[([a-z_]+)\][ \t]*$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

Segment = Tokens | str  # literal ids, or the name of a placeholder


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """The token-level form of a template file; `load` makes one."""

    name: str
    update: tuple[Segment, ...]
    answer: tuple[Segment, ...]
    direct: tuple[Segment, ...]  # empty: this template has no [direct] section
    no_memory: Tokens  # never empty
    keep: Tokens  # empty: this template has no keep marker
    between: Tokens  # notes that are shown together
    stop_ids: tuple[int, ...]
    # These three empty: the template has no such section.
    exit: Tokens = dataclasses.field(default_factory=tokens)
    end: Tokens = dataclasses.field(default_factory=tokens)
    again: Tokens = dataclasses.field(default_factory=tokens)

    @classmethod
    def load(
        cls, path: str | pathlib.Path, tokenizer: Tokenizer, frame: Frame | None = None
    ) -> Template:
        """Reads a template file, or a shipped one by its bare name (`question_last`).

        A frame, what the model's own chat template writes around a turn, takes the place of
        the file's [chat] section; a file without one is for models that do not chat.
        Raises ValueError for a missing file, section or placeholder, or for a control piece
        that the tokenizer does not have.
        """
        path = find(path)
        try:
            sections, stop_ids = _split(path), tokenizer.stop_ids
            if frame is not None and sections["chat"] != NO_CHAT:
                sections, stop_ids = {**sections, "chat": frame.chat}, frame.stop_ids
            return cls(
                name=path.stem,
                update=_parse(sections, "update", {"question", "chunk", "memory"}, tokenizer),
                answer=_parse(sections, "answer", {"question", "memory"}, tokenizer),
                direct=_parse(sections, "direct", {"question", "chunk"}, tokenizer)
                if "direct" in sections
                else (),
                no_memory=_marker(sections, "no_memory", tokenizer),
                keep=_marker(sections, "keep", tokenizer),
                between=tokenizer.encode_template(sections.get("between", "\n")),
                stop_ids=stop_ids,
                **{
                    name: tokenizer.encode_template(sections.get(name, ""))
                    for name in ("exit", "end", "again")
                },
            )
        except UnicodeDecodeError:
            raise ValueError(f"template {path} is no UTF-8 text; write it as such") from None
        except ValueError as error:
            raise ValueError(f"template {path}: {error}") from error

    @functools.cached_property
    def digest(self) -> str:
        """A checksum of the sections' token ids: two files may have one name."""
        text = json.dumps(dataclasses.asdict(self), default=np.ndarray.tolist)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    # Made once: a prompt is built for every turn.
    @functools.cached_property
    def _stop(self) -> Tokens:
        return tokens(self.stop_ids[:1])

    @functools.cached_property
    def _update_shared(self) -> tuple[Segment, ...]:
        return self.update[: _update_cut(self.update)]

    @functools.cached_property
    def _update_tail(self) -> tuple[Segment, ...]:
        return self.update[_update_cut(self.update) :]

    @functools.cached_property
    def _shared_names(self) -> frozenset[str]:
        return frozenset(part for part in self._update_shared if isinstance(part, str))

    @property
    def shares_questions(self) -> bool:
        """Whether all questions about a document share its chunks: the question follows them."""
        return self._shared_names == {"chunk"}

    def shown_memory(self, memory: Tokens) -> Tokens:
        """Returns the memory as a prompt shows it: the marker where nothing was written."""
        return memory if len(memory) else self.no_memory

    def update_prompt(
        self,
        question: Tokens,
        chunk: Tokens,
        memory: Tokens,
        keeps: bool = False,
        like: Prompt | None = None,
    ) -> Prompt:
        """Returns the prompt of an update turn; its draft is what leaves the memory as it is.

        The old memory plus stop, or, where the policy `keeps` it by a marker, the marker plus
        stop. `like` is one of another chunk, all else being the same: tail and draft are its own
        arrays, by which an engine knows them again.
        """
        shown = self.shown_memory(memory)
        values = {"question": question, "chunk": chunk, "memory": shown}
        shared = _fill(self._update_shared, values)
        if like is not None and "chunk" in self._shared_names:
            return Prompt(shared, like.tail, like.draft)
        same = self.keep if keeps and len(self.keep) else shown
        tail, draft = _fill(self._update_tail, values), _whole([same, self._stop])
        return Prompt(shared, tail, draft)

    def answer_prompt(self, question: Tokens, memory: Tokens) -> Prompt:
        """Returns the prompt of the answer turn."""
        values = {"question": question, "memory": self.shown_memory(memory)}
        cut = _answer_cut(self.answer)
        return Prompt(_fill(self.answer[:cut], values), _fill(self.answer[cut:], values))

    def direct_prompt(self, question: Tokens, text: Tokens) -> Prompt:
        """Returns a prompt of one turn over `text`, a document or an excerpt, and the question.

        Raises ValueError if the template has no [direct] section.
        """
        if not self.direct:
            raise ValueError(
                f"template {self.name} has no [direct] section, which shows {{chunk}} and "
                "{question} in one turn; add one, or measure the method notepad alone"
            )
        values = {"question": question, "chunk": text}
        names = [part if isinstance(part, str) else "" for part in self.direct]
        cut = min(names.index("chunk") + 1, len(names) - 1)  # all questions share the text
        return Prompt(_fill(self.direct[:cut], values), _fill(self.direct[cut:], values))

    def longest_prompt(
        self, max_question: int, chunk_size: int, max_memory: int, carry: int = 0
    ) -> int:
        """Returns the most tokens a prompt can have under these limits.

        `carry` tokens of an answer that goes on stand behind what asks for it.
        """
        memory = max(max_memory, len(self.no_memory))
        sizes = {"question": max_question, "chunk": chunk_size, "memory": memory}
        return max(
            more + sum(sizes[part] if isinstance(part, str) else len(part) for part in parts)
            for parts, more in ((self.update, 0), (self.answer, carry), (self.direct, carry))
        )


def is_shipped(name: str) -> bool:
    """Whether a template comes with this package, under a bare name."""
    path = pathlib.Path(name)
    return str(path) == path.name and (SHIPPED / f"{name}.txt").is_file()


def find(path: str | pathlib.Path) -> pathlib.Path:
    """Returns `path` if it is a file, else the shipped template of that name."""
    path = pathlib.Path(path)
    if path.is_file():
        return path
    if is_shipped(str(path)):
        return SHIPPED / f"{path.name}.txt"
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.txt")))
    raise ValueError(f"there is no template {path}; give a file, or one of {names}")


def _split(path: pathlib.Path) -> Mapping[str, str]:
    """Returns section -> text, without the blank lines around it."""
    text = path.read_text(encoding="utf-8-sig")  # as editors of Windows write it
    parts = _HEADER.split(text)[1:]
    sections: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name not in (*_SECTIONS, *_IF_WANTED) or name in sections:
            known = ", ".join((*_SECTIONS, *_IF_WANTED))
            problem = "twice" if name in sections else f"unknown; sections are {known}"
            raise ValueError(f"section [{name}] is {problem}")
        text = body.strip("\n")
        bare = re.sub(r"(\\n)+\Z", "", text)
        sections[name] = bare + "\n" * ((len(text) - len(bare)) // 2)
    missing = [name for name in _SECTIONS if name not in sections]
    if missing:
        raise ValueError(f"section [{missing[0]}] is missing")
    return {"chat": NO_CHAT} | sections


def _parse(
    sections: Mapping[str, str],
    name: str,
    wanted: set[str],
    tokenizer: Tokenizer,
) -> tuple[Segment, ...]:
    if sections["chat"].count("{turn}") != 1:
        raise ValueError("section [chat] needs the placeholder {turn}, once")
    text = sections["chat"].replace("{turn}", sections[name])
    parts = _PLACEHOLDER.split(text)  # literal, name, literal, name, ..., literal
    if sorted(parts[1::2]) != sorted(wanted):
        raise ValueError(
            f"section [{name}] needs {_braced(sorted(wanted))}, once each, "
            f"and has {_braced(parts[1::2])}"
        )
    literal = [tokenizer.encode_template(part) for part in parts[::2]]
    segments: list[Segment] = []
    for ids, placeholder in zip(literal, [*parts[1::2], None], strict=True):
        segments += [ids] if len(ids) else []
        segments += [placeholder] if placeholder else []
    return tuple(segments)


def _braced(names: Sequence[str]) -> str:
    return ", ".join("{" + name + "}" for name in names) or "none"


def _marker(sections: Mapping[str, str], name: str, tokenizer: Tokenizer) -> Tokens:
    ids = tokenizer.encode_template(sections[name])
    if name == "no_memory" and not len(ids):
        raise ValueError("section [no_memory] is empty; a reading needs a marker to start from")
    return ids


def _update_cut(segments: tuple[Segment, ...]) -> int:
    """Index of the first segment that is not shared (never past the end).

    A question after the chunk ends the shared part at the chunk itself: literal text in
    between is a token or two, and a prefix that ends with the chunk tends to fill its pages.
    """
    names = [part if isinstance(part, str) else "" for part in segments]
    chunk, question, memory = (names.index(name) for name in ("chunk", "question", "memory"))
    return chunk + 1 if chunk < question < memory else memory


def _answer_cut(segments: tuple[Segment, ...]) -> int:
    return next(i for i, part in enumerate(segments) if isinstance(part, str))


def _fill(segments: tuple[Segment, ...], values: Mapping[str, Tokens]) -> Tokens:
    parts = [values[part] if isinstance(part, str) else part for part in segments]
    if len(parts) == 1:
        return tokens(parts[0])  # the very same array: equal prefixes are cheap to recognise
    return _whole(parts) if parts else NO_TOKENS


def _whole(parts: Sequence[Tokens]) -> Tokens:
    """Returns the parts one after the other: the array is not shared, so it is not copied."""
    whole = np.concatenate(parts)
    whole.flags.writeable = False
    return whole
