"""`python -m reproductions`: see `reproductions.command`."""

from reproductions.command import main

if __name__ == "__main__":  # False in processes that a finding spawns
    main()
