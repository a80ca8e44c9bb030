"""Requirements for every method in the table. A new row is tested automatically."""

import inspect
import math
from dataclasses import fields, replace

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import (
    METHODS,
    Method,
    NonFiniteGradient,
    Reducer,
    SparseDDPStrategy,
    UpdateRule,
    method,
    simulate,
)
from lightning_sparse.aggregators import AllReduceMean, Mean
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Identity, Sparsifier, TopK
from lightning_sparse.memory import NoMemory, Residual
from lightning_sparse.methods import resolve_updates
from lightning_sparse.options import ReducerOptions
from lightning_sparse.updates.exchange import DeltaExchange
from tests.processes import run_ranks
from tests.support.representatives import DISTINCT, REPRESENTATIVES
from tests.support.tiers import in_diagonals, one_in, tiers
from tests.support.training import KINDS, flat, gradients, kept, make, train
from tests.support.update_training import Net, weights

# All pairs of method and granularity, and of method and number of ranks, but that 5 and 8 take turns.
SIZES, GRANULARITIES = [1, 2, 3, 5, 8], ["layer", "bucket", "model"]
CASES = [
    (name, size, GRANULARITIES[(row + column) % 3])
    for row, name in enumerate(DISTINCT)
    for column, size in enumerate([*SIZES[:3], SIZES[3 + row % 2]])
]


# In the quick tier representatives with three ranks, each of which gets every third of the kinds.
QUICK = [case for case in CASES if case[1] == 3 and case[0] in REPRESENTATIVES]
WITH_KINDS = [(*case, KINDS) for case in CASES] + [(*case, KINDS[at % 3 :: 3]) for at, case in enumerate(QUICK)]


@pytest.mark.parametrize(("name", "size", "granularity", "kinds"), tiers(WITH_KINDS, WITH_KINDS[len(CASES) :]))
def test_equal_on_all_ranks_and_nothing_lost(name, size, granularity, kinds):
    for kind in kinds:
        ranks = simulate(size, lambda comm, kind=kind: train(comm, name, kind, granularity))
        for _, received, _, _ in ranks:
            assert torch.equal(received, ranks[0][1]), kind
        if not METHODS[name].traits.conserves:
            continue
        given = sum(rank[0] for rank in ranks)
        found = size * ranks[0][1] + sum(rank[2] for rank in ranks)
        if not make(name).memory.error_feedback and kind in ("bf16", "mixed"):
            # No memory keeps the rounding errors of bf16: half a unit in the last of 8 bits in each step.
            tolerance = 4 * 2**-9 * 8 * given.abs().max()
        else:
            # A few fp32 roundings for every rank and step, relative to the largest value that ever stood there.
            largest = max(flat(gradients(kind, r, s)).abs().max() for r in range(size) for s in range(4)) * 4 * size
            tolerance = largest * 2**-22
        # Denormals are rounded to a multiple of the smallest.
        assert (given - found).abs().max() <= tolerance + 64 * 2**-149, kind


@pytest.mark.parametrize("name", tiers(DISTINCT, ["topk", "gtopk", "int4"]))
def test_same_numbers_over_processes_and_run_to_run(name):
    from lightning_sparse import ProcessGroupComm

    threads = simulate(2, lambda comm: train(comm, name, "heavy", "bucket"))
    again = simulate(2, lambda comm: train(comm, name, "heavy", "bucket"))
    processes = run_ranks(2, lambda rank: train(ProcessGroupComm(), name, "heavy", "bucket"))
    for a, b, c in zip(threads, again, processes, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(z))


@pytest.mark.parametrize(("name", "bad"), in_diagonals(DISTINCT, [math.nan, math.inf, -math.inf], 3))
def test_a_non_finite_gradient_is_an_error_everywhere(name, bad):
    def rank(comm: Comm) -> str:
        reducer = Reducer(make(name), comm, granularity="model")
        reducer.reduce_(gradients("normal", comm.rank, 0))
        grads = gradients("normal", comm.rank, 1)
        if comm.rank == 1:
            grads["wide"][3, 4] = bad
        with pytest.raises(NonFiniteGradient) as caught:
            reducer.reduce_(grads)
        return str(caught.value)

    texts = simulate(3, rank)
    assert len(set(texts)) == 1
    assert "'wide' is not finite on rank 1 at step 1" in texts[0]


exact = pytest.mark.parametrize("name", [name for name in DISTINCT if METHODS[name].traits.exact is not None])
conserves = pytest.mark.parametrize("name", [name for name in DISTINCT if METHODS[name].traits.conserves])


@exact
def test_finite_sums_that_overflow_are_no_error(name):
    def rank(comm: Comm) -> Tensor:
        grads = {"w": torch.full((100,), 3e38)}
        Reducer(make(name), comm).reduce_(grads)
        return grads["w"]

    for out in simulate(2, rank):
        assert out.max() == pytest.approx(3e38)


@conserves
def test_results_too_large_for_fp16_wait_in_the_residual(name):
    """In two steps of 60000, the excess over fp16's maximum, 65504, must be neither infinite nor lost."""

    def rank(comm: Comm) -> tuple[Tensor, Tensor]:
        reducer = Reducer(make(name, 0.02), comm, granularity="model")
        received = torch.zeros(100, dtype=torch.float64)
        for _ in range(2):
            grads = {"w": torch.full((100,), 60000.0, dtype=torch.float16)}
            reducer.reduce_(grads)
            received += grads["w"].double()
        elements = reducer.state_dict()["elements"]
        return received, sum((e["w"].double() for e in elements.values()), torch.zeros(100))

    ranks = simulate(2, rank)
    assert torch.isfinite(ranks[0][0]).all()
    assert torch.equal(2 * ranks[0][0] + ranks[0][1] + ranks[1][1], torch.full((100,), 4 * 60000.0).double())


@exact
def test_exact_options_give_the_mean(name):
    def rank(comm: Comm) -> Tensor:
        grads = gradients("heavy", comm.rank, 0)
        Reducer(method(name, **METHODS[name].traits.exact), comm).reduce_(grads)
        return flat(grads)

    mean = sum(flat(gradients("heavy", r, 0)).float() / 3 for r in range(3))
    for out in simulate(3, rank):
        assert torch.allclose(out.float(), mean, rtol=1e-6, atol=0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8's Adam calls item() on the default device")
@one_in(3)
@pytest.mark.parametrize("name", DISTINCT)
def test_another_default_device_changes_nothing(name):
    """Tensors made on "meta" by mistake have no values."""

    def rank(comm: Comm, device: str | None) -> tuple[Tensor, Tensor]:
        exchanged = replace(make(name), update_rule=make(name).update_rule or UpdateRule())
        given = [gradients("normal", comm.rank, step) for step in range(exchanged.local_steps)]
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(exchanged.local_steps):
            net.backward(comm.rank, step)
        torch.set_default_device(device)  # of this thread
        try:
            reducer = Reducer(make(name), comm)
            for grads in given:
                reducer.reduce_(grads)
            reducer.load_state_dict(reducer.state_dict())
            updates = DeltaExchange(Reducer(exchanged, comm, exchanged="update"), net, [optimizer])
            updates.begin(optimizer)
            optimizer.step()
            updates.exchange(optimizer)
        finally:
            torch.set_default_device(None)
        return flat(grads), weights(net)

    plain, other = (simulate(2, lambda comm, device=device: rank(comm, device)) for device in (None, "meta"))
    assert all(torch.equal(*pair) for ranks in zip(plain, other, strict=True) for pair in zip(*ranks, strict=True))


@pytest.mark.parametrize("name", DISTINCT)
def test_global_random_state_is_left_alone(name):
    before = torch.get_rng_state()
    simulate(2, lambda comm: train(comm, name, "normal", "model"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "granularity"), in_diagonals(DISTINCT, ["layer", "model"], 4))
def test_saved_state_goes_on_bit_for_bit(name, granularity):
    def rank(comm: Comm) -> bool:
        straight = Reducer(make(name), comm, granularity="layer")
        outs = []
        for step in range(4):
            grads = gradients("normal", comm.rank, step)
            straight.reduce_(grads)
            outs.append(flat(grads))
            if step == 1:
                saved = straight.state_dict()
        resumed = Reducer(make(name), comm, granularity="layer")
        resumed.load_state_dict(saved)
        for step in (2, 3):
            grads = gradients("normal", comm.rank, step)
            resumed.reduce_(grads)
            if not torch.equal(flat(grads), outs[step]):
                return False
        other = Reducer(make(name), comm, granularity=granularity)
        other.load_state_dict(saved)
        other.setup(gradients("normal", 0, 0))
        return bool(torch.equal(kept(other), sum(map(flat, saved["elements"].values())) + torch.zeros(())))

    assert simulate(2, rank) == [True, True]


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_complete(name):
    recipe = METHODS[name]
    assert recipe.citation
    made = make(name)
    assert isinstance(made, Method)
    assert made == make(name)
    assert hash(made) == hash(make(name)), "configuration is frozen"
    if isinstance(made.compressor, Sparsifier):
        assert made.density == 0.05
        assert method(name).density == {"sparseloco": 1 / 64}.get(name, 0.001)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_every_part_is_reached_by_its_name(name):
    """If the defaults of its parts are given by name, a method is the same as without them."""
    made, spec = method(name), METHODS[name]
    parts = [made.compressor, made.memory, made.aggregator, made.update_rule]
    values = {f.name: getattr(part, f.name) for part in parts if part for f in fields(part) if f.name in spec.options}
    assert set(spec.options) - {"density"} <= set(values)
    assert method(name, **values) == made
    assert len(spec.options) == len(set(spec.options)), "no two parts share a name"
    # A strategy has these options besides a method's. The options named last mean the same in both.
    others = {*inspect.signature(SparseDDPStrategy.__init__).parameters}
    others |= {*inspect.signature(DDPStrategy.__init__).parameters}
    others |= {*inspect.signature(DistributedDataParallel.__init__).parameters}
    assert {*spec.options} & others <= {"density", "local_steps", "overlap"}


def test_constants_are_those_of_the_papers():
    """Lin et al. 2018, momentum factor masking; Douillard et al. 2023, table 5; Sarfi et al. 2025, algorithm 1."""
    assert method("dgc").update_rule.momentum == "mask"
    assert method("memsgd").update_rule.momentum == "keep"
    diloco, sparseloco = method("diloco"), method("sparseloco")
    assert (diloco.local_steps, diloco.update_rule.outer_lr, diloco.update_rule.outer_momentum) == (500, 0.7, 0.9)
    assert (sparseloco.local_steps, sparseloco.memory.decay, sparseloco.density) == (30, 0.95, 64 / 4096)
    assert method("signum").memory.beta == 0.9
    assert method("terngrad").compressor.clip == 2.5


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("qsgd", {"levels": 7}, lambda made: made.compressor.levels == 7),
        ("signum", {"beta": 0.5}, lambda made: made.memory.beta == 0.5),
        ("trimmed_mean", {"trim": 0.25}, lambda made: made.aggregator.trim == 0.25),
        ("doublesqueeze", {"second": 3, "value_format": "int8"}, lambda made: made.aggregator.second == 3),
        ("diloco", {"outer_lr": 0.5}, lambda made: made.update_rule.outer_lr == 0.5 and made.local_steps == 500),
        ("sparseloco", {"decay": 0.5, "density": 0.1}, lambda made: made.memory.decay == 0.5),
    ],
)
def test_options_reach_their_part(name, options, found):
    assert found(method(name, **options))
    assert found(SparseDDPStrategy(name, **options)._options.method)
    assert found(resolve_updates(name, **{"density": None, **options})[0])


@pytest.mark.parametrize(("ranks", "density"), [(1, 0.003), (2, 0.003), (4, 0.003), (8, 0.00424), (16, 0.006)])
def test_what_updates_send_where_nothing_is_said(ranks, density):
    chosen, options = resolve_updates("topk", None, ranks=ranks)
    assert chosen.density == pytest.approx(density, rel=0.001)
    assert chosen.compressor.value_format == "int2"
    assert options.density_warmup == pytest.approx([8 * density, 4 * density, 2 * density], rel=0.001)
    assert options.density_warmup_steps == 15


def test_what_is_said_about_updates_holds():
    """A density turns all defaults off; a warm-up, or a format of values, is taken in place of the default one."""
    none = ReducerOptions(density_warmup=())
    assert resolve_updates("topk", 0.01) == (method("topk", density=0.01), none)
    rounded = method("topk", density=0.01, value_format="int4")
    assert resolve_updates("topk", 0.01, value_format="int4") == (rounded, none)
    for options in (ReducerOptions(density_warmup=(0.1,), density_warmup_steps=5, seed=3), none):
        assert resolve_updates("topk", None, options)[1] == options
    assert resolve_updates("gaussiank", None, value_format="int8")[0].compressor.value_format == "int8"
    own = method("topk")
    assert resolve_updates(own, None) == (own, none)
    for name in ("sparseloco", "memsgd", "dgc", "int4", "powersgd", "dense"):  # they have a rule, or no density
        assert resolve_updates(name, None) == (method(name), none)


@pytest.mark.parametrize("name", [name for name, spec in METHODS.items() if "density" in spec.options])
def test_every_sparse_method_has_a_default_for_updates(name):
    chosen, options = resolve_updates(name, None)
    if METHODS[name].update_rule is None:
        assert chosen.density == 0.003
        assert len(options.density_warmup) == 3
        # ScaleCom and RandK add values up on the way.
        assert getattr(chosen.compressor, "value_format", None) == {"scalecom": "float32", "randk": "float32"}.get(
            name, "int2"
        )


def test_randk_is_worse_than_topk():
    """At equal density, random entries contain less of the gradient, so the residual is larger."""
    left = {}
    for name in ("topk", "randk"):
        ranks = simulate(2, lambda comm, name=name: train(comm, name, "heavy", "model"))
        left[name] = sum(rank[2].norm().item() for rank in ranks)
    assert left["randk"] > 2 * left["topk"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: method("topkk"), ValueError, r"'topkk' is not known; choose from dense, topk.*Did you mean 'topk'\?"),
        (lambda: method("topk", density=0), ValueError, r"TopK\(density=0\): density must be in \(0, 1\]"),
        (lambda: method("topk", density=1.5), ValueError, r"TopK\(density=1.5\)"),
        (lambda: method("topk", density=math.nan), ValueError, r"TopK\(density=nan\)"),
        (lambda: method("topk", density="0.1"), ValueError, r"TopK\(density='0.1'\)"),
        (
            lambda: method("topk", colour="red"),
            TypeError,
            r"no option 'colour'; it has density, [a-z_, ]*\.$",
        ),
        (lambda: method("powersgd", levels=3), TypeError, r"it has rank\. 'levels' is an option of qsgd\.$"),
        (
            lambda: method("topk", local_steps=4),
            TypeError,
            r"Method\(\.\.\., update_rule=UpdateRule\(local_steps=\.\.\.\)\)\.$",
        ),
        (lambda: method("dense", density=0.1), TypeError, "'dense' has no option 'density'"),
        (
            lambda: Method(TopK(), aggregator=AllReduceMean()),
            ValueError,
            r"AllReduceMean\(\) cannot aggregate what TopK\(density=0.001.*\) sends",
        ),
        (lambda: Method(Residual()), TypeError, r"Method\(compressor=Residual\(\)\): compressor must be a Compressor"),
        (lambda: Method(TopK(), memory=Mean()), TypeError, "memory must be a Memory"),
        (lambda: Reducer(3, None), TypeError, r"method=3: give a method"),
        (lambda: Reducer("dense", None, density_warmup=[0.1]), ValueError, "no density to warm up"),
        (lambda: Reducer("topk", None, density_warmup=[2]), ValueError, r"density_warmup\(density=2\)"),
        (lambda: Reducer("topk", None, density_warmup_steps=3), ValueError, "density_warmup_steps=3"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_dense_method_is_identity():
    assert method("dense") == Method(Identity(), NoMemory(), AllReduceMean())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("efsignsgd", {"momentum": "mask"}),
        ("diloco", {"momentum": "pay_out"}),
        ("local_sgd", {"momentum": "mask", "local_steps": 2}),
    ],
)
def test_an_option_of_the_exchange_without_effect_is_an_error(name, options):
    with pytest.raises(ValueError, match="has no effect"):
        method(name, **options)
    method(name, **{**options, "momentum": "keep"})
