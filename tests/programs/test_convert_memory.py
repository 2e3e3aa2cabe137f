"""What import-hf holds in memory, in a process of its own: what the device holds, and little."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.hf.config import write_config
from notepad_jax.checkpoint.hf.writing import PlannedTensor, write
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig

ROOT = Path(__file__).parents[2]
CONFIG = PolicyConfig(
    vocab_size=8000, width=1024, layers=12, heads=8, kv_heads=2, head_size=128, feed_forward=3072,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=8000, dtype="bfloat16",
)  # fmt: skip
IMPORT = """
import json, resource, sys
from notepad_jax.programs import convert
from notepad_jax.telemetry.screen import SilentScreen
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert.import_hf(sys.argv[1], sys.argv[2], SilentScreen())  # of a tiny one: compiles, mostly
before = peak()
convert.import_hf(sys.argv[3], sys.argv[4], SilentScreen())
print(json.dumps([before, peak()]))
"""


@pytest.mark.slow
def test_an_import_holds_the_model_and_one_parameter_more(tmp_path):
    """On one CPU device, whose memory is the host's. Twice the model and more, once."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    plan = [
        PlannedTensor(name, bf16, layout.published)
        for layout in huggingface.layouts(CONFIG).values()
        for name in layout.names
    ]
    shapes, rng = {tensor.name: tensor.shape for tensor in plan}, np.random.default_rng(0)
    write(
        tmp_path / "model", plan,
        lambda name: rng.standard_normal(shapes[name], np.float32).astype(bf16),
        {"config.json": json.dumps(write_config(CONFIG, "bfloat16")).encode()},
    )  # fmt: skip
    huggingface.export_params(tiny.CONFIG, tiny.params(), tmp_path / "tiny")
    folders = (tmp_path / name for name in ("tiny", "tiny_out", "model", "out"))
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT, *map(str, folders)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    before, after = json.loads(ran.stdout)
    leaves = parameters.abstract_params(CONFIG, "bfloat16")
    one = max(leaf.size for leaf in (leaves["embed"], *leaves["layers"].values())) * 2
    model = parameters.count(CONFIG) * 2
    assert model > 2.5e8 and one < 0.3 * model
    slack = 150e6  # of the requests in flight, and of what malloc keeps
    print(f"model {model / 1e6:.0f} MB, largest {one / 1e6:.0f}, held {(after - before) / 1e6:.0f}")
    assert after - before < model + one + slack
