"""Everything we have to know about google-jetstream 0.2.2's rough edges, in one place.

JetStream is archived, but its Engine interface is the one our engine implements and its
orchestrator can serve it. Its package pulls in seqio and with it TensorFlow; we install it
without its dependencies and give `seqio` and `tiktoken` stand-ins, since only a base class
and unused loaders are taken from there. The rest of the workarounds concern its orchestrator:
`load_orchestrator` repairs a function that uses the removed `jax.tree_map` and keeps its
import from turning the root logger to DEBUG.

What we do not repair and work around by having our own driver: it drops logprobs and the
stop token, always prepends BOS, cuts long prompts silently, binds parameters once per
thread, and ends the process on any exception in a thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
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
            module = types.ModuleType(name, "a stand-in, see notepad_jax.engine.jetstream_compat")
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
    """Lays tokens, their validity and the total lengths out in JetStream's one array."""
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


class SentencePieceForJetStream(tokenizer_api.Tokenizer):
    """The tokenizer interface that the stock orchestrator asks an engine for."""

    def __init__(self, processor: Any, stop_id: int, lengths: list[int]):
        self._processor, self._stop_id, self._lengths = processor, stop_id, lengths

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        # No BOS: our prompts are complete as they are.
        ids = self._processor.encode(s)
        length = next((n for n in self._lengths if n >= len(ids)), None)
        if length is None:
            raise ValueError(
                f"a prompt of {len(ids)} tokens exceeds the engine's {self._lengths[-1]}; "
                f"shorten it or raise engine.max_prompt"
            )
        return np.pad(np.array(ids, np.int32), (0, length - len(ids))), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._processor.decode([int(t) for t in token_ids])

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return self._stop_id

    @property
    def bos_id(self) -> int:
        return 0

    @property
    def stop_tokens(self) -> set[int]:
        return {self._stop_id}


def load_orchestrator() -> types.ModuleType:
    """Imports JetStream's orchestrator, repaired. It needs grpcio and prometheus_client."""
    root = logging.getLogger()
    level = root.level
    orchestrator = importlib.import_module("jetstream.core.orchestrator")
    root.setLevel(level)
    orchestrator.delete_pytree = lambda tree: jax.tree.map(lambda x: x.delete(), tree)
    return orchestrator
