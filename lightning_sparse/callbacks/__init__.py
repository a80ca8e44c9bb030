"""Callbacks that log the effects of compression. They work with both Lightning namespaces.

Trainer(strategy="gaussiank_ddp", callbacks=[GradientDistribution(), ContractionRatio(), CommunicationMonitor()])
"""

from lightning_sparse.callbacks.communication_monitor import CommunicationMonitor
from lightning_sparse.callbacks.contraction_ratio import ContractionRatio
from lightning_sparse.callbacks.gradient_distribution import GradientDistribution

__all__ = ["CommunicationMonitor", "ContractionRatio", "GradientDistribution"]
