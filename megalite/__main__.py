"""`python -m megalite`, for torchrun."""

from megalite.launch.cli import main

if __name__ == "__main__":
    main()
