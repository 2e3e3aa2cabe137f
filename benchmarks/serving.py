"""What the server costs: tokens a second at 1, 8, 32 clients, over HTTP and without it.

    python -m benchmarks.serving [--policy FOLDER] [--clients 1 8 32] [--tokens 64] [--json]

The same requests (prompts of `--prompt` random ids, seeded, `--requests` a client one after the
other) go three ways: to the engine in its own loop (`bare`; where there are several, a share of
the clients to each), through a seat from another thread, as the server asks (`seat`), and over
HTTP, whole and streamed. `overhead` is what of the bare speed HTTP loses. All these find their
prompts in the prefix cache, where an earlier pass left them; `unread` is `bare` with prompts that
no pass had: compare the peers with it, since they read theirs each time. Without --policy it is a
random one of the starter's vocabulary, which hardly ever stops.

Peers continue as many prompts at once, on the same weights: transformers' `generate` where torch
and transformers are installed (`transformers`), llama.cpp where llama_cpp (PyPI: llama-cpp-python)
and gguf are (`llama.cpp` as it comes, `llama.cpp f32` in float32: see `peer_llama`). Seconds are
of the clock, of the second of two passes: the first compiles. Run it pinned to its cores on a
quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.programs import serve
from notepad_jax.serve.app import App
from notepad_jax.serve.completions.admission import RequestQueue
from notepad_jax.serve.http.connections import ConnectionLimits, Server
from notepad_jax.setup import builders, configuration, process
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text.tokenizer import FILES, open_tokenizer
from notepad_jax.types import Prompt, SamplingParams, tokens

STARTER = Path(__file__).parents[1] / "data" / "starter"
NAME = "served"

Ask = Callable[[int, int], Awaitable[int]]  # (client, request) -> tokens that were made
Speeds = dict[int, dict[str, float]]  # clients -> way -> tokens a second


def random_policy(folder: Path, width: int, layers: int) -> Path:
    """Writes a policy with random weights and the starter's tokenizer."""
    vocab = -(-open_tokenizer(STARTER).vocab_size // 64) * 64
    config = PolicyConfig(
        vocab_size=vocab, width=width, layers=layers, heads=width // 32, kv_heads=width // 64,
        head_size=32, feed_forward=3 * width, rope_theta=1e4, rms_eps=1e-6, qk_norm=True,
        attention_bias=False, tied_embeddings=True, valid_vocab=vocab,
    )  # fmt: skip
    beside = {name: (STARTER / name).read_bytes() for name in FILES if (STARTER / name).is_file()}
    params = parameters.init_params(config, jax.random.key(0))
    return huggingface.export_params(config, params, folder / "policy", beside)


class Work:
    """The requests of a measurement: the same ones for every way."""

    def __init__(self, vocab: int, prompt: int, made: int, requests: int) -> None:
        self.made, self.requests = made, requests
        self._vocab, self._prompt = vocab, prompt

    def ids(self, client: int, request: int) -> list[int]:
        draw = np.random.default_rng([client, request])
        return draw.integers(self._vocab // 2, self._vocab, self._prompt).tolist()

    def together(self, clients: int) -> list[np.ndarray]:
        """The ids of all clients, [clients, prompt], of one request after the other."""
        every = range(self.requests)
        return [np.array([self.ids(n, request) for n in range(clients)]) for request in every]

    async def tokens_of(self, clients: Sequence[int], ask: Ask) -> int:
        """How many were made for clients that ask one request after the other."""

        async def client(number: int) -> int:
            return sum([await ask(number, request) for request in range(self.requests)])

        return sum(await asyncio.gather(*map(client, clients)))


@contextlib.contextmanager
def listening(asgi: Any) -> Iterator[str]:
    """The server's address; it has a thread, as the program has a process."""
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    place.bind(("127.0.0.1", 0))
    server = Server(asgi, ConnectionLimits(), lambda: None, farewell=1)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        place.close()


async def ours(folder: Path, clients: Sequence[int], work: Work) -> Speeds:
    """Speeds of the three ways, by number of clients."""
    longest = f"--config.engine.slots={max(clients)}"
    room = f"--config.serve.max_completion={work.made}"
    config = configuration.load("quickstart", [longest, room, f"--config.policy={folder}",
                                               "--config.engine.pages=2048"])  # fmt: skip
    process.prepared(config)
    policy = builders.load_policy(folder, config.dtype, builders.to_read(config.engine))
    weights = serve.ServedWeights(config, policy, SilentScreen())
    engines, served = serve.opened(config, policy, NAME, weights)
    stops = served.tokenizer.stop_ids
    passes = itertools.count(1)  # pass 0 is what all other ways ask for
    found: Speeds = {}

    def asked(client: int, request: int) -> tuple[Prompt, SamplingParams]:
        ids = tokens(work.ids(client, request))
        prompt = Prompt(tokens(ids[:-1].copy()), tokens(ids[-1:].copy()))
        return prompt, SamplingParams(1.0, 1.0, work.made, stops, 1000 * client + request)

    async def completed(completer: Any, client: int, request: int) -> int:
        return len((await completer.complete(*asked(client, request))).tokens)

    async def bare(count: int, first: int = 0) -> int:
        """Every engine in its own loop, each with its share of the clients, from a request on."""
        shares = [range(count)[number :: engines.count] for number in range(engines.count)]

        async def one(number: int, service: Any) -> int:
            return await work.tokens_of(
                shares[number], lambda n, request: completed(service, n, first + request)
            )

        return sum(await engines.each(one))

    async def seated(client: int, request: int) -> int:
        with engines.seat() as seat:
            return await completed(seat, client, request)

    async with engines:
        app = App(served, RequestQueue(served.slots, max(clients), 0), None)
        with listening(app.asgi) as url:
            async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits()) as client:
                for count in clients:
                    ways: dict[str, Callable[[], Awaitable[int]]] = {
                        "bare": lambda n=count: bare(n),
                        "unread": lambda n=count: bare(n, next(passes) * work.requests),
                        "seat": lambda n=count: work.tokens_of(range(n), seated),
                        **{
                            way: lambda n=count, s=way == "streamed": work.tokens_of(
                                range(n), functools.partial(_posted, client, url, work, s)
                            )
                            for way in ("whole", "streamed")
                        },
                    }
                    for way in ways.values():
                        await way()  # compiles
                    speeds = {name: await _speed(way) for name, way in ways.items()}
                    found[count] = speeds | {"overhead": 1 - speeds["streamed"] / speeds["bare"]}
    return found


async def _speed(way: Callable[[], Awaitable[int]]) -> float:
    """Tokens a second."""
    begin = time.perf_counter()
    return await way() / (time.perf_counter() - begin)


async def _posted(
    client: httpx2.AsyncClient, url: str, work: Work, stream: bool, number: int, request: int
) -> int:
    body = {"model": NAME, "prompt": work.ids(number, request), "max_tokens": work.made,
            "seed": 1000 * number + request, "stream": stream,
            "return_token_ids": True}  # fmt: skip
    if not stream:
        reply = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
        return reply.json()["usage"]["completion_tokens"]
    made = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                made += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
    return made


def theirs(folder: Path, clients: Sequence[int], work: Work) -> Speeds | str:
    """Speeds of transformers' `generate`, as many prompts at once, or why there are none."""
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return "torch and transformers are not both installed here"
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = {}
    for count in clients:
        for _ in range(2):  # the second pass counts
            begin = time.perf_counter()
            for ids in map(torch.tensor, work.together(count)):
                with torch.no_grad():
                    model.generate(
                        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                        min_new_tokens=work.made, max_new_tokens=work.made,
                    )  # fmt: skip
            speed = count * work.requests * work.made / (time.perf_counter() - begin)
        found[count] = {"transformers": speed}
    return found


def llamas(folder: Path, clients: Sequence[int], work: Work) -> Speeds | str:
    """Speeds of llama.cpp, both ways, as many prompts in one batch, or why there are none."""
    if not all(map(importlib.util.find_spec, ("llama_cpp", "gguf"))):
        return "llama_cpp and gguf are not both installed here"
    peer = importlib.import_module("benchmarks.peer_llama")
    try:
        return peer.speeds(folder, {n: work.together(n) for n in clients}, work.made)
    except peer.NotWritten as why:
        return str(why)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--policy", type=Path, help="a Hugging Face folder (a random policy)")
    parser.add_argument("--width", type=int, default=256, help="of the random policy")
    parser.add_argument("--layers", type=int, default=4, help="of the random policy")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--json", action="store_true")
    said = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = said.policy or random_policy(Path(made), said.width, said.layers)
        vocab = open_tokenizer(folder).vocab_size
        work = Work(vocab, said.prompt, said.tokens, said.requests)
        found = asyncio.run(ours(folder, said.clients, work))
        peers = {"transformers": theirs(folder, said.clients, work),
                 "llama.cpp": llamas(folder, said.clients, work)}  # fmt: skip
    for peer, others in peers.items():
        if isinstance(others, str):
            print(f"{peer} was not measured: {others}", file=sys.stderr)
            continue
        for count, speeds in others.items():
            found[count] |= speeds
    if said.json:
        print(json.dumps(found))
        return
    for count, speeds in found.items():
        words = [f"{way} {n:.1%}" if way == "overhead" else f"{way} {n:,.0f}"
                 for way, n in speeds.items()]  # fmt: skip
        print(f"{count:3} clients, tokens/s: {', '.join(words)}")


if __name__ == "__main__":
    main()
