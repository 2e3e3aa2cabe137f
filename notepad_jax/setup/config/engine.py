"""Config sections engine and serve: sizes of the engine, and limits of the server."""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import SECONDS, key, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """Section engine: sizes of the engine."""

    tensor: int = key(
        "devices",
        "that share an engine's heads and its cache; a divisor of the policy's kv heads",
        whole(1),
    )
    replicas: int = key(
        "engines",
        "side by side on this host's devices, each on `tensor` of them; 0: as many as there is "
        "room for. Each reads whole documents (`ask` uses one). Slots and pages are those of one",
        whole(0),
    )
    per_cpu: int = key(
        "engines",
        "that share a CPU, which is one device however many cores it has; each has a thread and a "
        "cache of its own, and no program is compiled twice. As many as cores read a small "
        "policy's documents fastest; a large one's launches use all cores by themselves. In a "
        "long `eval` each is a process with cores, weights and programs of its own. Accelerators "
        "have one engine for each row of devices",
        whole(1),
    )
    max_prompt: int = key(
        "tokens",
        "of the longest prompt that there is room for; 0, and whatever is less than a reading "
        "needs: its own. Programs are compiled for it: readings with chunks of several sizes "
        "share them below the same one. A wider table of pages is all that it costs",
        whole(0),
    )
    slots: int = key(
        "sequences",
        "that may decode at the same time; at least 1",
    )
    page_size: int = key(
        "tokens",
        "per page. Make a chunk a whole number of pages; shared prefixes shorter than a page are "
        "read again instead of shared",
        whole(1),
    )
    pages: int = key(
        "pages",
        "of the cache in each layer. Memory: pages x page_size x layers x 2 x kv heads x head "
        "size x bytes per number; 34 MB here. 0 derives them: all slots at once, eight to a "
        "prefix, at most half of the machine's memory and what is free beside all else, and "
        "always enough for one turn; where that is less than the slots would fill, it is said, "
        "and readings wait for pages. A number that does not fit is refused",
        whole(0),
    )
    steps_per_launch: int = key(
        "tokens",
        "decoded in every slot between two looks of the host. More: fewer launches, and finished "
        "slots wait longer",
    )
    row_tokens: int = key(
        "tokens",
        "of private tails packed behind one copy of a prefix. Must hold the longest tail that "
        "template and limits allow, without shared prefixes the longest whole prompt; a config in "
        "which it does not is refused. 0 derives it: four tails and their drafts",
        whole(0),
    )
    cache_dtype: str = key(
        '`""`, `float32`, `bfloat16`, `int8`',
        "dtype of cached keys and values, empty for that of the activations (`dtype`). Of "
        "float32's memory bfloat16 takes half, int8 a quarter (of bfloat16's 0.52: each key and "
        "each value of a head is integers and one float32 scale), and decoding reads as much "
        "less. Then engine and trainer logprobs no longer agree to 1e-5: `logprob_gap_max` of the "
        "quick start's first step is 0.011 and 0.024, the mean 9e-5 and 2e-4. A verified draft "
        "attends to its own unrounded keys, so with either of these its tokens need not be those "
        "that decoding would have drawn. On TPUs pages of int8 need a multiple of 32 tokens",
    )
    share_prefixes: bool = key(
        "true, false",
        "read equal prefixes once. `false` is for comparison; raise `row_tokens` with it",
    )
    use_drafts: bool = key(
        "true, false",
        "guess that the memory stays, and verify the guess in one launch. Exact",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingEngineKeys(EngineKeys):
    """Section engine of a training config."""

    give_back: bool = key(
        "true, false",
        "the memory of the cache, and of the weights that a step changes, is given back while the "
        "policy learns. The cache is taken again for the next rollout, which costs filling it "
        "with zeros, and the new weights arrive where the old ones were; after a step that was "
        "skipped the old ones are handed over again. Prefixes that were read are lost then; with "
        "every step another version of the weights, they are anyway",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeKeys:
    """Section serve: what the server takes."""

    max_prompt: int = key(
        "int, tokens",
        "of a prompt of `NAME`; 0: as many as a turn of a reading may have, which is the least. "
        "The cache grows until it holds one",
        whole(0),
    )
    max_completion: int = key(
        "int, tokens",
        "of a completion of `NAME`; 0: as a turn's, which is the least",
        whole(0),
    )
    queue: int = key(
        "int",
        "completions that may wait for one of `engine.slots`; who comes then gets a 429 with "
        "Retry-After",
        whole(0),
    )
    queue_tokens: int = key(
        "int",
        "prompt and completion tokens that all requests under way may come to; 0: any number. A "
        "request that is alone is always taken",
        whole(0),
    )
    connections: int = key(
        "int",
        "that clients may have at a time. Where all are taken, the one that has been sending for "
        "longest (a head or a body that does not end; then an idle one) gives way to who comes; "
        "where all wait for their replies, who comes waits, too. Each may need two open files: "
        "the server raises its own limit, and says where the machine's (`ulimit -Hn`) allows "
        "fewer",
        whole(1),
    )
    header_seconds: float = key(
        "seconds",
        "from a connection's beginning, or the first byte of its next request, until the head of "
        "the request is there; then it is ended",
        SECONDS,
    )
    body_seconds: float = key(
        "seconds",
        "that a body may fall behind a pace of 1,024 bytes a second, and that a reply may wait "
        "for somebody to read on; then the connection is ended",
        SECONDS,
    )
    body_bytes: int = key(
        "bytes, at least 2^23",
        "of all bodies in memory that are not complete (files go to the disk, and are not among "
        "them); where they come to more, the one that began first gets a 503",
        whole(2**23),
    )
    warm_up: bool = key(
        "true, false",
        "compile all programs of the engine at the start, in a thread beside serving: `/ready` "
        "says when they are there ([server.md](server.md#alive-and-ready)). Without, each is "
        "compiled when a request first needs it",
    )
    cors: tuple[str, ...] = key(
        "list of origins",
        "web pages of these may ask the server from a browser "
        "([server.md](server.md#pages-of-other-sites)); each is a scheme and a host, with a port "
        "if it is not the usual one: `https://chat.example.org`. Empty: none may. `*` is all of "
        "them, and needs a key",
    )
