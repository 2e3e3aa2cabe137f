"""Your own model: a published chat model learns to read your own questions, on one machine.

    notepad-jax train --config chat --name mine --config.policy=path/to/Qwen2.5-0.5B-Instruct \
        --config.tasks.files=questions.jsonl
    notepad-jax export-hf runs/mine@best exported

It trains adapters of rank 16 on 64 readings a step (8 questions, 8 times each), holds a tenth of
the questions out and reads them greedily every 10 steps. Sizes that are 0 follow from template
and limits. The rates are those that such runs are published with; no published model was at hand
to try them. On a TPU slice, begin with configs/qwen2_5_7b.py instead.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.policy = ""  # a Hugging Face folder, a run (runs/NAME, runs/NAME@best) or an import
    config.dtype = ""  # of activations: "float32", "bfloat16", or "" for what the policy names
    config.kernels = "auto"

    # Context of a turn = instruction + question + chunk + memory, then memory or answer again.
    config.reading = ConfigDict(
        dict(
            template="chunk_first",  # a group shares everything before its memories
            chat="model",  # turns in the chat template that lies beside the weights
            max_question=128,
            chunk_size=1024,  # tokens per turn
            max_memory=256,
            max_answer=128,
            memory_update="overwrite",
        )
    )

    # Of the starter's documents, which no other policy can be trained on; for `plan` alone.
    config.data = ConfigDict(
        dict(
            tokens=8192,
            questions=1,
            unanswerable=0.0,
            two_hop=0.5,
            distractor_share=0.5,
            chapter_rate=0.0,
        )
    )
    config.tasks = ConfigDict(
        dict(
            files=(),  # must be given: jsonl, parquet, array_record, or what others publish
            weights=(),
            max_tokens=16384,  # of a document; longer ones lose their middle. 0: no limit
            reward="",  # a metric instead of each row's own
        )
    )

    config.steps = 200  # rollouts
    config.sinks = ()  # "wandb", "mlflow", where installed
    config.rollout = ConfigDict(
        dict(
            documents=8,  # per step
            group_size=8,
            temperature=1.0,
            top_p=1.0,
            max_rounds=2,
            max_staleness=1,
            max_failed_share=0.1,
            archive=2,
        )
    )
    config.grpo = ConfigDict(
        dict(
            advantage="dr_grpo",
            normaliser="token_mean",
            constant=0.0,
            ratio="ppo_clip",
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            cap=4.0,
            tis_cap=0.0,
            mask_truncated=False,
            ess_at=0.0,
            full_rate_at=0.5,
            kl_weight=0.0,
            kl="k3",
            kl_in="loss",
            minibatches=1,
            epochs=1,
            max_skipped=3,
            micro_batch_rows=1,
            row_length=0,  # derived: a prefix and four tails
            remat=True,
            # Rank 0 trains all weights; then use a rate of 1e-6.
            lora=ConfigDict(dict(rank=16, alpha=32.0, targets=("q", "k", "v", "o"))),
        )
    )
    config.optimizer = ConfigDict(
        dict(
            kind="adamw",
            learning_rate=1e-5,
            adam_learning_rate=1e-5,  # unused by adamw
            warmup_steps=10,
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
            devices=1,  # 0 takes all there are; rows of a micro-batch are spread over them
            tensor=1,
        )
    )
    config.checkpoint = ConfigDict(
        dict(
            handoff="memory",
            rollout_dtype="",
            every=5,
            keep=2,
            folder="",
        )
    )
    # Held-out tasks, read with what was learnt so far; on one of suite, files and split.
    config.validation = ConfigDict(
        dict(
            every=10,  # steps; 0 never
            suite="",  # synthetic (the starter's), ruler, ruler-qa, memory
            tasks=(),  # of the suite
            lengths=(),  # of its documents: the training length, and longer ones
            files=(),  # task files
            split=0.1,  # share of tasks.files that is held out
            samples=64,  # questions of a length, or of a file
            repeats=1,
            temperature=0.0,
            top_p=1.0,
            patience=0,  # validations without a better one, after which the run ends; 0 never
        )
    )
    config.engine = ConfigDict(
        dict(
            tensor=1,
            replicas=0,  # as many engines as there are devices for
            slots=64,
            page_size=64,
            pages=0,  # derived: all slots at once
            steps_per_launch=16,
            row_tokens=0,  # derived: four tails
            cache_dtype="bfloat16",
            give_back=False,
            share_prefixes=True,
            read_ahead=False,
            use_drafts=True,
        )
    )

    # Of `ask`, and of `eval` with this config.
    config.evaluate = ConfigDict(
        dict(
            suite="synthetic",  # of the starter; say --suite
            methods=("notepad",),
            lengths=("8k", "32k", "128k"),
            lengths_before=("8k",),
            repeats=1,
            chunk_size=1024,
            context=8192,
            at_once=64,
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
