"""The dataclasses of whole configs, of three kinds: training, suites, and making a starter.

`setup.configuration` makes one of what a file, a recipe, a command line or a caller from Python
says, and nothing behind it reads anything else. A section that may be missing is None then.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from notepad_jax.grpo.optimizer import OptimizerSettings
from notepad_jax.keys import POSITIVE, SHARE, UNSIGNED, also, key, whole
from notepad_jax.setup.config.asking import (
    EndpointKeys,
    EvaluateKeys,
    SourceKeys,
    SuiteKeys,
    SyntheticKeys,
    ValidationKeys,
)
from notepad_jax.setup.config.engine import EngineKeys, ServeKeys, TrainingEngineKeys
from notepad_jax.setup.config.learning import CheckpointKeys, GrpoKeys, ParallelKeys
from notepad_jax.setup.config.reading import DataKeys, ReadingKeys, TaskKeys
from notepad_jax.setup.config.rollout import FleetKeys, RolloutKeys
from notepad_jax.starter.habits import Habits


class AnyConfig:
    """Any config: sections that only others have are None."""

    data: ClassVar[DataKeys | None] = None
    grpo: ClassVar[GrpoKeys | None] = None
    validation: ClassVar[ValidationKeys | None] = None
    serve: ClassVar[ServeKeys | None] = None
    endpoint: ClassVar[EndpointKeys | None] = None
    sources: ClassVar[SourceKeys | None] = None

    @property
    def by_endpoint(self) -> bool:
        """Whether a server reads, by its endpoint, and no policy here."""
        return bool(self.endpoint and self.endpoint.url)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(AnyConfig):
    """The sections of every config that is read with: training's and suites'."""

    seed: int = key(
        "integer, 0 to 2^32 - 1",
        "decides training documents, all noise of sampling, and the documents of evaluation. The "
        "same seed, config and machine give the same metrics",
        whole(0, 2**32 - 1),
        default=0,
    )
    policy: str = key(
        "folder",
        "the starting policy: `config.json`, `model.safetensors` (or shards with an index), "
        "its tokenizer's files. `--policy` of `eval` and `ask` stands "
        "for it. Or a run: `runs/NAME`, `runs/NAME@40`, `runs/NAME@best`, or adapters "
        "([models.md](models.md#what-may-be-named-as-a-policy))",
        default="",
    )
    kernels: str = key(
        "`auto`, `pallas`, `interpret`, `triton`, `triton-interpret`, `xla`, `reference`",
        "who computes attention and logprobs. `auto`: the TPU kernels on TPUs, those for GPUs on "
        "NVIDIA's since 2020 (`triton`), large dense products on other GPUs (`xla`), block lists "
        "in plain jnp on CPUs. `interpret` and `triton-interpret` run the kernels on a CPU, "
        "thousands of times slower, to check them ([kernels.md](kernels.md))",
        default="auto",
    )
    dtype: str = key(
        '`""`, `float32`, `bfloat16`',
        "what a policy computes in; empty is what suits the machine: float32 on CPUs, which "
        "emulate bfloat16 eight times slower, and on TPUs and GPUs what its `config.json` names "
        "(bfloat16 for float16, and that is said). The cache and the engine's weights follow it "
        "unless they say otherwise. It says nothing of how weights are stored (as they are) nor "
        "of what is trained: masters and moments are float32 always",
        default="",
    )
    reading: ReadingKeys | None = None
    engine: EngineKeys | None = None
    evaluate: EvaluateKeys | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Common):
    """A config such as quickstart: of `quickstart`, `train`, `plan`, `serve` and `ask`."""

    recipe: str = key(
        "name or file",
        "how a run learns, as published: what `--recipe` said, for the record. It has changed "
        "other keys ([algorithms.md](algorithms.md#published-recipes)); in a config file it stays "
        "empty",
        default="",
    )
    steps: int = key(
        "rollouts",
        "and what is learnt from each: `grpo.minibatches` x `grpo.epochs` optimizer steps. Change "
        "`optimizer.decay_steps` with it",
        whole(1),
    )
    sinks: tuple[str, ...] = key(
        "list of `wandb`, `mlflow`",
        "where else the numbers of each step go, where that package is installed (`pip install "
        "wandb`): project or experiment `notepad-jax`, a run of the name of ours. Servers and "
        "keys are those packages' own environment variables. A sink that fails is left out from "
        "then on, with a warning; `sinks.json` in the run's folder says which page `--resume` "
        "goes on on",
        default=(),
    )
    tasks: TaskKeys
    rollout: RolloutKeys
    fleet: FleetKeys
    grpo: GrpoKeys
    optimizer: OptimizerSettings
    parallel: ParallelKeys
    checkpoint: CheckpointKeys
    reading: ReadingKeys = dataclasses.field()
    engine: TrainingEngineKeys = dataclasses.field()
    data: DataKeys | None = None
    validation: ValidationKeys | None = None
    evaluate: SyntheticKeys | None = None
    serve: ServeKeys | None = None

    def __post_init__(self) -> None:
        kept = self.checkpoint
        if kept.handoff == "storage" and kept.every != 1 and not self.fleet.on:
            raise ValueError(
                f"checkpoint.every is {kept.every}, but handoff='storage' reads each step's "
                f"checkpoint; use every=1, or handoff='memory'"
            )
        least = self.tasks.min_tokens
        if self.data and least > self.data.tokens:
            raise ValueError(
                f"tasks.min_tokens is {least:,} and data.tokens {self.data.tokens:,}; the shortest "
                f"document has no more tokens than the longest"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suites(Common):
    """A config such as ruler: of `build`, and of `eval` where suites or files are asked."""

    evaluate: SuiteKeys | None = None
    endpoint: EndpointKeys | None = None
    sources: SourceKeys | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyKeys:
    """Section policy: sizes of the decoder."""

    width: int = key(
        "sizes",
        "of the decoder. At least 2 layers; heads a multiple of kv_heads; an even head size",
        whole(1),
    )
    layers: int = also(whole(1))
    heads: int = also(whole(1))
    kv_heads: int = also(whole(1))
    head_size: int = also(whole(1))
    feed_forward: int = also(whole(1))
    rope_theta: float = key(
        "numbers",
        "base of the rotary angles; epsilon of RMSNorm",
        POSITIVE,
    )
    rms_eps: float = also(POSITIVE)
    qk_norm: bool = key(
        "true, false",
        "Qwen3 norms queries and keys; Qwen2 has biases on q, k, v; tied: the output matrix is "
        "the embedding",
    )
    attention_bias: bool = also()
    tied_embeddings: bool = also()


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialKeys:
    """Section initial: first weights."""

    embed: float = key(
        "factors",
        "on the usual initial values of the embedding, and of what attention and feed-forward "
        "add. Loud words and quiet branches learn several times faster",
        POSITIVE,
    )
    branches: float = also(POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LessonKeys:
    """Section lessons: kinds of steps, in a list that a file changes, and no command line."""

    chunks: int = key("chunks", "of a step of this kind", whole(1))
    chunk_size: int = key("tokens", "of each", whole(1))
    tails: int = key("questions", "for each chunk", whole(1))
    share: float = key("share", "how often this kind is drawn", SHARE)
    notes: bool = key(
        "true or false",
        "with `rounds`: these chunks are notes side by side, of an odd number of tokens",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starter(AnyConfig):
    """A config such as starter: of `warmup`."""

    seed: int = key(
        "integer, 0 to 2^32 - 1",
        "decides documents and first weights",
        whole(0, 2**32 - 1),
    )
    steps: int = key("supervised steps", "of the training", whole(1))
    folder: str = key(
        "folder",
        "where the finished policy is written, in Hugging Face layout. What lies there is "
        "replaced; its README.md is kept",
    )
    reads_as: str = key(
        "config",
        "whose reading and engine settings are written beside the policy: it is read by them",
    )
    checkpoints: str = key(
        "folder",
        "save there, and go on from there when started again. Empty: no checkpoints",
    )
    checkpoint_every: int = key(
        "steps",
        "between them",
        whole(1),
    )
    policy: PolicyKeys
    mixed: bool = key(
        "true or false",
        "lessons about the questions of `data.kinds`, instead of the quick start's",
    )
    rounds: bool = key(
        "true or false",
        "lessons of a reading in rounds about the quick start's: keep, note, merge",
    )
    habits: Habits
    initial: InitialKeys
    drill_steps: int = key(
        "steps",
        "at the start, on the first kind of lesson only",
        whole(0),
    )
    first_window: int = key(
        "tokens, 0 or more",
        "that the first layer's queries see back, themselves included; 0: all",
        whole(0),
    )
    optimizer: OptimizerSettings
    noise: float = key(
        "share",
        "of each matrix's root mean square that is added to it as Gaussian noise, anew at every "
        "step (a quarter of it to the embedding): what reinforcement learning moves later is not "
        "lost. 0: none",
        SHARE,
    )
    guidance: float = key(
        "weight, in nats",
        "of the term that tells three heads where to look, during this training only",
        UNSIGNED,
    )
    lessons: tuple[LessonKeys, ...]


Config = Training | Suites  # of whatever reads
