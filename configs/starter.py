"""The starter policy of the quick start.

    notepad-jax warmup --config configs/starter.py

Expected: 5 to 7 minutes on one core; data/starter/ (0.9 MB), which finds all facts in chunks
of 64 to 1,024 tokens and forgets three notes of four when a new chapter begins: accuracy
.48 on documents of 8 x 256 tokens, .34 at 16 x 256, .30 at 64 x 256 (.30 is saying "nothing").
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.folder = "data/starter"
    config.reads_as = "quickstart"  # a config: its reading settings are written beside the policy
    config.checkpoints = ""  # a folder: save there, and go on from there after a kill
    config.checkpoint_every = 500  # steps

    # A standard Qwen3 decoder, 225,024 parameters. Two layers are the least that can look a
    # fact up; two heads keep attention, the main cost of reading millions of tokens, small. So
    # does the first layer's window (`first_window`): it joins the words of a sentence or of a
    # question. Without it, a look two words back sometimes fell on a word hundreds back, whose
    # angles are alike.
    config.policy = ConfigDict(
        dict(
            width=128,
            layers=2,
            heads=2,
            kv_heads=1,
            head_size=32,
            feed_forward=128,
            # A fact's subject, a head of 32 must tell from 95 others, wherever in 1,088 tokens
            # it stands: 11 of its 16 pairs of numbers turn too little there to matter; at 1e6, 7.
            rope_theta=1e11,
            rms_eps=1e-6,
            qk_norm=True,
            attention_bias=False,
            tied_embeddings=True,
        )
    )

    config.first_window = 32  # tokens that the first layer sees back; 0: all

    # Lessons about the quick start's questions, or about the four kinds of starter/mixed.py.
    config.mixed = False
    config.rounds = False  # the quick start's, read in rounds (starter/rounds_lessons.py)

    # What the teacher does right how often: sound skills, bad habits. Write_found and
    # keep_at_chapter well below 1 leave reinforcement learning something to teach, and well
    # above 0 let it find what to reinforce.
    config.habits = ConfigDict(
        dict(write_found=0.75, keep=0.98, keep_at_chapter=0.25, merge=1.0, leave=0.0, stay=1.0)
    )

    # Factors on the usual initial values; see programs/warmup.py:initial_params.
    config.initial = ConfigDict(dict(embed=12.5, branches=0.3))

    config.steps = 2000
    config.drill_steps = 300  # on the first kind of lesson only, where a fact is easy to find
    # Noise in the weights at every step, relative to them. Reinforcement learning moves them too,
    # and what is right in one exact place only would be lost. With 0.06 the first layer cannot
    # tell two words before from 615, 767 or 463 words before.
    config.noise = 0.03
    config.guidance = 0.5  # weight of telling heads where to look, against one nat of loss
    # Chunks a step, tokens each, questions each, and how often such a step is drawn.
    config.lessons = (
        ConfigDict(dict(chunks=16, chunk_size=64, tails=12, share=0.35, notes=False)),
        ConfigDict(dict(chunks=6, chunk_size=256, tails=24, share=0.40, notes=False)),
        ConfigDict(dict(chunks=2, chunk_size=1024, tails=32, share=0.25, notes=False)),
    )
    config.optimizer = ConfigDict(
        dict(
            kind="muon",
            learning_rate=1e-2,  # weight matrices
            adam_learning_rate=5e-3,  # embedding and norms
            warmup_steps=0,
            decay="linear",
            decay_from=500,  # constant for a quarter of the steps
            decay_steps=2000,  # change it with `steps`
            decay_to=0.02,
            momentum=0.95,
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=0.0,  # not clipped
        )
    )
    return config
