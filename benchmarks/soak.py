"""Two thousand training steps in which everything happens that can go wrong: `python -m benchmarks.soak`."""

from tests.long.soak import main

if __name__ == "__main__":
    main()
