"""Evaluation of real models: RULER, RULER-QA and the memory suite, at any length.

    notepad-jax eval --config ruler --policy path/to/Qwen2.5-7B-Instruct --suite ruler-qa \
        --hotpotqa hotpot_dev_distractor_v1.json --lengths 7k,28k,112k,448k,3.5m

The limits and the sampling are those of the published memory agents (chunk 5,000, memory
and answer 1,024, T = 0.7, top-p 0.95), so a turn's context is about 8K at every length.
Published, 128 questions, two-way sub-EM: 83.6% at 7K, 78.1% at 3.5M (14B); docs/evaluation.md.
With --endpoint, the same agent reads through any OpenAI-compatible server instead.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.policy = ""  # a Hugging Face folder; or an endpoint, below
    config.dtype = ""  # of activations; "": float32 on CPUs, on others what the policy names
    config.kernels = "auto"

    # Context of a turn = instruction + question + chunk + memory, then memory or answer again.
    config.reading = ConfigDict(
        dict(
            template="chunk_first",
            chat="model",
            max_question=1024,
            chunk_size=5000,  # tokens per turn
            chunk_ends="tokens",  # or "sentence": at the last one that ends within chunk_size
            max_memory=1024,
            max_answer=1024,
            answer_chunks=1,  # contexts of max_answer tokens that one answer may take
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
    # Instead of `policy`. A key is read from the environment and never written down.
    config.endpoint = ConfigDict(
        dict(
            url="",  # such as http://localhost:8000/v1
            model="",  # may be left out where the server has one model
            tokenizer="",  # a folder with the model's tokenizer; "" counts words and their parts
            key_variable="",  # "": OPENAI_API_KEY, if it is set
            at_once=32,  # requests under way
            timeout=600.0,  # seconds for one request
        )
    )
    config.sources = ConfigDict(
        dict(
            text="stdlib",  # haystack: stdlib, noise, or a text file or folder
            hotpotqa="",  # HotpotQA's json, a path or gs:// URL; "" asks built-in questions
            squad="",  # SQuAD's json
        )
    )
    config.evaluate = ConfigDict(
        dict(
            suite="ruler-qa",  # or another of docs/evaluation.md, or a task file or folder
            tasks=(),  # of the suite; none named: all
            methods=("notepad",),
            lengths=(),  # of documents, such as ("8k", "1m"); none: a file's own, or the usual
            usual_lengths=(
                *("7k", "14k", "28k", "56k", "112k", "224k", "448k", "896k", "1.75m", "3.5m"),
            ),
            train_length="",  # of the policy, such as "32k": losses are counted from there
            samples=0,  # questions per task and length; 0: all of a file, or the usual
            usual_samples=128,
            repeats=1,  # readings of each question
            chunk_size=5000,
            ruler_limits=False,  # True: answers to its tasks end at RULER's 30 to 128 tokens
            context=32768,  # document tokens that a method without a memory may show at once
            at_once=32,  # readings under way: they end about together, and a kill loses them
            archive_turns=0,  # readings of each method and length kept with every turn
            # By which answers are judged: a metric, a function of yours (module:function), or
            # several (my_rewards:early=0.9,em=0.1). Empty: each task's own metric.
            reward="",
            temperature=0.7,
            top_p=0.95,
        )
    )
    config.engine = ConfigDict(
        dict(
            tensor=1,  # devices that share an engine's heads
            replicas=0,  # engines side by side: as many as the devices have room for
            per_cpu=1,
            max_prompt=0,
            slots=32,
            page_size=128,
            pages=0,  # derived: all slots at once, or as many as fit the memory
            steps_per_launch=16,
            row_tokens=8192,
            cache_dtype="",  # as activations
            share_prefixes=True,
            use_drafts=True,
        )
    )
    return config
