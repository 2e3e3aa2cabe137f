"""The quick start: reinforcement learning on two CPU cores, read to 3.5 million tokens.

    make quickstart                  (or: notepad-jax quickstart --config quickstart)

Expected, in about 6 minutes on two free cores: accuracy at the training length (2,048
tokens) rises from about 0.3 to above 0.99; at 3.5 million tokens it is 0.992 to 1.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    # What `--recipe` said: a name in configs/recipes or a file, which has changed the keys below.
    # A config file calls its `apply(config)` instead.
    config.recipe = ""
    config.policy = "data/starter"  # a Hugging Face folder with its tokenizer, or a run
    # Of activations: "float32", "bfloat16", or "" for what suits the machine: float32 on CPUs,
    # which emulate bfloat16 eight times slower, and on others what the policy names.
    config.dtype = ""
    config.kernels = "auto"  # by machine; see pallas_kernels.BACKENDS

    # How a document is read. Context of a turn = chunk + question + memory + a few marks.
    config.reading = ConfigDict(
        dict(
            template="question_last",  # all questions about a document share its chunks
            chat="model",  # turn markers: the model's own template if it has one, or the "file"'s
            max_question=8,  # tokens
            chunk_size=256,  # tokens per turn in training; evaluation has its own
            chunk_ends="tokens",  # or "sentence": at the last one that ends within chunk_size
            max_memory=8,  # tokens, the stop token included
            max_answer=4,
            answer_chunks=1,  # contexts of max_answer tokens that one answer may take (Delethink)
            carry=0,  # of its last tokens, those that the next context begins with
            memory_update="overwrite",
            heads=1,  # memories; more with memory_update="heads"
            order="serial",  # "parallel": all chunks with one memory, then their notes; "mixed"
            passes=1,  # over the document at most; rounds, where the order is not serial
            again=False,  # whether a further pass is made only where the policy asks for it
            exits=False,  # whether the template's [exit] marker leads to the answer
            exit_after=0,  # turns in a row that changed nothing, after which it follows; 0: never
        )
    )

    # Synthetic documents to train on (starter/synthetic.py); `evaluate.data` has those to measure
    # on. 30% of the questions have no answer in the document, and the right answer is "nothing":
    # without them, outcome rewards teach guessing.
    config.data = ConfigDict(
        dict(
            tokens=2048,  # of a document: 8 chunks
            questions=4,  # about each document
            # Of questions: () asks the two of the quick start. Or some of exact, list, count and
            # order, each with a reward of its own (starter/mixed.py; config mix)
            kinds=(),
            unanswerable=0.3,
            two_hop=0.5,
            # Of sentences: facts about other names, of which notes must not be taken. More than
            # is measured on, too: in a long document every name is told about again and again.
            distractor_share=0.8,
            # Of sentences: a new chapter, where the starter forgets. Twice what is measured on: a
            # chunk of 1,024 tokens has as many as one of 256 seldom has.
            chapter_rate=1 / 32,
        )
    )

    # Instead of these documents: task files, which `notepad-jax build` writes.
    config.tasks = ConfigDict(
        dict(
            files=(),
            # Or stories of RULER and memory tasks (tasks/stories.py), `data.questions` in a
            # document of `data.tokens`: ("niah_single_2", "vt", "updates", ...).
            stories=(),
            min_tokens=0,  # of those documents: lengths from here to `data.tokens`; 0: all alike
            weights=(),  # of sources, as "ruler-qa/hotpotqa=2"; one that is not named has 1
            max_tokens=0,  # of a document; longer ones lose their middle. 0: no limit
            # Documents of at most so many chunks from a step on: ("4@0", "8@50"). (): all of them.
            curriculum=(),
            retire_at=0.0,  # mean reward from which a file's task is drawn no more; 0: all are
            balanced=False,  # equal numbers of each source in a batch, whichever are informative
            # Instead of each task's own: a metric ("memagent" is that of memory agents), a
            # function of yours (module:function), or several (my_rewards:early=0.9,em=0.1).
            # Held-out rows are judged by it, too.
            reward="",
            # What each memory on the way is worth, said in the same way: its turn learns from it.
            # "recall_gain" is what its turn added to the facts that it was shown, or lost of them.
            memory_reward="",
        )
    )

    config.steps = 36  # rollouts, and what is learnt from each
    config.sinks = ()  # where else the numbers of each step go: "wandb", "mlflow"
    config.rollout = ConfigDict(
        dict(
            documents=5,  # per step; groups = documents * questions
            group_size=8,  # G readings of each question
            # Above 1, slips are sampled more often than they would be said, so they are unlearnt
            # for longer: in a million greedy turns the right word has to be ahead in every one.
            temperature=1.3,
            top_p=1.0,
            max_rounds=3,  # of sampling, to replace uninformative groups; 1 only drops them
            # Policy versions between sampling and learning. From 1 on, informative groups that
            # a batch had no room for wait for the next one.
            max_staleness=0,
            # Steps whose draws are sorted by length, so that long documents meet in one of them.
            window=1,
            # What writes the turns: "" the policy; "script", what the tasks say of good notes
            # (recipe imitate).
            teacher="",
            max_failed_share=0.1,  # of a step's groups, whose readings failed; beyond, it stops
            archive=2,  # groups a step kept in trajectories.jsonl for people to read
            archive_turns=1,  # of these, groups with every turn: exact prompts, tokens, logprobs
            # Local advantages: of a `share` of the groups learnt from, one update turn's prompt is
            # completed so many times more, and what these memories are worth is compared.
            local=ConfigDict(dict(samples=0, share=0.25, weight=1.0)),  # 0: off; recipe logo: 4
        )
    )
    # Readers in processes of their own (docs/fleet.md), here or on other machines (`apart`). A step
    # is read in so many bundles (0: one a reader) by a policy at most `lead` versions old. `live`:
    # each turn by the newest; with `slack` a step waits for no document that is not so many behind.
    config.fleet = ConfigDict(
        dict(readers=0, apart=False, bundles=0, lead=1, live=False, slack=0, keep=False)
    )
    config.grpo = ConfigDict(
        dict(
            # The algorithm: docs/algorithms.md says which published one is which choice.
            advantage="dr_grpo",  # or another of docs/algorithms.md, as grpo, rloo, tmn
            # What the rollout before counts in the scale of a kind of task (batch_std, task_std,
            # tmn, tmn_reweight): 0.9 steadies a kind with few groups. 0: each rollout its own.
            scale_memory=0.0,
            # Of turn-level advantages, beside the reading's: of what `tasks.memory_reward` says.
            memory_weight=1.0,
            normaliser="token_mean",  # or turn_mean, trajectory_mean, prompt_mean, constant
            constant=0.0,  # of `constant`: completion tokens that a trajectory may have
            ratio="ppo_clip",  # or gspo, a turn's own; gspo_trajectory, all turns'; cispo
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,  # 0: none
            cap=4.0,  # of cispo: no ratio counts for more
            # The ratio's denominator: what a pass before the first of several steps says, or
            # "interpolated" between sampler and policy, by the age of a turn and without a pass.
            proximal="recomputed",
            tis_cap=0.0,  # of the trainer's over the sampler's probability; 0 does not correct
            tis_low=0.0,  # tokens below it, or above the cap, weigh nothing; 0: they are capped
            tis_veto=0.0,  # nor does a turn with a token below it; 0: no veto
            # Nats a token by which the policy may have left a turn that failed; beyond, the turn
            # teaches nothing. 0: however far.
            off_policy_at=0.0,
            mask_truncated=False,  # turns that were cut at their limit teach nothing
            # Tokens before a turn's limit in which it begins to cost, up to 1 where it is cut;
            # the mean over a reading's turns, times the weight, is taken off its reward. 0: off.
            overlong_window=0,
            overlong_weight=1.0,
            ess_at=0.0,  # effective share of turns below which a step is shortened; 0: none
            # Share of informative groups at which a step is taken whole; below it, in proportion.
            # Muon and Adam step as far on noise as on signal, and noise wears skills down.
            full_rate_at=0.5,
            kl_weight=0.0,  # to the starting policy; 0 skips its forward pass
            kl="k3",  # the estimate: k1, k2, k3
            kl_in="loss",  # or "reward"
            # AEPO: while the mean entropy of turns of a kind (updates, answers) is above `high`
            # nats, and until it is below `low`, their failures teach nothing. 0: no such gate.
            entropy_high=0.0,
            entropy_low=0.0,
            entropy_weight=0.0,  # of a bonus for each token's entropy, in nats
            # Optimizer steps a rollout: minibatches (parts of it, of whole groups) x epochs. With
            # more than one the ratio is to the trainer's own logprobs before the first of them.
            minibatches=1,
            epochs=1,
            max_skipped=3,  # rollouts in a row without an update that is finite; then the run stops
            micro_batch_rows=1,  # what fits a core's cache costs least
            row_length=1152,  # tokens of a packed row
            remat=False,
            # Train low-rank adapters instead of the weights; rank 0 trains the weights. A habit is
            # few numbers: adapters learn it in a third of the steps.
            lora=ConfigDict(
                dict(rank=8, alpha=16.0, targets=("q", "k", "v", "o", "gate", "up", "down"))
            ),
        )
    )
    config.optimizer = ConfigDict(
        dict(
            # Or muon: orthogonalised steps, which move noise as far as habits. Adapters lose words.
            kind="adamw",
            learning_rate=4e-3,  # of all that is trained, here adapters
            adam_learning_rate=4e-4,  # of embedding and norms beside muon
            # Rollouts, as `steps`, however many optimizer steps each takes.
            warmup_steps=0,
            decay="linear",  # of both rates; or cosine; "none" keeps them
            decay_from=9,  # from which they fall
            decay_steps=36,  # at which they have fallen; change it with `steps`
            decay_to=0.02,  # share of them that is left then
            momentum=0.95,  # of muon
            b1=0.9,  # of Adam
            b2=0.999,
            eps=1e-8,
            # Per step, times the rate. Of adapters, it pulls back to the starter, whose skills are
            # to stay.
            weight_decay=2.0,
            max_grad_norm=1.0,  # of the whole gradient; 0 does not clip
        )
    )
    # Devices to learn on, in rows of `tensor` that share heads, experts and vocabulary; rows of a
    # batch and the width of the weights are cut over the rows (fsdp).
    config.parallel = ConfigDict(
        dict(
            devices=1,  # 0 takes all there are
            tensor=1,
        )
    )
    config.checkpoint = ConfigDict(
        dict(
            handoff="storage",  # the engine loads each step's params through orbax; or "memory"
            # Of the engine's weights: "" for that of activations, or "float32"; "bfloat16" is half
            # the memory of that, "int8" a quarter and a bit.
            rollout_dtype="",
            every=1,  # steps between checkpoints; must be 1 with handoff="storage"
            keep=2,
            keep_turns=512,  # what is kept of a rollout for the case of a kill; 0: nothing
            # "": in runs/NAME. Else FOLDER/NAME/checkpoints: a bucket (gs://...) or a disk; several
            # hosts need one that all of them see.
            folder="",
        )
    )
    # Held-out tasks, read with what was learnt so far; on one of suite, files and split.
    config.validation = ConfigDict(
        dict(
            every=0,  # steps; 0 never
            suite="",  # synthetic (the starter's), ruler, memory, or another of docs/evaluation.md
            tasks=(),  # of the suite
            lengths=(),  # of its documents: the training length, and longer ones
            files=(),  # task files
            split=0.0,  # share of tasks.files that is held out
            split_by="documents",  # with all questions about them; or "questions"
            samples=64,  # questions of a length, or of a file
            repeats=1,
            temperature=0.0,
            top_p=1.0,
            patience=0,  # validations without a better one, after which the run ends; 0 never
        )
    )
    config.engine = ConfigDict(
        dict(
            tensor=1,  # devices that share an engine's heads
            replicas=1,  # engines side by side on this host's devices; 0: as many as fit
            # Engines that share a CPU, one device however many cores it has. A small policy's
            # launches keep one core busy; two engines repeat bit by bit on a machine with one, too.
            per_cpu=2,
            # Tokens of the longest prompt; 0: the reading's. Training has room for the longer ones
            # of measuring, too, which costs it next to nothing: so both run the same programs.
            max_prompt=1088,
            slots=256,
            page_size=64,  # tokens; a chunk should be a whole number of pages
            pages=1024,
            steps_per_launch=8,
            row_tokens=416,  # tail tokens packed behind one copy of a chunk: 32 questions of 13
            cache_dtype="",  # of keys and values; "" for that of activations
            give_back=False,  # the cache's memory to the update, and take it again after it
            share_prefixes=True,
            use_drafts=True,  # verify the old memory in one launch instead of decoding it
        )
    )

    # What `serve` takes; the engine's sizes follow.
    config.serve = ConfigDict(
        dict(
            max_prompt=0,  # tokens of a prompt; 0: as many as a turn of a reading may have
            max_completion=0,  # tokens of a completion; 0: as a turn's
            queue=64,  # completions that may wait for a slot; further ones get a 429
            queue_tokens=0,  # that all of them may come to, those that run too; 0: any number
            connections=1024,  # at a time; then the one that has been sending for longest gives way
            header_seconds=10.0,  # that the head of a request may take
            body_seconds=30.0,  # that a body may fall behind 1,024 bytes a second
            body_bytes=2**28,  # of all bodies in memory that are not complete
            warm_up=True,  # compile all programs at the start, beside serving
            cors=(),  # origins whose web pages may ask, such as "https://chat.example.org"
        )
    )

    # Greedy reading of documents never trained on. The training length is read as in training.
    config.evaluate = ConfigDict(
        dict(
            suite="synthetic",  # the starter's documents; the other suites are for config ruler
            methods=("notepad",),
            lengths=("2k", "8k", "32k", "128k", "3.5m"),
            lengths_before=("2k", "8k", "32k", "128k"),
            repeats=1,  # readings of each question; more than one needs a temperature
            chunk_size=1024,  # tokens, at every length but the training length
            context=8192,  # document tokens that a method without a memory may show at once
            at_once=256,  # readings under way
            archive_turns=0,  # readings of each method and length kept with every turn; the
            # prompts of a reading are as long as its document, 6 bytes a token
            reward="",  # by which answers are judged, as tasks.reward; empty: each task's own
            questions=256,  # per length
            questions_per_document=32,
            questions_longest=256,  # at 1m tokens and beyond
            questions_per_longest=32,
            temperature=0.0,
            top_p=1.0,
            # The documents of the suite synthetic, as `data` says of training's.
            data=ConfigDict(
                dict(
                    kinds=(),
                    unanswerable=0.1,
                    two_hop=0.5,
                    distractor_share=0.5,
                    chapter_rate=1 / 64,
                )
            ),
        )
    )
    return config
