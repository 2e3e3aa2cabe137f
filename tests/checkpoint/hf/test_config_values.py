"""Values in config.json: whatever stands there, it is read or refused in one line."""

import dataclasses
import json

import pytest
from golden_policies import DENSE, EXPERTS, MOE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notepad_jax.checkpoint.hf.config import read_config, write_config
from notepad_jax.checkpoint.hf.fields import LARGEST, LARGEST_SIZE, SMALLEST, Fields, ImportProblem
from notepad_jax.model import rope
from notepad_jax.model.config import PolicyConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BASES = {
    "llama": write_config(dataclasses.replace(DENSE, qk_norm=False), "float32")
    | {"mlp_bias": False, "layer_types": None, "original_max_position_embeddings": None},
    "mistral": write_config(dataclasses.replace(DENSE, qk_norm=False, family="mistral"), "float32")
    | {"sliding_window": None, "partial_rotary_factor": 1.0},
    "qwen2": write_config(dataclasses.replace(DENSE, qk_norm=False, attention_bias=True), "float32")
    | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2},
    "qwen3": write_config(dataclasses.replace(DENSE, qk_norm=True), "float32")
    | {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}, "dtype": "bfloat16"},
    "qwen3_moe": write_config(
        dataclasses.replace(MOE, qk_norm=True, attention_bias=False, experts=EXPERTS), "float32"
    )
    | {"quantization_config": None, "per_layer_config": None, "num_local_experts": None},
}
INSIDE = (
    "rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor", "full_attention",
)  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 10**9, 2**31, 10**400, -(10**400), 0.0, -0.0, 0.5, 1e308,
                     5e-324, float("nan"), float("inf"), float("-inf")]),
    st.integers(), st.floats(),
)  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(["false", "true", "yarn", "llama3", "linear", "default", "silu", "float32",
                     "full_attention", "sliding_attention", "\x1b[2J", "x" * 10_000]),
    st.text(max_size=8),
)  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda value: st.one_of(
        st.lists(value, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(INSIDE), st.text(max_size=4)), value, max_size=5),
    ),
    max_leaves=8,
)
KEYS = sorted({key for base in BASES.values() for key in base})


def read_or_refused(text: dict) -> PolicyConfig | None:
    """The policy, whose rotary frequencies can be made, or None after one printable line."""
    try:
        config = read_config(text)
    except ImportProblem as problem:
        said = str(problem)
        assert said.isprintable() and len(said) < 400 and said.startswith("config.json")
        return None
    hash(config)
    if config.head_size < 10**4:
        rope.frequencies(config.head_size, config.rope_theta, config.rope)
    return config


@pytest.mark.parametrize("kind", BASES)
def test_the_bases_are_read(kind):
    assert read_or_refused(BASES[kind]) is not None


@settings(max_examples=250, deadline=None)
@given(kind=st.sampled_from([*BASES]), key=st.sampled_from(KEYS), value=ANYTHING)
@example("llama", "rope_parameters", "yarn")
@example("llama", "layer_types", 5)
@example("llama", "model_type", [])
@example("llama", "rope_theta", 10**400)
@example("qwen2", "max_window_layers", "x")
@example("llama", "architectures", {})
def test_no_value_at_any_key_is_a_traceback(kind, key, value):
    read_or_refused(BASES[kind] | {key: value})


@settings(max_examples=250, deadline=None)
@given(
    outer=st.sampled_from(["rope_scaling", "rope_parameters"]),
    kind=st.sampled_from(["yarn", "llama3", "linear", "default"]),
    changed=st.dictionaries(st.sampled_from(INSIDE), ANYTHING, max_size=3),
)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_no_value_in_a_rope_scaling_is_a_traceback(outer, kind, changed):
    whole = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": kind}
    read_or_refused(BASES["llama"] | {outer: whole | changed})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model_type", [], "config.json: 'model_type' is [], not a string"),
        ("model_type", "\x1b[2J", r"config.json: architecture '\x1b[2J' is not supported; supp"),
        ("rope_parameters", "yarn", "config.json: 'rope_parameters' is 'yarn', not an object"),
        ("layer_types", 5, "config.json: 'layer_types' is 5, not a list of strings"),
        ("layer_types", ["full_attention"],
         "config.json: 'layer_types' is ['full_attention'], not one word for each of num_hidden"),
        ("layer_types", ["linear_attention"] * 3, "asks for layers of ['linear_attention']"),
        ("num_hidden_layers", 10**10, "config.json: 'num_hidden_layers' is 10000000000, not a"),
        ("num_hidden_layers", 10**400, f"is 1{'0' * 79}... (401 characters), not a size"),
        ("hidden_size", True, "config.json: 'hidden_size' is True, not a positive whole number"),
        ("hidden_size", 32.0, "config.json: 'hidden_size' is 32.0, not a positive whole number"),
        ("rope_theta", 0, "config.json: 'rope_theta' is 0, not a positive number (1e-30 to 1e+30)"),
        ("rope_theta", -1.0, "config.json: 'rope_theta' is -1.0, not a positive number"),
        ("rope_theta", float("nan"), "config.json: 'rope_theta' is nan, not a positive number"),
        ("rope_theta", float("inf"), "config.json: 'rope_theta' is inf, not a positive number"),
        ("rope_theta", 10**400, "not a positive number"),
        ("rms_norm_eps", 0.0, "config.json: 'rms_norm_eps' is 0.0, not a positive number"),
        ("rms_norm_eps", "1e-6", "config.json: 'rms_norm_eps' is '1e-6', not a number"),
        ("rope_scaling", YARN | {"factor": -2.0},
         "config.json: rope_scaling: 'factor' is -2.0, not a positive number"),
        ("rope_scaling", YARN | {"beta_fast": "32"},
         "config.json: rope_scaling: 'beta_fast' is '32', not a number"),
        ("rope_scaling", YARN | {"rope_theta": 1.0}, "yarn needs a rope_theta above 1, not 1.0"),
        ("tie_word_embeddings", "false",
         "config.json: 'tie_word_embeddings' is 'false', not true or false"),
        ("tie_word_embeddings", 1, "config.json: 'tie_word_embeddings' is 1, not true or false"),
        ("attention_bias", "false", "config.json: 'attention_bias' is 'false', not true or false"),
        ("torch_dtype", {}, "config.json: 'torch_dtype' is {}, not a string"),
    ],
)  # fmt: skip
def test_what_is_no_such_value_is_said(key, value, says):
    with pytest.raises(ImportProblem) as raised:
        read_config(BASES["llama"] | {"rope_scaling": None} | {key: value})
    assert says in str(raised.value)


def test_fields_promise_what_they_return():
    read = Fields({"a": LARGEST_SIZE, "b": 0, "n": None, "f": SMALLEST, "g": LARGEST}, "x.json")
    assert (read.size("a"), read.size("b", least=0), read.size("n", 7)) == (LARGEST_SIZE, 0, 7)
    assert (read.number("f"), read.number("g"), read.number("n", 3.0)) == (SMALLEST, LARGEST, 3.0)
    assert (read.said("n"), read.said("b"), read.flag("n", True)) == (False, True, True)
    assert (read.words("n"), dict(read.object("n").text)) == ((), {})
    with pytest.raises(ImportProblem, match=r"^x.json: 'n' is missing$"):
        read.size("n")


def rope_of(**said) -> tuple[rope.Scaling, float]:
    text = BASES["llama"] | {"rope_scaling": None, "rope_parameters": None} | said
    text = {key: value for key, value in text.items() if value is not None}
    config = read_config(json.loads(json.dumps(text)))
    return config.rope, config.rope_theta


def test_of_two_spellings_of_rope_the_one_that_transformers_takes_counts():
    """transformers 5.23: `rope_scaling or rope_parameters`, and the theta that belongs to it."""
    plain, yarn = {"rope_theta": 5e5, "rope_type": "default"}, YARN | {"rope_theta": 7e5}
    stretched = rope_of(rope_scaling=YARN, rope_theta=3e5)
    assert isinstance(stretched[0], rope.Yarn) and stretched[1] == 3e5
    assert rope_of(rope_scaling=YARN, rope_parameters=plain, rope_theta=3e5) == stretched
    assert rope_of(rope_scaling=yarn, rope_parameters=plain, rope_theta=3e5)[1] == 7e5
    assert rope_of(rope_scaling=YARN, rope_parameters=plain, rope_theta=None)[1] == 1e4
    assert rope_of(rope_scaling={}, rope_parameters=yarn) == (stretched[0], 7e5)
    assert rope_of(rope_scaling=None, rope_parameters=plain) == (rope.UNSCALED, 5e5)
    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope_of(rope_scaling=linear, rope_parameters=yarn, rope_theta=1e4)[0] == rope.Linear(2.0)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_for_each_kind_of_attention_is_refused(key):
    nested = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    says = f"config.json: {key} is given for each kind of attention .'full_attention', ...."
    with pytest.raises(ImportProblem, match=says):
        read_config(BASES["llama"] | {"rope_scaling": None, key: nested})


def test_the_newer_spelling_of_dtype_counts():
    assert read_config(BASES["llama"] | {"dtype": "float16", "torch_dtype": "bfloat16"}).dtype == (
        "float16"
    )
