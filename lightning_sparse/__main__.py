"""`python -m lightning_sparse`: Lightning's command line (see `lightning_sparse.cli`), and `advise`."""

import sys

if __name__ == "__main__":  # False in the processes that a `_spawn` strategy starts
    if sys.argv[1:2] == ["advise"]:
        from lightning_sparse.advise import main as advise

        advise(sys.argv[2:])
    else:
        from lightning_sparse.cli import main

        main()
