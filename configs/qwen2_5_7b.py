"""A 7B memory agent on a TPU slice: Qwen2.5-7B-Instruct, chunks of 5,000 tokens.

    notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4      (no TPU is needed)
    notepad-jax build ruler-qa --hotpotqa hotpot_train_v1.1.json --paragraphs 200 --samples 8192 \
        --seed 1 --form array_record --out data/train
    notepad-jax train --config configs/qwen2_5_7b.py --name qwen2_5_7b

Planned for v5p:2x4x4: it fits, 24.4 of 102.8 GB a chip; a step at its limits takes at least 8
minutes (estimate). It was never run: no TPU was at hand.

`plan` on 2026-11-22: it fits, 24.4 of 102.8 GB a chip in the update and 19.1 in the rollout; a step
at its limits takes at least 488 s (an estimate, a floor). On v6e:8x8, with
`--config.grpo.micro_batch_rows=64`: 21.1 of 33.6 GB, at least 201 s. On v5e:8x8 with that,
`--config.grpo.row_length=8192` and `--config.engine.pages=5864`: 16.7 of 16.9 GB, at least 1,171 s.

The batch, the optimizer and the limits are those of the published memory agents: 128 questions
read 16 times each, 16 optimizer steps a rollout, AdamW at 1e-6, k3 to the start at 1e-3. Rows of
a micro-batch are spread over all devices: on another slice than 32 of them change
`grpo.micro_batch_rows` (a multiple of its devices / parallel.tensor) and plan again.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    # A Hugging Face folder. `plan` needs no weights: there its last part names a published model.
    config.policy = "policies/Qwen2.5-7B-Instruct"
    config.dtype = "bfloat16"  # of activations; what is trained is float32
    config.kernels = "auto"

    # Context of a turn = instruction + question + chunk + memory, then memory or answer again.
    config.reading = ConfigDict(
        dict(
            template="chunk_first",  # a group shares everything before its memories
            chat="model",
            max_question=256,
            chunk_size=5000,  # tokens per turn
            max_memory=1024,
            max_answer=1024,
            memory_update="overwrite",
        )
    )

    # The starter's documents, drawn where `tasks.files` is empty: not for this policy.
    config.data = ConfigDict(
        dict(
            tokens=32768,
            questions=1,
            unanswerable=0.0,
            two_hop=0.5,
            distractor_share=0.5,
            chapter_rate=0.0,
        )
    )
    config.tasks = ConfigDict(
        dict(
            files=("data/train/hotpotqa-200paragraphs.array_record",),
            weights=(),
            max_tokens=32768,  # of a document: 7 chunks
            reward="memagent",  # as published: 1 for a gold answer in the box at the end
        )
    )

    config.steps = 200  # rollouts
    config.sinks = ()  # where else the numbers of each step go: "wandb", "mlflow"
    config.rollout = ConfigDict(
        dict(
            documents=128,  # per step
            group_size=16,
            temperature=1.0,
            top_p=1.0,
            max_rounds=3,
            max_staleness=1,
            max_failed_share=0.1,
            archive=2,
        )
    )
    config.grpo = ConfigDict(
        dict(
            advantage="dr_grpo",
            normaliser="token_mean",  # or turn_mean, trajectory_mean, prompt_mean, constant
            constant=0.0,  # of `constant`: completion tokens that a trajectory may have
            ratio="ppo_clip",  # or gspo, a turn's own; cispo
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            cap=4.0,  # of cispo: no ratio counts for more
            tis_cap=0.0,  # of the trainer's over the sampler's probability; 0 does not correct
            mask_truncated=False,  # turns that were cut at their limit teach nothing
            ess_at=0.0,  # effective share of turns below which a step is shortened; 0: none
            full_rate_at=0.5,
            kl_weight=1e-3,  # needs the starting policy beside the trained one
            kl="k3",  # the estimate: k1, k2, k3
            kl_in="loss",  # or "reward"
            minibatches=16,
            epochs=1,
            max_skipped=3,
            micro_batch_rows=32,  # one on each of 32 devices
            row_length=16384,  # a prefix of 5,200 tokens and five tails of 2,100
            remat=True,
            lora=ConfigDict(dict(rank=0, alpha=32.0, targets=("q", "k", "v", "o"))),
        )
    )
    config.optimizer = ConfigDict(
        dict(
            kind="adamw",
            learning_rate=1e-6,
            adam_learning_rate=1e-6,  # unused by adamw
            warmup_steps=320,  # 20 rollouts
            decay="none",
            decay_from=0,
            decay_steps=0,
            decay_to=0.02,
            momentum=0.95,
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            max_grad_norm=1.0,
        )
    )
    config.parallel = ConfigDict(
        dict(
            devices=0,  # all there are
            tensor=1,  # weights are cut over all devices by their width (fsdp)
        )
    )
    config.checkpoint = ConfigDict(
        dict(
            handoff="memory",  # "storage" reads 30 GB every step
            rollout_dtype="bfloat16",
            every=10,
            keep=2,
            # "": in runs/NAME. Else FOLDER/NAME/checkpoints: a bucket (gs://...) or a disk; several
            # hosts need one that all of them see.
            folder="",
        )
    )
    # Held-out tasks, read with what was learnt so far; on one of suite, files and split.
    config.validation = ConfigDict(
        dict(
            every=0,  # steps; 0 never
            suite="",  # synthetic (the starter's), ruler, ruler-qa, memory
            tasks=(),  # of the suite
            lengths=(),  # of its documents: the training length, and longer ones
            files=(),  # task files
            split=0.0,  # share of tasks.files that is held out
            samples=64,  # questions of a length, or of a file
            repeats=1,
            temperature=0.0,
            top_p=1.0,
            patience=0,  # validations without a better one, after which the run ends; 0 never
        )
    )
    config.engine = ConfigDict(
        dict(
            tensor=4,  # the devices of a host, a kv head each
            replicas=0,  # as many engines as the host has room for
            slots=256,  # 16 groups: what a host of eight reads in a step
            page_size=128,
            pages=6144,  # 786K tokens; 57 KB each over 4 devices: 11.3 GB
            steps_per_launch=32,
            row_tokens=8192,
            cache_dtype="bfloat16",
            give_back=True,  # the cache's memory to the update, and take it again after it
            share_prefixes=True,
            read_ahead=False,
            use_drafts=True,
        )
    )

    # Greedy reading in `quickstart`; real suites: config ruler.
    config.evaluate = ConfigDict(
        dict(
            suite="synthetic",
            methods=("notepad",),
            lengths=("32k", "128k"),
            lengths_before=("32k",),
            repeats=1,
            chunk_size=5000,
            context=28672,
            at_once=256,
            questions=128,
            questions_per_document=1,
            questions_longest=64,
            questions_per_longest=1,
            unanswerable=0.0,
            temperature=0.0,
            top_p=1.0,
        )
    )
    return config
