"""Compatibility with google-jetstream 0.2.2: its faults, and the repairs, in one place.

JetStream is archived, but its Engine interface is the one our engine implements, and its
orchestrator and gRPC server can serve it. Its package pulls in seqio and with it TensorFlow; we
install it without its dependencies and give `seqio` and `tiktoken` stand-ins, since only a base
class and unused loaders are taken from there.

What its orchestrator and server get wrong, and where that is mended:

- Here, when they are loaded: `jax.tree_map`, which jax removed; a root logger at DEBUG that
  writes to standard output, where `--json` prints; an address that is always every one of the
  machine's.
- In `asked`, before a request reaches its queue: an empty prompt, ids that there are not and a
  request without content kill its threads, and with them the process (SIGKILL); prompts that are
  too long are cut at the front; a limit of 0 tokens decodes a launch for nothing. All are refused.
- In `server`: a BOS before every prompt; text decoded token by token, which loses spaces and
  halves characters; token prompts that kill it unless the longest prompt is a power of two; a
  queue without an end; a client that hung up keeps its slot to the last token; an exception in
  a thread ends the process; one of its threads fails if the last turn ends between two of its
  lines; when it is stopped, clients are left waiting for its threads.
- In `engine`: one length and one sampling for all, and the last launch's tokens dropped where a
  client wanted fewer than the launch makes. A request's own limit and sampling travel through
  it in the place of the prompt's ids (`asked.Asked`).
- Here, `StockTokenizer`: the stop token is dropped; it is told here, and only its text is nothing.

What stays as it is: its messages have no field for logprobs, for why a completion ended, or for
several samples; prefixes are not shared; it has one engine (with several it hands one's cache to
another); `session_cache` and `priority` mean nothing to it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import struct

_ABSENT = {  # module: the names that JetStream takes from it at import time
    "seqio": (),
    "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
    "tiktoken": (),
    "tiktoken.load": ("load_tiktoken_bpe",),
}


def _stand_in_for_tokenizer_libraries() -> None:
    for package in ("seqio", "tiktoken"):
        if package in sys.modules or importlib.util.find_spec(package) is not None:
            continue
        for name in (n for n in _ABSENT if n.split(".")[0] == package):
            module = types.ModuleType(name, "a stand-in, see notepad_jax.engine.jetstream.compat")
            for attribute in _ABSENT[name]:
                setattr(module, attribute, type(attribute, (), {}))
            sys.modules[name] = module


_stand_in_for_tokenizer_libraries()

try:
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2
except ImportError as problem:
    raise ImportError(
        "JetStream's verbs need google-jetstream (pip install --no-deps google-jetstream==0.2.2; "
        f"its dependencies are not needed): {problem}; everything else here works without it"
    ) from problem

Engine = engine_api.Engine
TokenizerParameters = tokenizer_pb2.TokenizerParameters


@struct.dataclass
class Results(engine_api.ResultTokens):
    """JetStream's result of a launch, with the behaviour logprobs it has no field for."""

    logprobs: Any = None  # float32 [slots, tokens]

    def convert_to_numpy(self) -> Results:
        return self.replace(data=np.asarray(self.data), logprobs=np.asarray(self.logprobs))


def results(
    tokens_BK: np.ndarray, logprobs_BK: np.ndarray, made_B: np.ndarray, lengths_B: np.ndarray
) -> Results:
    """Packs tokens, their validity and the total lengths into JetStream's one result array."""
    steps = tokens_BK.shape[1]
    valid_BK = np.arange(steps) < made_B[:, None]
    data = np.concatenate([tokens_BK, valid_BK, lengths_B[:, None]], axis=1).astype(np.int32)
    return Results(
        data=data,
        tokens_idx=(0, steps),
        valid_idx=(steps, 2 * steps),
        length_idx=(2 * steps, 2 * steps + 1),
        samples_per_slot=1,
        logprobs=logprobs_BK,
    )


class StockTokenizer(tokenizer_api.Tokenizer):
    """The tokenizer of the stock threads: which tokens end a completion, and are dropped.

    None: a launch says itself where it ended. Texts become ids before the threads, and completions
    become text after them (`server`).
    """

    stop_tokens = frozenset()
    bos_id = eos_id = pad_id = 0

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        raise NotImplementedError("prompts come to JetStream's threads as token ids")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        raise NotImplementedError("completions leave JetStream's threads as token ids")


def load_orchestrator() -> types.ModuleType:
    """Imports JetStream's orchestrator, repaired. ValueError where grpcio is not installed."""
    root = logging.getLogger()
    level = root.level
    orchestrator = _imported("jetstream.core.orchestrator")
    root.setLevel(level)
    root.removeHandler(orchestrator.handler)
    orchestrator.logging = logging.getLogger("jetstream")  # its log lines go to no other logger
    orchestrator.delete_pytree = lambda tree: jax.tree.map(lambda x: x.delete(), tree)
    return orchestrator


def load_server() -> types.ModuleType:
    """Imports JetStream's `server_lib`, over the repaired orchestrator. Fails as that does."""
    load_orchestrator()
    server = _imported("jetstream.core.server_lib")
    server.logging = logging.getLogger("jetstream")
    return server


def _imported(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ValueError(
            f"JetStream's server needs {problem.name}, which is not installed; "
            f"pip install 'notepad-jax[jetstream]'"
        ) from problem


@contextlib.contextmanager
def built_with(server: types.ModuleType, host: str, orchestrator: Any) -> Iterator[None]:
    """A context in which the stock server listens at `host` and serves `orchestrator(driver=...)`.

    Both are names of its modules: every address of the machine, and the stock class.
    """
    stock = server._HOST, server.orchestrator.LLMOrchestrator
    server._HOST, server.orchestrator.LLMOrchestrator = host, orchestrator
    try:
        yield
    finally:
        server._HOST, server.orchestrator.LLMOrchestrator = stock
