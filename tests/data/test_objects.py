"""Objects of a bucket: whole whatever the size of a block, and never two of them in one."""

import pytest
import tensorstore as ts

from notepad_jax.data.objects import CONTEXT, BucketListing, Changed

URL = "memory://objects/some"


@pytest.fixture()
def store():
    found = ts.KvStore.open(f"{URL}/", context=CONTEXT).result()
    yield found
    found.delete_range(ts.KvStore.KeyRange()).result()


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11, 100])
def test_blocks_are_the_object_whatever_their_size(store, size):
    store.write("a/b", b"0123456789").result()
    objects = BucketListing(URL)
    generation, first = objects.look("a/b", size)
    assert first == b"0123456789"[:size]
    blocks = list(objects.blocks("a/b", generation, size))
    assert b"".join(blocks) == b"0123456789" and all(0 < len(b) <= size for b in blocks)


@pytest.mark.parametrize("then", [b"9876543210", b"01", b"", None, b"0123456789" * 2], ids=repr)
@pytest.mark.parametrize("read", [0, 1, 2])
def test_an_object_that_is_another_now_is_never_read_on(store, then, read):
    store.write("x", b"0123456789").result()
    objects = BucketListing(URL)
    generation, _ = objects.look("x")
    blocks = objects.blocks("x", generation, 3)
    got = [next(blocks) for _ in range(read)]
    store.write("x", then).result()
    with pytest.raises(Changed):
        got += list(blocks)
    assert b"".join(got) == b"0123456789"[: len(b"".join(got))]


def test_a_name_is_a_key_and_nothing_else(store):
    store.write("a", b"inside").result()
    objects = BucketListing(f"{URL}/below")
    for name in ("../a", "%2e%2e/a", "a", "x|zip:a", "?", "#"):
        assert objects.look(name) is None
    store.write("below/../a#?%41", b"odd").result()
    assert objects.look("../a#?%41")[1] == b"odd"


def test_an_empty_object_is_one_and_no_bucket_is_one_line(store):
    store.write("none", b"").result()
    objects = BucketListing(URL)
    generation, first = objects.look("none")
    assert first == b"" and list(objects.blocks("none", generation)) == []
    with pytest.raises(ValueError, match="zz://x cannot be opened") as caught:
        BucketListing("zz://x")
    assert "\n" not in str(caught.value)
