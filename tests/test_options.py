"""Invalid options raise an error at once, in one sentence that names option and value."""

import numpy as np
import pytest
import torch

from lightning_sparse import METHODS, Reducer, SparseDDPStrategy, method, simulate

BAD = [
    (
        {"density_warmup": [0.1], "density_warmup_steps": 1e2},
        r"density_warmup_steps=100.0 must be a whole number of steps, 1 or more",
    ),
    ({"density_warmup": [0.1], "density_warmup_steps": "100"}, r"density_warmup_steps='100' must be a whole number"),
    (
        {"density_warmup": [0.1], "density_warmup_steps": 0},
        r"density_warmup_steps=0 must be a whole number of steps, 1 or more",
    ),
    ({"density_warmup": [0.1], "density_warmup_steps": True}, r"density_warmup_steps=True must be a whole number"),
    ({"density_warmup": 0.25}, r"density_warmup=0.25 must be a list of densities"),
    ({"density_warmup": np.array(0.25)}, r"density_warmup=array\(0.25\) must be a list of densities"),
    ({"density_warmup": "0.25"}, r"density_warmup='0.25' must be a list of densities"),
    ({"density_warmup": 1}, r"density_warmup=1 must be a list of densities"),
    ({"density_warmup": ["0.25"]}, r"density_warmup\(density='0.25'\): density must be in \(0, 1\]"),
    ({"clip_norm": "1"}, r"clip_norm='1' must be the largest 2-norm of a rank's gradient, a number above 0"),
    ({"clip_norm": True}, r"clip_norm=True must be the largest 2-norm of a rank's gradient, a number above 0"),
    ({"clip_norm": float("nan")}, r"clip_norm=nan must be the largest 2-norm of a rank's gradient, a number above 0"),
    ({"bucket_cap_mb": "25"}, r"bucket_cap_mb='25' must be a positive number of MiB"),
    ({"bucket_cap_mb": float("inf")}, r"bucket_cap_mb=inf must be a positive number of MiB"),
    ({"seed": 1.5}, r"seed=1.5 must be a whole number"),
    ({"seed": None}, r"seed=None must be a whole number"),
    ({"granularity": 3}, r"granularity=3 is not known; choose from layer, bucket, model"),
    ({"granularity": ["layer"]}, r"granularity=\['layer'\] is not known"),
    ({"on_nonfinite": "ignore"}, r"on_nonfinite='ignore' is not known; choose from raise, skip"),
    ({"on_nonfinite": None}, r"on_nonfinite=None is not known"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(options) for options, _ in BAD])
def test_an_option_that_makes_no_sense_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        SparseDDPStrategy("topk", **options)
    with pytest.raises(ValueError, match=message):
        simulate(1, lambda comm: Reducer("topk", comm, **options))


def test_options_of_one_door_only():
    with pytest.raises(ValueError, match=r"hierarchical='yes' must be True or False"):
        SparseDDPStrategy("topk", hierarchical="yes")
    with pytest.raises(ValueError, match=r"loss_scale=1024.0 must be a function that returns the present loss scale"):
        simulate(1, lambda comm: Reducer("topk", comm, loss_scale=1024.0))


@pytest.mark.parametrize("density", ["0.1", True, float("nan"), [0.1], 1.5, np.float32(2), np.bool_(True)])
@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if "density" in spec.options])
def test_a_density_that_makes_no_sense_is_refused_by_every_sparsifier(name, density):
    with pytest.raises(ValueError, match=r"\(density=.*\): density must be in \(0, 1\], the fraction"):
        method(name, density=density)


def test_numbers_of_numpy_are_numbers():
    options = {
        "density_warmup": np.array([0.5, 0.25]),
        "density_warmup_steps": np.int64(3),
        "clip_norm": np.float32(2.0),
    }
    plain = {"density_warmup": [0.5, 0.25], "density_warmup_steps": 3, "clip_norm": 2.0}
    wide = SparseDDPStrategy(
        "topk", density=np.float32(0.125), seed=np.int32(7), bucket_cap_mb=np.float64(3), **options
    )
    same = SparseDDPStrategy("topk", density=0.125, seed=7, bucket_cap_mb=3.0, **plain)
    # Ranks compare settings as text, and random numbers are drawn from the seed's text.
    assert repr(wide._method) == repr(same._method)
    assert repr(wide._options) == repr(same._options)
    assert repr(wide._ddp_kwargs) == repr(same._ddp_kwargs)

    def drawn(comm, seed):
        grads = {"w": torch.arange(1.0, 101.0)}
        Reducer(method("randk", density=np.float64(0.125)), comm, seed=seed, granularity="model").reduce_(grads)
        return grads["w"]

    (first,), (second,) = (simulate(1, lambda comm, seed=seed: drawn(comm, seed)) for seed in (np.int64(7), 7))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("qsgd", "levels", 7),
        ("qsgd", "bucket", 64),
        ("mstopk", "rounds", 20),
        ("int4", "block", 32),
        ("int8", "block", 2),
    ],
)
def test_whole_numbers_of_numpy_are_numbers_to_methods_too(name, option, value):
    for kind in (np.int64, np.uint8):
        assert repr(SparseDDPStrategy(name, **{option: kind(value)})._method) == repr(method(name, **{option: value}))
    for wrong in (float(value), np.float32(value), np.bool_(True), np.int64(0), np.array([value]), str(value)):
        with pytest.raises(ValueError, match=rf"\({option}=.*\): {option} must be "):
            SparseDDPStrategy(name, **{option: wrong})


def test_a_warm_up_by_whole_numbers_of_numpy_takes_its_steps():
    def densities(comm):
        reducer = Reducer(
            method("topk", density=0.1), comm, density_warmup=(np.float32(0.5),), density_warmup_steps=np.int64(2)
        )
        seen = []
        for _ in range(3):
            seen.append(reducer.density)
            reducer.reduce_({"w": torch.ones(10)})
        return seen

    assert simulate(1, densities) == [[0.5, 0.5, 0.1]]
