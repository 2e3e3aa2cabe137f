"""Small tensors in safetensors files, and a store that counts what is read of them.

For the tests of `checkpoint.hf`.
"""

import jax
import ml_dtypes
import numpy as np

from notepad_jax.checkpoint.hf import sharded_loading, storage, writing
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.sharded_loading import Layout
from notepad_jax.checkpoint.hf.writing import PlannedTensor

BF16 = np.dtype(ml_dtypes.bfloat16)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    return {
        "a": draw(12, 5).astype(np.float32),
        "b": draw(7).astype(BF16),
        "c": draw(2, 3, 4).astype(np.float16),
        "d": draw(9, 6).astype(BF16),
    }


def write(folder, named, part_bytes=writing.PART_BYTES, **options):
    plan = [PlannedTensor(name, value.dtype, value.shape) for name, value in named.items()]
    return writing.write(
        folder,
        plan,
        named.__getitem__,
        {"config.json": b'{"model_type": "x"}\n'},
        part_bytes,
        **options,
    )


class Counting:
    """A key-value store that counts the bytes asked for."""

    def __init__(self, kvstore):
        self.kvstore, self.ranges = kvstore, []

    def read(self, key, byte_range=None):
        if byte_range is not None:
            self.ranges.append((key, byte_range.start, byte_range.stop))
        return self.kvstore.read(key, byte_range=byte_range)

    def list(self):
        return self.kvstore.list()

    def take(self):
        ranges, self.ranges = self.ranges, []
        return sum(stop - start for _, start, stop in ranges)


def counted(folder):
    counting = Counting(storage.open_kvstore(folder))
    found = Safetensors.of(str(folder), counting)
    return found, counting


def linear(published, out_axes, names=("w0", "w1", "w2")):
    """A stack of published [out, in] matrices, out split into `out_axes`."""
    unfolded = (*out_axes, published[1])
    n = len(out_axes)
    return Layout(names, (len(names),), published, unfolded, (n, *range(n)))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole(found, layout, dtype=None):
    """A parameter on one device, as numpy."""
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return np.asarray(sharded_loading.place(found, layout, first, dtype))
