"""One style for all figures: that of `lightning_sparse.reproduce`."""

from lightning_sparse.reproduce.plots import LINES, line, panels, plt, write

__all__ = ["LINES", "line", "panels", "plt", "write"]
