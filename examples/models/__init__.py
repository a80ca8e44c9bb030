"""Networks, and LightningModules that train them.

    Classifier(ResNet20(in_channels=1))      # images; VGG16 and convnet also work
    LanguageModel(GPT(context=128))          # bytes of text; LSTM also works

These two modules have no optimizer: set it on the command line with `optimizer:` and `lr_scheduler:`.
`OneCycleClassifier` has its own.
"""

from examples.models.classifier import Classifier, OneCycleClassifier
from examples.models.convnet import convnet
from examples.models.gpt import GPT
from examples.models.language_model import LanguageModel
from examples.models.networks import LSTM, VGG16, ResNet20

__all__ = ["GPT", "LSTM", "VGG16", "Classifier", "LanguageModel", "OneCycleClassifier", "ResNet20", "convnet"]
