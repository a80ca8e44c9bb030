"""Methods that trained as well as dense training in this project's benchmarks."""

TRAINED = {
    "adamw": {"topk": 8, "gaussiank": 2, "int4": 8, "int8": 2},
    "sgd": {"int4": 2, "int8": 2},
}
"""Largest number of workers with which a method trained as well as dense training in this project's benchmarks.

The keys are the optimizer and the method. With AdamW and default options, a GPT's final loss was at most 2 % higher
(`language.csv`, `comparison_gpt_adamw.csv`). If gradients were clipped and β₂ was 0.95, it was 1 to 3 % higher with
four workers, in few runs (`confirmation.csv`). With SGD the same holds for quantizers
(`comparison_gpt_sgd.csv`). Sparse gradients ended higher there. No other method is recommended. A node whose ranks
average gradients is one worker: two nodes of eight ranks ended 1.5 % higher, and eight of two 1.9 % (`frontier.csv`).
"""
WITH_UPDATES = {"RMSprop", "Adagrad", "Adadelta", "Adafactor", "Prodigy"}
"""Optimizers with which the loss with exchanged updates by default was at most 2 % higher than with dense averages
(`optimizers.csv`), besides AdamW. Lamb and ADOPT were run at density 0.01. Others of Adam's kind, such as NAdam, were
not run for it."""
ABOVE_DENSE = {"Muon", "Ranger", "SOAP", "AdEMAMix", "Lookahead", "DAdaptSGD"}
"""Optimizers with which the loss with exchanged updates was more than 2 % higher, besides SGD and Lion."""
DELAYED = 4
"""Largest number of workers for TopK updates with AdamW and overlap="next_step" (`language.csv`)."""
BFLOAT16 = 8
"""Largest number of workers for dense all-reduce of bfloat16 gradients with AdamW (`language.csv`)."""
SHARDED = 2
"""Largest number of replicas for TopK updates with AdamW, if FSDP2 shards them (`sharded.csv`)."""
