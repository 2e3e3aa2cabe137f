"""llama.cpp's side of `serving` and `real_model`: the same weights as GGUF, the same ids.

It needs `llama_cpp` (PyPI's llama-cpp-python) and `gguf`, which are no dependencies of ours:
only these two import this file, and only where both are installed. A llama or Qwen3 policy is
written as a float32 GGUF without a vocabulary, since prompts are ids. Before anything is measured,
the logits of a few prompts, their ends decoded token by token, are compared with our own forward
pass: speeds of two networks would compare nothing.

It is measured twice: `llama.cpp` as it comes, with flash attention and keys and values in
float16, and `llama.cpp f32`, without both, in float32 as we are. (Flash attention takes float16
from a float32 cache, too: logits were 1e-2 of their deviation from ours, without it 7e-6. So
what is compared beforehand is the second.) It has as many threads as there are cores for this
process, and every sequence has a cache of its own, as long as it becomes. Prompts go in as many
at a time as fill the 512 tokens that it computes at once (all in one batch are cut across, and
took it three times as long), then all sequences go on together. Tokens are drawn by its own
samplers, temperature 1 and a seed for each sequence; nothing stops one early.

Its threads spin while they wait for one another: on cores that others use, too, it is several
times slower than it can be, and `OMP_WAIT_POLICY=passive` keeps it from that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import llama_cpp
import numpy as np

from notepad_jax.checkpoint.hf import huggingface, names
from notepad_jax.model import attention, logprobs, policy
from notepad_jax.model.rope import UNSCALED

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
DECODED = 4  # tokens of each compared prompt that come one by one, through the cache
CLOSE = 1e-3  # of the logits' standard deviation; float32 sums in another order differ by 1e-5
AT_ONCE = 512  # tokens, llama.cpp's n_ubatch by default
ROOM = 64  # tokens after a prompt that `decoder` has a cache for
ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h
WAYS = {"llama.cpp": False, "llama.cpp f32": True}  # whether all of it is float32


class NotWritten(ValueError):
    """A policy that is not written as GGUF here; the message says why."""


def write_gguf(folder: Path, file: Path) -> None:
    """Writes a Hugging Face folder of a llama or Qwen3 policy as float32 GGUF.

    Raises NotWritten for a policy of another family or with scaled rotary embeddings.
    """
    config, store = huggingface.open_policy(folder)
    family = names.family_of(config)
    if family not in ARCHITECTURES or config.rope != UNSCALED:
        raise NotWritten(
            f"{folder} is a {family} policy with {config.rope}; only {' and '.join(ARCHITECTURES)} "
            f"without scaled rotary embeddings are written as GGUF here: take another --policy to "
            f"compare"
        )
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.feed_forward)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    known = gguf.get_tensor_name_map(architecture, config.layers)
    for name in store.tensors:
        values = store.read(name).astype(np.float32)
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _pairs_beside(values, config.head_size)
        writer.add_tensor(known.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs_beside(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Reorders a projection's rows: what is rotated together lies side by side in llama GGUF.

    Hugging Face folders have it half a head apart, as qwen3's GGUF has.
    """
    halves = rows.reshape(-1, 2, head_size // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


class Decoder:
    """A llama.cpp context for `count` sequences of up to `length` tokens, and its samplers.

    Keys, values and attention are float32 if `exact`, else what llama.cpp takes by itself.
    """

    def __init__(
        self, model: llama_cpp.llama_model_p, count: int, length: int, exact: bool
    ) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = count
        settings.n_ctx = count * -(-length // 256) * 256  # llama.cpp pads each sequence so
        settings.n_batch, settings.n_ubatch = max(AT_ONCE, length), AT_ONCE
        known = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
        settings.n_threads = settings.n_threads_batch = cores
        if exact:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(
                f"llama.cpp made no context for {count} sequences of {length} tokens; its reason "
                f"stands above: take fewer --clients or shorter ones if it is memory"
            )
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._samplers: list[llama_cpp.llama_sampler_p] = []

    def restart(self, seeds: Sequence[int], kept: int = 0) -> None:
        """Forgets all but the first `kept` tokens; seeds[b] is sequence b's from here on."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), -1, kept, -1)
        self._forget_samplers()
        for seed in seeds:
            chain = llama_cpp.llama_sampler_chain_init(
                llama_cpp.llama_sampler_chain_default_params()
            )
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(1.0))
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
            self._samplers.append(chain)

    def sampled(self, ids_BT: np.ndarray, start: int) -> np.ndarray:
        """Decodes ids at positions start, start + 1, ...; returns the tokens drawn next, [B, 1]."""
        return self._after(
            ids_BT,
            start,
            lambda b, end: [llama_cpp.llama_sampler_sample(self._samplers[b], self._context, end)],
        )

    def logits(self, ids_BT: np.ndarray, start: int) -> np.ndarray:
        """Decodes ids at positions start, start + 1, ...; returns the logits after them, [B, V]."""

        def row(b: int, end: int) -> np.ndarray:
            found = llama_cpp.llama_get_logits_ith(self._context, end)
            return np.ctypeslib.as_array(found, (self._vocab,)).copy()

        return self._after(ids_BT, start, row)

    def _after(self, ids_BT: np.ndarray, start: int, take: Callable[[int, int], Any]) -> np.ndarray:
        """Decodes whole rows, AT_ONCE tokens at a time, and takes from each what it leaves.

        `take` is given the sequence and where in the batch its last token was.
        """
        T = ids_BT.shape[1]
        size = max(1, AT_ONCE // T)
        taken = []
        for first in range(0, len(ids_BT), size):
            rows = ids_BT[first : first + size]
            self._decode(rows, start, first)
            taken += [take(first + row, (row + 1) * T - 1) for row in range(len(rows))]
        return np.array(taken)

    def _decode(self, ids_BT: np.ndarray, start: int, first: int) -> None:
        """One batch: row b continues sequence first + b."""
        B, T = ids_BT.shape
        token = np.ascontiguousarray(ids_BT, np.int32)
        position = np.tile(np.arange(start, start + T, dtype=np.int32), B)
        sequence = np.repeat(np.arange(first, first + B, dtype=np.int32), T)
        of_sequence = sequence.ctypes.data + sequence.itemsize * np.arange(B * T, dtype=np.uintp)
        each_one = np.ones(B * T, np.int32)
        wanted_BT = np.zeros((B, T), np.int8)
        wanted_BT[:, -1] = 1
        arrays = {"token": token, "pos": position, "n_seq_id": each_one, "seq_id": of_sequence,
                  "logits": wanted_BT}  # fmt: skip
        kinds = dict(llama_cpp.llama_batch._fields_)
        pointers = {n: ctypes.cast(a.ctypes.data, kinds[n]) for n, a in arrays.items()}
        batch = llama_cpp.llama_batch(n_tokens=B * T, **pointers)
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(
                f"llama_decode of {B} sequences of {T} tokens at {start} ended with {code}; "
                f"its reason stands above, if it gave one"
            )

    def close(self) -> None:
        self._forget_samplers()
        llama_cpp.llama_free(self._context)

    def _forget_samplers(self) -> None:
        for sampler in self._samplers:
            llama_cpp.llama_sampler_free(sampler)
        self._samplers.clear()


@llama_cpp.llama_log_callback
def _tell_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """llama.cpp tells a page of each model; llama_cpp's own filter has the levels of long ago."""
    if level == ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


@contextlib.contextmanager
def loaded(file: Path) -> Iterator[llama_cpp.llama_model_p]:
    """The model of a GGUF file."""
    llama_cpp.llama_log_set(_tell_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(file).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file}; its reason stands above")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def check_same(folder: Path, model: llama_cpp.llama_model_p, ids_BT: np.ndarray) -> float:
    """Compares llama.cpp's logits with ours; returns the largest difference, in deviations.

    All of a prompt but its last DECODED tokens goes in at once, these come one by one; compared
    is what follows each. Raises RuntimeError where they differ by CLOSE deviations or more, or
    where the likeliest token is another.
    """
    config, params = huggingface.import_policy(folder)
    config = dataclasses.replace(config, dtype="float32")
    params = jax.tree.map(lambda x: x.astype("float32"), params)
    B, T = ids_BT.shape

    @jax.jit
    def ours(ids_BT: jax.Array) -> jax.Array:
        attend = attention.packed(config, jnp.full((B, T), T, jnp.int32))
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        hidden_BTD, *_ = policy.forward(config, params, ids_BT, positions_BT, attend)
        return logprobs.logits(config, params, hidden_BTD)[..., : config.valid_vocab]

    first = max(1, T - DECODED)
    ours_BTV = np.asarray(ours(jnp.asarray(ids_BT)))[:, first - 1 :]
    decoder = Decoder(model, B, T, exact=True)
    try:
        steps = [decoder.logits(ids_BT[:, :first], 0)]
        steps += [decoder.logits(ids_BT[:, at : at + 1], at) for at in range(first, T)]
    finally:
        decoder.close()
    theirs_BTV = np.stack(steps, axis=1)[..., : config.valid_vocab]
    differ = float(np.abs(theirs_BTV - ours_BTV).max() / ours_BTV.std())
    others = int((theirs_BTV.argmax(-1) != ours_BTV.argmax(-1)).sum())
    if not differ < CLOSE or others:
        raise RuntimeError(
            f"llama.cpp computes another network than {folder}: logits differ by {differ:.1e} of "
            f"their standard deviation ({CLOSE:.0e} is allowed), the likeliest token at {others} "
            f"of {ours_BTV.shape[0] * ours_BTV.shape[1]} places; its speed would say nothing"
        )
    return differ


def speeds(
    folder: Path, prompts: Mapping[int, Sequence[np.ndarray]], made: int
) -> dict[int, dict[str, float]]:
    """Tokens a second of `made` tokens after each prompt, by how many go at once and by WAYS.

    `prompts` has, for every number of sequences, the requests that follow one another, [B, T]
    ids each. Seconds are of the second of two passes. Raises as `write_gguf` and `check_same`.
    """
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "policy.gguf"
        write_gguf(folder, file)
        with loaded(file) as model:
            check_same(folder, model, prompts[max(prompts)][0][:8])
            return {
                count: {way: _speed(model, requests, made, exact) for way, exact in WAYS.items()}
                for count, requests in prompts.items()
            }


def _speed(
    model: llama_cpp.llama_model_p, requests: Sequence[np.ndarray], made: int, exact: bool
) -> float:
    count, length = requests[0].shape
    decoder = Decoder(model, count, length + made, exact)
    try:
        for _ in range(2):  # the second pass counts
            begin = time.perf_counter()
            for number, ids_BT in enumerate(requests):
                _complete(decoder, ids_BT, made, number)
            seconds = time.perf_counter() - begin
    finally:
        decoder.close()
    return count * len(requests) * made / seconds


def _complete(decoder: Decoder, ids_BT: np.ndarray, made: int, request: int) -> None:
    """Makes `made` tokens after each row; seeds are those of `serving`'s requests."""
    B, T = ids_BT.shape
    decoder.restart([1000 * client + request for client in range(B)])
    drawn_B1 = decoder.sampled(ids_BT, 0)
    for at in range(T, T + made - 1):
        drawn_B1 = decoder.sampled(drawn_B1, at)


# ---------------------------------------------------------------- of `real_model`


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A policy in llama.cpp until the process ends, and a context for every shape of ids."""

    model: llama_cpp.llama_model_p
    exact: bool
    decoders: dict[tuple[int, int], Decoder] = dataclasses.field(default_factory=dict)

    def decoder(self, count: int, length: int) -> Decoder:
        if (count, length) not in self.decoders:
            self.decoders[count, length] = Decoder(self.model, count, length, self.exact)
        return self.decoders[count, length]


def load(folder: Path, exact: bool) -> Loaded:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "policy.gguf"
    write_gguf(folder, file)
    return Loaded(stack.enter_context(loaded(file)), exact)


def logits(loaded: Loaded, ids_BT: np.ndarray) -> np.ndarray:
    """Returns logits [B, T, V], token by token, in float32 however it is to be measured."""
    B, T = ids_BT.shape
    decoder = Decoder(loaded.model, B, T, exact=True)
    try:
        return np.stack([decoder.logits(ids_BT[:, at : at + 1], at) for at in range(T)], axis=1)
    finally:
        decoder.close()


def first_token(loaded: Loaded, ids_BT: np.ndarray) -> None:
    """Reads prompts and draws a token after each, at temperature 1."""
    decoder = loaded.decoder(*ids_BT.shape)
    decoder.restart(range(len(ids_BT)))
    decoder.sampled(ids_BT, 0)


def decoder(loaded: Loaded, ids_BT: np.ndarray) -> Callable[[int], None]:
    """Reads prompts but for their last tokens; gives what decodes up to ROOM tokens after each."""
    B, T = ids_BT.shape
    own = loaded.decoder(B, T + ROOM)
    own.restart(range(B))
    own.sampled(ids_BT[:, :-1], 0)

    def decode(count: int) -> None:
        own.restart(range(B), kept=T - 1)
        drawn_B1 = ids_BT[:, -1:]
        for at in range(T - 1, T - 1 + count):
            drawn_B1 = own.sampled(drawn_B1, at)

    return decode
