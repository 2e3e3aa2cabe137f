"""JetStream's stock orchestrator and gRPC server over our engine, asked by its own stub.

In most tests the engine counts instead of computing: a completion goes on from its prompt's last
token, and 20 is the stop token. The letters are the ids from 97 on, so "c" is followed by "def".
"""

import concurrent.futures
import contextlib
import queue
import socket
import threading
import time

import grpc
import jax.numpy as jnp
import pytest
import tiny
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from notepad_jax.engine.executor import Sampled
from notepad_jax.engine.jetstream import server as room
from notepad_jax.engine.jetstream.asked import CompletionLimits
from notepad_jax.engine.jetstream.engine import DecodeState, PagedEngine, Prefix
from notepad_jax.engine.pages import PagePool
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.types import PolicySnapshot, Prompt, tokens
from notepad_jax.waiting import run

WAIT = 60  # seconds that anything may take; nothing does
STOP = 20
SMALL = EngineSettings(
    slots=2, page_size=4, pages=12, max_prompt=12, max_new_tokens=9, steps_per_launch=2,
    row_tokens=64,
)  # fmt: skip
GREEDY = (("temperature", "0"),)


class Gate:
    """Lets launches through one by one, or all."""

    def __init__(self) -> None:
        self._passes, self._open = threading.Semaphore(0), False

    def let(self) -> None:
        self._passes.release()

    def open(self) -> None:
        self._open = True
        self._passes.release()

    def wait(self) -> None:
        assert self._open or self._passes.acquire(timeout=WAIT)


class Counter:
    """What the engine asks of a device, and of an executor."""

    made = 0  # tokens

    def insert(self, kv, target):
        pass

    def decode(self, params, contexts):
        def of(context):
            count = min(SMALL.steps_per_launch, context.remaining)
            new = [context.newest + 1 + n for n in range(count)]
            new = new[: new.index(STOP) + 1] if STOP in new else new
            self.made += len(new)
            return Sampled(new, [-1.0] * len(new))

        return [of(context) for context in contexts]


class Counting(PagedEngine):
    """An engine that counts, whose launches wait for a `gate`, if there is one."""

    def __init__(self, gate: Gate | None = None) -> None:
        super().__init__(tiny.CONFIG, SMALL, tiny.sampling(0))
        self.gate, self.sizes, self.broken, self.begun = gate, [], False, 0
        slots, both = SMALL.slots, Counter()
        self.state = DecodeState(
            both, both, PagePool(SMALL.pages), [None] * slots, [lambda: False] * slots
        )

    def load_params(self, params):
        return params

    def init_decode_state(self):
        self.begun += 1
        return self.state

    def prefill(self, *, params, padded_tokens, true_length):
        self.sizes.append(true_length)
        kv = tuple(jnp.zeros((1, 1, true_length, 1, 1)) for _ in range(2))
        return Prefix(kv, jnp.asarray(padded_tokens.ids), true_length, padded_tokens)

    def generate(self, params, decode_state):
        if self.gate is not None:
            self.gate.wait()
        if self.broken:
            raise ZeroDivisionError("the device is on fire")
        return super().generate(params, decode_state)


class Client:
    """A stub and what it asks."""

    def __init__(self, channel) -> None:
        self.stub = jetstream_pb2_grpc.OrchestratorStub(channel)

    def call(self, prompt, limit=9, metadata=(), **more):
        """The call of a text or of ids; iterating it waits."""
        request, content = jetstream_pb2.DecodeRequest, {}
        if isinstance(prompt, str):
            content["text_content"] = request.TextContent(text=prompt)
        elif prompt is not None:
            content["token_content"] = request.TokenContent(token_ids=prompt)
        request = request(max_tokens=limit, **content, **more)
        return self.stub.Decode(request, metadata=metadata, timeout=WAIT)

    def ask(self, prompt, limit=9, metadata=(), **more) -> tuple[list[int], str]:
        """Ids and text of a completion."""
        told = [reply.stream_content for reply in self.call(prompt, limit, metadata, **more)]
        samples = [sample for one in told for sample in one.samples]
        ids = [i for sample in samples for i in sample.token_ids]
        return ids, "".join(sample.text for sample in samples)

    def refused(self, *what, **more) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            self.ask(*what, **more)
        return refused.value.code(), refused.value.details()

    def alive(self) -> bool:
        return self.stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=WAIT).is_live


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as place:
        return place.getsockname()[1]


@contextlib.contextmanager
def running(engine, params=None, *, most: int = 50, key=None, offset: int = 0, stops=(STOP,)):
    """A client of a server; `offset` is the first letter's id less 97."""
    settings = engine.settings
    limits = CompletionLimits(
        128, settings.max_prompt, settings.max_new_tokens, stops, lambda seed: abs(seed), key
    )
    words = room.Codec(
        lambda text: tokens([ord(c) + offset for c in text]),
        lambda: Saying(lambda ids: "".join(chr(i - offset) for i in ids)),
        frozenset(stops),
    )
    port = free_port()
    driver = room.Driver(engine, params)
    server = room.StockServer(driver, words, limits, most, "127.0.0.1", port)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            client.server, client.driver = server, driver
            yield client
    finally:
        if engine.settings is SMALL and engine.gate is not None:
            engine.gate.open()
        server.stop()


@pytest.fixture(scope="module")
def counting():
    engine = Counting()
    with running(engine) as client:
        client.engine = engine
        yield client


def test_texts_and_ids_are_continued_to_their_limit_or_the_stop_token(counting):
    """No BOS, the limit to the token in the middle of a launch, and the stop token is told."""
    assert counting.ask("abc", 5) == ([100, 101, 102, 103, 104], "defgh")
    assert counting.ask([3, 4], 5) == ([5, 6, 7, 8, 9], "")
    assert counting.ask([16], 9) == ([17, 18, 19, STOP], "")
    assert counting.ask([1] * 12, 9)[0] == [2, 3, 4, 5, 6, 7, 8, 9, 10]  # both at their most
    assert counting.alive()


def test_many_at_once_on_few_slots_each_get_their_own(counting):
    prompts = [[60 + n] * (1 + n % 12) for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        told = list(pool.map(lambda p: counting.ask(p, 1 + p[0] % 9)[0], prompts))
    assert told == [[p[0] + 1 + n for n in range(1 + p[0] % 9)] for p in prompts]
    assert counting.engine.state.pool.free == SMALL.pages


@pytest.mark.parametrize(
    "prompt, limit, more, words",
    [
        ("", 4, {}, "the prompt is empty"),
        ([], 4, {}, "the prompt is empty"),
        (None, 4, {}, "set text_content or token_content"),
        ("a" * 13, 4, {}, "the prompt has 13 tokens, and the most here is 12"),
        ([1] * 13, 4, {}, "the prompt has 13 tokens, and the most here is 12"),
        ([5, 128], 4, {}, "there is no token 128; this policy's ids are 0 to 127"),
        ([-1], 4, {}, "there is no token -1"),
        ("a", 0, {}, "max_tokens is 0; it must be a whole number from 1 to 9"),
        ("a", 10, {}, "max_tokens is 10"),
        ("a", 4, {"session_cache": "mine"}, "send the whole prompt"),
        ("a", 4, {"metadata": (("temperature", "hot"),)}, "temperature is 'hot'"),
        ("a", 4, {"metadata": (("temperature", "-1"),)}, "temperature is -1.0; it must be 0"),
        ("a", 4, {"metadata": (("top_p", "nan"),)}, "top_p is nan"),
        ("a", 4, {"metadata": (("seed", "1.5"),)}, "seed is '1.5'; it must be a whole number"),
        ("a", 4, {"metadata": (("seed", "9" * 30),)}, "it must be a whole number from -"),
    ],
)
def test_a_bad_request_is_a_status_that_says_why_and_harms_nobody(
    counting, prompt, limit, more, words
):
    code, said = counting.refused(prompt, limit, **more)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in said
    assert counting.ask("abc", 2)[1] == "de"


def test_a_client_that_hangs_up_frees_its_slot_and_its_pages():
    """While it decodes, and while it waits: then only a token of its prompt is read."""
    gate = Gate()
    engine = Counting(gate)
    with running(engine) as client:
        calls = [client.call([1] * 12)]
        gate.let()
        next(calls[0])
        assert engine.state.pool.free < SMALL.pages
        calls += [client.call([1] * 12) for _ in range(5)]
        until(lambda: len(engine.sizes) == 5 and client.driver.queued == 1)
        for call in calls:
            call.cancel()
        until(lambda: not client.server.orchestrator.under_way)
        slots = zip(engine.state.slots, engine.state.gone, strict=True)
        until(lambda: all(gone() for slot, gone in slots if slot is not None))
        gate.open()
        assert client.ask([7], 3)[0] == [8, 9, 10]
        assert engine.state.pool.free == SMALL.pages and engine.sizes[-2:] == [1, 1]
        assert engine.state.executor.made <= 2 * SMALL.steps_per_launch + 3  # of 6 * 9 + 3
        assert client.alive()


def until(so) -> None:
    end = time.monotonic() + WAIT
    while not so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class OneEndedJustNow(queue.Queue):
    """Free slots: the first look finds one taken, whose turn then ends at once."""

    looks = 0

    def qsize(self):
        self.looks += 1
        return super().qsize() - (self.looks == 1)


def test_a_turn_that_ends_between_two_lines_of_the_stock_thread_ends_no_server():
    engine = Counting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.orchestrator.queue, "Queue", OneEndedJustNow)
        with running(engine) as client:
            (slots,) = client.driver._generate_slots
            until(lambda: slots.looks >= 2)  # it has looked, and asserted
            assert client.ask([7], 3)[0] == [8, 9, 10] and client.alive()
            assert engine.begun == 1


def test_who_comes_to_a_full_server_is_told_to_come_again():
    gate = Gate()
    with running(Counting(gate), most=3) as client:
        calls = [client.call([n]) for n in (40, 50, 60)]
        until(lambda: client.server.orchestrator.under_way == 3)
        code, said = client.refused([70])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "come again later" in said
        gate.open()
        assert [list(call)[-1].stream_content.samples[0].token_ids[-1] for call in calls] == [
            49, 59, 69,
        ]  # fmt: skip


def test_an_engine_that_fails_is_told_to_everybody_and_kills_nobody():
    gate = Gate()
    engine = Counting(gate)
    with running(engine) as client:
        calls = [client.call([1])]
        gate.let()
        next(calls[0])
        calls += [client.call([n]) for n in (2, 3, 4)]
        until(lambda: client.server.orchestrator.under_way == 4)
        engine.broken = True
        gate.let()
        for call in calls:
            with pytest.raises(grpc.RpcError, match="on fire") as failed:
                list(call)
            assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "the engine failed: ZeroDivisionError('the device" in client.refused([7])[1]
        assert not client.alive()


def test_a_server_that_is_stopped_leaves_no_client_waiting_and_no_thread():
    before = set(threading.enumerate())
    gate = Gate()
    with running(Counting(gate)) as client:
        call = client.call([1])
        gate.let()
        next(call)
    with pytest.raises(grpc.RpcError):
        list(call)
    until(lambda: not kept_by(before))


def kept_by(before: set) -> list[str]:
    """Threads that were not there before and that a process would wait for."""
    return [one.name for one in set(threading.enumerate()) - before if not one.daemon]


def test_a_key_is_asked_for_where_there_is_one():
    with running(Counting(), key="secret-1") as client:
        missing, wrong = (), (("authorization", "Bearer other"),)
        for metadata, words in ((missing, "authorization: Bearer KEY"), (wrong, "is wrong")):
            code, said = client.refused("a", metadata=metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED and words in said
        assert client.ask("a", 2, (("authorization", "bearer secret-1"),))[1] == "bc"
        assert client.alive()


def test_an_address_that_is_taken_is_said_and_nothing_runs_on():
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        driver = room.Driver(Counting(), None)
        with pytest.raises(ValueError, match="choose another --port"):
            room.StockServer(driver, None, None, 1, "127.0.0.1", port)
    until(lambda: not kept_by(before))


@pytest.mark.slow
def test_greedy_completions_are_those_of_our_own_service():
    """Its dense prefill and its slots, and our pages: the same tokens."""
    params, all_sizes = tiny.params(), tiny.prompts(per_prefix=1)
    prompts = [all_sizes[n].tokens for n in (0, 1)]
    sampling = tiny.sampling(0, temperature=0.0, length=11)

    async def ours():
        async with EngineService(tiny.executor(), PolicySnapshot(0, params)) as service:
            done = [await service.complete(Prompt(tokens(), p), sampling) for p in prompts]
            return [completion.tokens.tolist() for completion in done]

    exact = run(ours())
    engine = PagedEngine(tiny.CONFIG, tiny.SETTINGS, sampling)
    with running(engine, params, offset=-97, stops=tiny.STOPS) as client:
        assert [client.ask(p.tolist(), 11, GREEDY)[0] for p in prompts] == exact
        text = "".join(chr(i + 97) for i in prompts[0])
        ids, said = client.ask(text, 11, GREEDY)
        assert ids == exact[0]
        assert said == "".join(chr(i + 97) for i in ids if i not in tiny.STOPS)
        seeded = [client.ask(text, 11, (("seed", "-4"),))[0] for _ in range(2)]
        assert seeded[0] == seeded[1] != ids
