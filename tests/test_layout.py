import pytest
import torch

from lightning_sparse.layout import Layout

SHAPES = {"a": (3, 4), "b": (), "c": (5,), "d": (0,), "e": (2, 2, 2)}


@pytest.mark.parametrize(
    ("granularity", "groups"),
    [
        ("layer", [["e"], ["d"], ["c"], ["b"], ["a"]]),
        ("model", [["e", "d", "c", "b", "a"]]),
        ("bucket", [["e"], ["d", "c", "b", "a"]]),
    ],
)
def test_partition_in_reverse_registration_order(granularity, groups):
    # 32 bytes: 'e' fills a bucket; 'd' to 'b' hold 24 bytes, so 'a' still joins.
    layout = Layout.of(SHAPES, granularity, bucket_cap_mb=32 / 2**20)
    assert [list(segment.names) for segment in layout.segments] == groups
    assert layout.numel == 12 + 1 + 5 + 0 + 8
    assert layout.names == ("e", "d", "c", "b", "a")


def test_views_and_owner():
    segment = Layout.of(SHAPES, "model").segments[0]
    views = segment.views(torch.arange(segment.numel))
    assert [view.tolist() for view in views[:4]] == [list(range(8)), [], list(range(8, 13)), [13]]
    assert [segment.owner(i) for i in (0, 7, 8, 12, 13, 14, 25)] == ["e", "e", "c", "c", "b", "a", "a"]
    views[2].zero_()
    assert views[2].data_ptr() != 0


def test_buckets_hold_one_dtype():
    layout = Layout.of({"a": (4,), "b": (4,), "c": (4,)}, "bucket", dtypes={"b": torch.bfloat16})
    assert [segment.names for segment in layout.segments] == [("c", "a"), ("b",)]


def test_a_model_is_one_segment_of_each_dtype():
    """To write one segment back in several dtypes, the host would need the indices, and would wait for the device."""
    shapes = dict.fromkeys("abcd", (4,))
    layout = Layout.of(shapes, "model", dtypes={"b": torch.bfloat16}, group_of={"a": 1})
    assert [segment.names for segment in layout.segments] == [("d", "c"), ("b",), ("a",)]


def test_digest_tells_layouts_apart():
    layouts = [Layout.of(SHAPES, "layer"), Layout.of(SHAPES, "model"), Layout.of({**SHAPES, "a": (4, 3)}, "model")]
    assert len({layout.digest for layout in layouts}) == 3
    assert Layout.of(SHAPES, "model").digest == Layout.of(dict(SHAPES), "model").digest


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shapes": {}}, "No trainable parameters"),
        ({"shapes": {"a": (2,)}, "granularity": "row"}, "granularity='row' is not known; choose from layer, bucket"),
        ({"shapes": {"a": (2,)}, "bucket_cap_mb": 0}, "bucket_cap_mb=0 must be"),
        ({"shapes": {"a": (2**16, 2**15)}, "granularity": "model"}, r"2,147,483,648 elements.*granularity='bucket'"),
    ],
)
def test_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(**kwargs)
