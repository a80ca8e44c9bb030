"""`python -m lightning_sparse`: see `lightning_sparse.cli`."""

from lightning_sparse.cli import main

if __name__ == "__main__":  # not in the processes that a `_spawn` strategy starts
    main()
