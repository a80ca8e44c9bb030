"""`python -m reproductions NAME` reproduces a finding of a paper in minutes, in a clone of the repository.

Each finding is a module of this package, with _ instead of - in its name. The module defines `FINDING`, a `Finding`
with its config, its runs, a figure and a verdict. `frame` contains the common code.
"""

FINDINGS = {
    "memsgd": "Mem-SGD with a few entries of each gradient trains as well as SGD (Stich et al. 2018, arXiv 1809.07599)",
    "gaussiank-contraction": "TopK leaves less than (1 − k/d)² of Gaussian vectors (Shi et al. 2019, arXiv 1911.08772)",
    "gaussiank-selection": "a Gaussian's threshold chooses faster than a top-k by torch (the same paper)",
    "gaussiank-distributions": "gradient plus residual is bell-shaped in each layer (the same paper)",
    "sparse-accuracy": "TopK, GaussianK and gTopK train as dense gradients do (arXiv 1911.08772 and 1901.04359)",
    "error-feedback": "error feedback fixes sign and top-k (Karimireddy et al. 2019, arXiv 1901.09847)",
    "volume": "gTopK sends O(k log P) words, TopK O(kP) (Shi et al. 2019, arXiv 1901.04359)",
    "scaling-efficiency": "gTopK scales best at 1 Gbit/s, GaussianK beats dense at 10 (arXiv 1901.04359, 1911.08772)",
    "layer-wise": "layer by layer is as good as the whole model at once (Dutta et al. 2020, AAAI)",
    "terngrad-qsgd": "a few bits for each value suffice (arXiv 1610.02132, 1705.07878; 1-bit SGD: Seide et al. 2014)",
    "signsgd": "a majority vote tolerates attackers below one half (Bernstein et al. 2019, arXiv 1810.05291)",
}
"""Claim and publication of each finding, by name."""

PACKAGES = ("matplotlib", "pandas", "sklearn")
"""Additional packages that findings need; the extra `examples` installs them."""
