"""Rows of `METHODS` for comparison: published methods that perform worse than the core's methods in our benchmarks."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_sparse.aggregators import AllReduceMean, Mean, TwoPass
from lightning_sparse.compressors import Identity, TopK
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.mstopk import MSTopK
from lightning_sparse.contrib.onebit import OneBit
from lightning_sparse.contrib.order_statistics import CoordinateMedian, TrimmedMean
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.randk import RandK
from lightning_sparse.contrib.sampled_topk import SampledTopK
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.contrib.shared_scale import SharedScale
from lightning_sparse.contrib.sidco import SIDCo
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.memory import Momentum, NoMemory, Residual
from lightning_sparse.method_spec import MethodSpec, Traits
from lightning_sparse.update_rule import UpdateRule

CONTRIB: Mapping[str, MethodSpec] = {
    "randk": MethodSpec(RandK, Residual(), AllReduceMean(), "Stich et al. 2018, arXiv 1809.07599"),
    "sidco": MethodSpec(SIDCo, Residual(), Mean(), "Abdelmoniem et al. 2021, arXiv 2101.10761"),
    "mstopk": MethodSpec(MSTopK, Residual(), Mean(), "Shi et al. 2021, arXiv 2010.10458"),
    "dgc": MethodSpec(
        SampledTopK,
        Residual(),
        Mean(),
        "Lin et al. 2018, arXiv 1712.01887",
        update_rule=UpdateRule(momentum="mask", rescale=False),
    ),
    "scalecom": MethodSpec(TopK, Residual(), ScaleCom(), "Chen et al. 2020, NeurIPS"),
    "qsgd": MethodSpec(
        QSGD, NoMemory(), Mean(), "Alistarh et al. 2017, arXiv 1610.02132", Traits(False, None, {"bucket": 64})
    ),
    "signsgd": MethodSpec(
        Sign, NoMemory(), MajorityVote(), "Bernstein et al. 2019, arXiv 1810.05291", Traits(False, None)
    ),
    "signum": MethodSpec(
        Sign, Momentum(), MajorityVote(), "Bernstein et al. 2018, arXiv 1802.04434", Traits(False, None)
    ),
    "efsignsgd": MethodSpec(
        ScaledSign,
        Residual(),
        Mean(),
        "Karimireddy et al. 2019, arXiv 1901.09847",
        Traits(True, None),
        UpdateRule(momentum="keep", rescale=False),
    ),
    "onebit": MethodSpec(OneBit, Residual(), TwoPass(), "Seide et al. 2014, Interspeech", Traits(True, None)),
    "terngrad": MethodSpec(
        TernGrad, NoMemory(), SharedScale(), "Wen et al. 2017, arXiv 1705.07878", Traits(False, None)
    ),
    "median": MethodSpec(
        Identity, NoMemory(), CoordinateMedian(), "Yin et al. 2018, arXiv 1803.01498", Traits(False, None)
    ),
    "trimmed_mean": MethodSpec(
        Identity, NoMemory(), TrimmedMean(), "Yin et al. 2018, arXiv 1803.01498", Traits(False, None)
    ),
}
