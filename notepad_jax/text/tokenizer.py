"""Text to token ids and back, through sentencepiece or Hugging Face's `tokenizers`.

Two promises live here, the same for both libraries. A document can never become a
special token, even if it spells one: `encode` produces ordinary pieces only, and control
pieces such as `<|im_end|>` come from template text (`encode_template`) or from the policy.
And a stream is encoded exactly as the whole text would be, however it was cut on its way
here: text is encoded in blocks whose borders depend on the text alone, and `encode` goes
through the same blocks.

For sentencepiece the special pieces become control pieces, which its encoder never
produces. `tokenizers` looks for added tokens in every text, and its switch
`encode_special_tokens` leaves out those that are not marked special (Qwen's `<think>`);
so documents go through a second tokenizer from which they were removed, vocabulary and
merges included. A check at load says no to what cannot keep the promises.

A block ends before a single space between two solid characters, which no supported model
merges across (sentencepiece drops that space and gets it back as the dummy prefix of the
next block); byte-level models also allow the start of a line and CJK punctuation. Text
without such a place is cut after `LONGEST_BLOCK` characters, the one place where ids may
differ from the library's own for the whole text. Used by prompts, chat and chunks;
below are sentencepiece, tokenizers and numpy.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2

from notepad_jax.types import Tokens, tokens

SHORTEST_BLOCK = 4_096  # characters; the first good border after these ends the block
LONGEST_BLOCK = 65_536  # characters; a block is cut here if no good border came
STOP_PIECES = ("<|end|>", "<|im_end|>", "<end_of_turn>", "</s>")  # the first known one stops

# What an export has to copy so that the new folder opens as the old one did.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

_BORDER = re.compile(r"(?<=[\w\x21-\x7e]) (?=[\w\x21-\x7e])")
_KEEPING_BORDER = re.compile(r"(?<=[\w\x21-\x7e])(?= [\w\x21-\x7e])")  # the space stays
# Byte-level models split text by a pattern first; in all of them letters end a piece before
# a space or punctuation, and a letter after line breaks starts one. NFC cannot reach across.
_BYTE_LEVEL_BORDER = re.compile(
    _KEEPING_BORDER.pattern
    + r"|(?<=\n)(?=[^\W\d_])"
    + r"|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff])"
    + r"(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
_CONTROL_LOOK = re.compile(r"<\|[^<>|\s]+\|>")  # a piece that looks so is always control


class Tokenizer(Protocol):
    """What the agent asks of a tokenizer; both classes below are one."""

    path: pathlib.Path
    vocab_size: int  # ids at or above this exist in no text; the policy must mask them
    stop_ids: tuple[int, ...]  # a completion ends with any of these; the first is the usual one
    controls: Mapping[str, int]  # the pieces that no document can become

    def encode(self, text: str) -> Tokens: ...

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def control_id(self, name: str) -> int: ...

    def encode_template(self, text: str) -> Tokens: ...


def open_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder, by the files that are there.

    tokenizer.json wins over tokenizer.model: only it holds tokens that were added later.
    Raises ValueError if there is neither, or if the one that is there cannot be used.
    """
    folder = pathlib.Path(folder)
    if (folder / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(folder)
    if (folder / "tokenizer.model").is_file():
        return SentencePieceTokenizer(folder / "tokenizer.model")
    raise ValueError(
        f"{folder} has neither a tokenizer.json (Hugging Face tokenizers) nor a tokenizer.model "
        "(sentencepiece); copy the one that belongs to the model there"
    )


class SentencePieceTokenizer:
    """A sentencepiece model that keeps special pieces out of ordinary text.

    `special` names further pieces that must never come from text; every piece that looks
    like `<|name|>` is special whatever its type in the model file.
    Raises ValueError for a missing or broken model, or one that cannot be streamed.
    """

    def __init__(self, path: str | pathlib.Path, special: Sequence[str] = ()) -> None:
        model = _load_model(pathlib.Path(path))
        _make_control(model, special)
        _check_streamable(model, path)
        self._whole = _processor(model)
        self._after_space = _processor(model, add_dummy_prefix=True)
        self._mid_word = _processor(model, add_dummy_prefix=False, remove_extra_whitespaces=False)
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        self.controls: Mapping[str, int] = {
            piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == kinds.CONTROL
        }
        self._control_split = re.compile(
            "(" + "|".join(sorted(map(re.escape, self.controls), reverse=True)) + ")"
        )
        self.path = pathlib.Path(path)
        self.vocab_size: int = len(model.pieces)
        stops = _usual_stops(self.controls)
        if not stops:
            raise ValueError(
                f"{path} has none of the stop pieces {', '.join(STOP_PIECES)} as a control piece; "
                "name the one it uses in `special`, or train the model with one"
            )
        self.stop_ids: tuple[int, ...] = tuple(stops[:1])

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a special token."""
        return tokens(np.concatenate([_NONE, *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        at most `LONGEST_BLOCK` characters and one piece are held at a time.
        """
        processor = self._whole
        for block, ends_at_space in _blocks(pieces, _BORDER):
            ids = _encode(processor, block)
            if not ends_at_space:
                processor = self._mid_word
            elif len(ids) or processor is not self._whole:
                processor = self._after_space  # else nothing came out: this is still the start
            if len(ids):
                yield tokens(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens vanish, ids outside the model are unknown."""
        known = (int(i) if 0 <= i < self.vocab_size else self._whole.unk_id() for i in ids)
        return self._whole.decode(list(known))

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""
        return _control_id(self.controls, name, self.path)

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we wrote ourselves: control pieces in it are honoured.

        Raises ValueError where `<|name|>` is not a control piece of this model.
        """
        for name in _CONTROL_LOOK.findall(text):
            self.control_id(name)
        parts = [_NONE]
        for part in self._control_split.split(text):
            known = part in self.controls
            parts.append(tokens([self.controls[part]]) if known else self.encode(part))
        return tokens(np.concatenate(parts))


class HuggingFaceTokenizer:
    """A byte-complete BPE tokenizer.json that keeps added tokens out of ordinary text.

    Every added token is a control piece, whether it is marked special or not, except those
    of white space alone, which some models use for runs of spaces. `stop_ids` are the
    `eos_token` of tokenizer_config.json and the `eos_token_id` of generation_config.json,
    in this order. Raises ValueError for missing or broken files, for a model that is not
    BPE or cannot write every text, and for one that cannot be streamed.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        folder = pathlib.Path(folder)
        self.path = folder / "tokenizer.json"
        spec = read_json(self.path)
        _check_is_bpe(spec, self.path)
        self._template = _load_bpe(_bare(spec), self.path)
        _check_added_ids(spec, self._template, self.path)
        self.controls: Mapping[str, int] = {
            token["content"]: token["id"] for token in _added(spec, blank=False)
        }
        ordinary = _without(spec, self.controls)
        _check_byte_complete(ordinary, self.path)
        self._start = _load_bpe(ordinary, self.path)
        middle = _without_prefix(ordinary)
        same = middle == ordinary
        self._middle = self._start if same else _load_bpe(middle, self.path)
        byte_level = "ByteLevel" in _types(ordinary["pre_tokenizer"])
        self._border = _BYTE_LEVEL_BORDER if byte_level else _KEEPING_BORDER
        _check_bpe_streamable(self._start, self._middle, self._border, self.path)
        self._known = frozenset(self._template.get_vocab(with_added_tokens=True).values())
        self.vocab_size: int = max(self._known) + 1
        self.stop_ids: tuple[int, ...] = _stop_ids(folder, self.controls, self._known)

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a control piece."""
        return tokens(np.concatenate([_NONE, *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        at most `LONGEST_BLOCK` characters and one piece are held at a time.
        """
        encoder = self._start
        for block, _ in _blocks(pieces, self._border):
            ids = encoder.encode(_well_formed(block), add_special_tokens=False).ids
            encoder = self._middle
            if ids:
                yield tokens(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens vanish, unknown ids become U+FFFD."""
        runs: list[list[int]] = [[]]
        for i in map(int, ids):
            runs[-1].append(i) if i in self._known else runs.append([])
        return "\ufffd".join(self._template.decode(run, skip_special_tokens=True) for run in runs)

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""
        return _control_id(self.controls, name, self.path)

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we or the model's makers wrote: control pieces are honoured.

        The ids are the library's own for this text, without what its post-processor adds.
        Raises ValueError where `<|name|>` is not a control piece of this tokenizer.
        """
        for name in _CONTROL_LOOK.findall(text):
            self.control_id(name)
        return tokens(self._template.encode(_well_formed(text), add_special_tokens=False).ids)


_NONE = tokens()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; ValueError if there is no file or no object in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; copy it from the model's folder") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where an object is wanted")
    return value


def _control_id(controls: Mapping[str, int], name: str, path: pathlib.Path) -> int:
    if name not in controls:
        some = ", ".join([*controls][:12]) + (", ..." if len(controls) > 12 else "")
        raise ValueError(f"{path} has no control piece {name!r}; it has {some or 'none'}")
    return controls[name]


def _usual_stops(controls: Mapping[str, int]) -> list[int]:
    return [controls[name] for name in STOP_PIECES if name in controls]


def _well_formed(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates become '?'


# ------------------------------------------------------------------------- tokenizer.json


def _added(spec: Mapping[str, Any], blank: bool) -> list[dict[str, Any]]:
    """The added tokens of white space alone, or the others."""
    added = spec.get("added_tokens") or []
    return [token for token in added if blank is not bool(token["content"].strip(_BLANKS))]


_BLANKS = " \t\r\n\u2581"


def _check_added_ids(
    spec: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, path: pathlib.Path
) -> None:
    """The library numbers added tokens itself and only warns if the file says otherwise."""
    for token in spec.get("added_tokens") or []:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise ValueError(
                f"{path} gives {token['content']!r} the id {token['id']}, and tokenizers reads "
                f"it as {found}; the file was edited by hand or is damaged, copy it again"
            )


def _load_bpe(spec: Mapping[str, Any], path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json that tokenizers reads: {error}") from None


def _bare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer without what adds, cuts, pads or draws tokens at random."""
    model = {**spec["model"], "dropout": None}
    return {**spec, "model": model, "post_processor": None, "truncation": None, "padding": None}


def _without(spec: Mapping[str, Any], controls: Mapping[str, int]) -> dict[str, Any]:
    """The same tokenizer, unable to produce a control piece.

    They leave the vocabulary and the merges too: `ignore_merges` looks whole words up
    there. Models that write every byte need no unknown token, so that leaves as well.
    """
    model, blanks = _bare(spec)["model"], _added(spec, blank=True)
    banned = {name for name in controls if name in model["vocab"]}
    vocab = {piece: i for piece, i in model["vocab"].items() if piece not in banned}
    vocab |= {token["content"]: token["id"] for token in blanks}  # or they would be renumbered
    merges = model["merges"]
    if banned:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
        merges = [[a, b] for a, b in pairs if not {a, b, a + b} & banned]
    model |= {"vocab": vocab, "merges": merges, "unk_token": None}
    return {**_bare(spec), "added_tokens": blanks, "model": model}


def _without_prefix(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer in the middle of a text: no space is put in front."""
    changed = dict(spec)
    for name in ("normalizer", "pre_tokenizer"):
        changed[name] = _no_prefix(spec.get(name))
    return changed


def _no_prefix(part: Any) -> Any:
    if part is None or part["type"] == "Prepend":
        return None
    changed = dict(part)
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            kept = [_no_prefix(step) for step in part[steps]]
            changed[steps] = [step for step in kept if step is not None]
    if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    if part["type"] == "Metaspace":
        changed.pop("add_prefix_space", None)  # the older spelling of prepend_scheme
        changed["prepend_scheme"] = "never"
    return changed


def _types(part: Any) -> set[str]:
    if part is None:
        return set()
    steps = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {part["type"]}.union(*map(_types, steps))


def _check_is_bpe(spec: Mapping[str, Any], path: pathlib.Path) -> None:
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else "nothing"
    if kind != "BPE":
        raise ValueError(
            f"{path} holds a model of type {kind}, and only BPE is read from tokenizer.json; "
            "if the folder has a tokenizer.model, remove tokenizer.json to use that"
        )


def _check_byte_complete(spec: Mapping[str, Any], path: pathlib.Path) -> None:
    if "ByteLevel" in _types(spec.get("pre_tokenizer")):
        wanted = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        wanted = [f"<0x{byte:02X}>" for byte in range(256)]
        if not spec["model"].get("byte_fallback"):
            raise ValueError(
                f"{path} cannot write every text: it is neither byte-level nor does it fall back "
                "to bytes; use another tokenizer"
            )
    missing = sum(piece not in spec["model"]["vocab"] for piece in wanted)
    if missing:
        raise ValueError(
            f"{path} cannot write every text: {missing} of the 256 bytes have no ordinary piece; "
            "use another tokenizer"
        )


_BYTE_LEVEL = tokenizers.decoders.ByteLevel()
_PROBE = (
    "It's a test: 3.14 + 2,718 = x_1! (no) \u201cquotes\u201d don't stop\n"
    "Line two  has   runs    of spaces \t and tabs\n\n\nThird\r\nFourth a/b //c http://x.y z? \n"
    "def f(x):\n    return x ** 2 # ok\n\u65e5\u672c\u8a9e\u3001\u4e2d\u6587\u3002\u4e16\u754c "
    "caf\u00e9 na\u00efve e\u0301 \U0001f600\u200d\U0001f525 \u0645\u0631\u062d\u0628\u0627 "
    "12 345 6789 end.\nLast one 's 're A B\n"
)


def _check_bpe_streamable(
    start: tokenizers.Tokenizer,
    middle: tokenizers.Tokenizer,
    border: re.Pattern[str],
    path: pathlib.Path,
) -> None:
    """Says no to pieces that reach across a border, found one by one and by a probe."""
    whole = start.encode(_PROBE, add_special_tokens=False).ids
    for match in border.finditer(_PROBE):
        first, second = _PROBE[: match.start()], _PROBE[match.start() :]
        ids = start.encode(first, add_special_tokens=False).ids
        if ids + middle.encode(second, add_special_tokens=False).ids != whole:
            raise ValueError(
                f"{path} encodes {first[-8:] + second[:8]!r} otherwise when it is cut between "
                f"{first[-1]!r} and {second[0]!r}; such tokenizers cannot be streamed"
            )
    for piece in start.get_vocab(with_added_tokens=False):
        text = _spelled(piece, border)
        spans = any(1 < found.start() <= len(text) for found in border.finditer(f"a{text}a"))
        if spans and _is_one_word(start, text):
            raise ValueError(
                f"{path} has the piece {piece!r} that spans words; "
                "such tokenizers cannot be streamed"
            )


def _spelled(piece: str, border: re.Pattern[str]) -> str:
    """The text that a piece of the vocabulary stands for."""
    if border is _KEEPING_BORDER:
        return piece.replace("\u2581", " ")
    if piece.isascii():
        return piece
    return _BYTE_LEVEL.decode([piece])


def _is_one_word(tokenizer: tokenizers.Tokenizer, text: str) -> bool:
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return True
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) < 2


def _stop_ids(
    folder: pathlib.Path, controls: Mapping[str, int], known: frozenset[int]
) -> tuple[int, ...]:
    stops: list[int] = []
    eos = special_tokens(folder).get("eos_token")
    if eos is not None:
        stops.append(_control_id(controls, eos, folder / "tokenizer.json"))
    if (folder / "generation_config.json").is_file():
        path = folder / "generation_config.json"
        eos = read_json(path).get("eos_token_id")
        listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for i in listed:
            if not isinstance(i, int) or i not in known:
                raise ValueError(f"{path} ends at id {i!r}, which {folder}/tokenizer.json lacks")
        stops += listed
    stops = stops or _usual_stops(controls)[:1]
    if not stops:
        raise ValueError(
            f"{folder} does not say where a completion ends; "
            "give eos_token_id in generation_config.json or eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(stops))


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """Returns the `..._token` entries of a model folder, name -> text.

    tokenizer_config.json speaks last, special_tokens_map.json before it; an entry is a
    string, or an object with `content`.
    """
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        entries = read_json(folder / file) if (folder / file).is_file() else {}
        for name, value in entries.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str) and text:
                found[name] = text
    return found


# -------------------------------------------------------------------------- sentencepiece


def _load_model(path: pathlib.Path) -> sentencepiece_model_pb2.ModelProto:
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no tokenizer at {path}; give a sentencepiece .model") from None
    except Exception as error:  # protobuf's DecodeError has moved between versions
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
    if not model.pieces:
        raise ValueError(f"{path} is not a sentencepiece model: it has no pieces")
    return model


def _make_control(model: sentencepiece_model_pb2.ModelProto, special: Sequence[str]) -> None:
    """Turns special-looking ordinary or user-defined pieces into control pieces, in place."""
    known = {piece.piece for piece in model.pieces}
    for name in special:
        if name not in known:
            raise ValueError(f"special piece {name!r} is not in the tokenizer's vocabulary")
    for piece in model.pieces:
        if piece.piece in special or _CONTROL_LOOK.fullmatch(piece.piece):
            piece.type = sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL


def _check_streamable(model: sentencepiece_model_pb2.ModelProto, path: object) -> None:
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError(f"{path} puts the space after the word; such models cannot be streamed")
    for piece in model.pieces:
        if "\u2581" in piece.piece.lstrip("\u2581"):
            raise ValueError(
                f"{path} has the piece {piece.piece!r} that spans words; "
                "such models cannot be streamed (train with split_by_whitespace)"
            )


def _processor(
    model: sentencepiece_model_pb2.ModelProto, **normaliser: bool
) -> sentencepiece.SentencePieceProcessor:
    copy = sentencepiece_model_pb2.ModelProto()
    copy.CopyFrom(model)
    for name, value in normaliser.items():
        setattr(copy.normalizer_spec, name, value)
    return sentencepiece.SentencePieceProcessor(model_proto=copy.SerializeToString())


def _encode(processor: sentencepiece.SentencePieceProcessor, text: str) -> np.ndarray:
    return np.array(processor.encode(_well_formed(text)), np.int32)


# --------------------------------------------------------------------------------- blocks


def _blocks(pieces: Iterable[str], border_pattern: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Yields (block, ends at a border); the borders depend on the joined text alone.

    What the pattern matches (a space, or nothing) belongs to neither block.
    """
    buffer: list[str] = []
    held, next_look = 0, SHORTEST_BLOCK
    for piece in pieces:
        buffer.append(piece)
        held += len(piece)
        if held < next_look:
            continue
        rest = yield from _whole_blocks("".join(buffer), border_pattern)
        buffer, held = [rest], len(rest)
        next_look = held + SHORTEST_BLOCK
    rest = yield from _whole_blocks("".join(buffer), border_pattern)
    yield rest, True


def _whole_blocks(
    text: str, border_pattern: re.Pattern[str]
) -> Generator[tuple[str, bool], None, str]:
    """Yields the blocks whose end is certain, whatever text follows; returns the rest."""
    start = 0
    while True:
        border = border_pattern.search(text, start + SHORTEST_BLOCK, start + LONGEST_BLOCK + 1)
        if border:
            yield text[start : border.start()], True
            start = border.end()
        elif len(text) - start > LONGEST_BLOCK:
            yield text[start : start + LONGEST_BLOCK], False
            start += LONGEST_BLOCK
        else:
            return text[start:]
